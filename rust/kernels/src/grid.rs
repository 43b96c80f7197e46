//! The layout of a [`Grid`] matrix inside its panels.
//!
//! ```text
//! panel   [scales][minima][outer scales][outer minima] padded to 64 bytes, then [codes]
//! scales  [groups][16], and so on: lanes are output rows
//! codes   blocks of 32 columns
//!
//! 8 bits  [8 quads][16][4]: a 32-bit lane has a quad, 4 consecutive columns, one in each byte; also floating-point codes
//! 4 bits  [4 pairs of quads][16][4]: byte j has column j of the first quad (low half) and of the second (high half)
//! 5 bits  4 bits, then [16][4]: bit q of byte j is the highest bit of column j of quad q
//! 6 bits  4 bits, then [2][16][4]: bits 2q and 2q + 1 of byte j of word h are the highest of column j of quad 4h + q
//! ```
//!
//! A quad is what a dot product of bytes reads (`vpdpbusd`, `vpmaddubsw`, `sdot`, AMX), and one 32-bit broadcast is
//! four activations of a token.

use half::{bf16, f16};
use penstock_types::{Activations, CodeBits, Grid, GridRows, Minimum, ScaleFormat, f16_to_f32};

use crate::panel::LANES;

/// Columns of a block. The columns of a matrix are padded to a multiple; the activations of the padding are zero.
pub(crate) const BLOCK: usize = 32;
/// Columns of the longest integer sum. Scales are applied at least at every multiple, so that a product is the same
/// wherever it is divided.
pub(crate) const SPAN: usize = 1024;

/// The layout of one panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GridLayout {
    pub(crate) grid: Grid,
    pub(crate) columns: usize,
    pub(crate) minima: usize,
    pub(crate) outer_scales: usize,
    pub(crate) outer_minima: usize,
    /// The offset of the codes; the offsets above are those of the other parts.
    pub(crate) codes: usize,
    pub(crate) bytes: usize,
}

/// Bytes of the codes of a block.
pub(crate) const fn block_bytes(bits: CodeBits) -> usize {
    BLOCK * LANES * bits.count() as usize / 8
}

/// Whether a matrix can be stored in this format: groups of 16 columns with 6 bits, otherwise of 32 to 1024 columns, a
/// power of two. Floating-point codes have plain scales, no minimum, and no products of integers. Nested scales have no
/// zero points, because the product of a nested scale and a zero point is not exact.
pub fn is_supported(grid: &Grid) -> bool {
    if grid.bits == CodeBits::E4m3
        && (grid.scales == ScaleFormat::Nested
            || grid.minimum != Minimum::Centred
            || grid.activations == Activations::Int8)
    {
        return false;
    }
    if grid.bits != CodeBits::E4m3 && grid.activations == Activations::Fp8 {
        return false;
    }
    if grid.scales == ScaleFormat::Nested && grid.minimum == Minimum::ZeroPoint {
        return false;
    }
    match grid.group {
        None => grid.bits != CodeBits::Six && grid.scales != ScaleFormat::Nested,
        Some(16) => grid.bits == CodeBits::Six && grid.minimum == Minimum::Centred,
        Some(group) => {
            grid.bits != CodeBits::Six
                && group.is_power_of_two()
                && (BLOCK..=SPAN).contains(&usize::from(group))
        }
    }
}

impl GridLayout {
    pub(crate) fn new(grid: Grid, columns: usize) -> Self {
        debug_assert!(is_supported(&grid), "{grid:?}");
        let (groups, outer) = (grid.groups(columns), grid.outer_groups(columns));
        let scale = grid.scales.bytes();
        let minimum = match grid.minimum {
            Minimum::Centred => 0,
            Minimum::Stored => scale,
            Minimum::ZeroPoint => 1,
        };
        let minima = groups * LANES * scale;
        let outer_scales = minima + groups * LANES * minimum;
        let outer_minima = outer_scales + outer * LANES * 2;
        let end = outer_minima + if grid.minimum == Minimum::Stored { outer * LANES * 2 } else { 0 };
        let codes = end.next_multiple_of(64);
        let bytes = codes + columns.div_ceil(BLOCK) * block_bytes(grid.bits);
        Self { grid, columns, minima, outer_scales, outer_minima, codes, bytes }
    }

    /// Writes rows `rows` of `source` as the lanes of one panel. `out` is zeroed.
    pub(crate) fn pack(&self, source: &GridRows, lanes: usize, out: &mut [u8]) {
        let (grid, columns) = (&self.grid, self.columns);
        for lane in 0..lanes {
            let codes = &source.codes[lane * columns..][..columns];
            for (k, code) in codes.iter().enumerate() {
                self.write_code(&mut out[self.codes..], k, lane, *code);
            }
            let (groups, outer) = (grid.groups(columns), grid.outer_groups(columns));
            let width = grid.group.map_or(columns, usize::from);
            for group in 0..groups {
                let (from, to) = (lane * groups + group, group * LANES + lane);
                let scale = if self.has_nan(&codes[group * width..columns.min((group + 1) * width)]) {
                    f32::NAN
                } else {
                    source.scales[from]
                };
                write_number(out, 0, grid.scales, to, scale);
                match grid.minimum {
                    Minimum::Centred => {}
                    Minimum::Stored => write_number(out, self.minima, grid.scales, to, source.minima[from]),
                    Minimum::ZeroPoint => out[self.minima + to] = source.minima[from] as u8,
                }
            }
            for (part, at) in
                [(&source.outer_scales, self.outer_scales), (&source.outer_minima, self.outer_minima)]
            {
                // Without stored minima there are no outer minima.
                for index in 0..if part.is_empty() { 0 } else { outer } {
                    let value = part[lane * outer + index];
                    write_number(out, at, ScaleFormat::F16, index * LANES + lane, value);
                }
            }
        }
    }

    /// The inverse of [`pack`](Self::pack): writes the row of `lane` as row `row` of `out`.
    pub(crate) fn unpack(&self, panel: &[u8], lane: usize, row: usize, out: &mut GridRows) {
        let (grid, columns) = (&self.grid, self.columns);
        for (k, code) in out.codes[row * columns..][..columns].iter_mut().enumerate() {
            *code = self.read_code(&panel[self.codes..], k, lane);
        }
        let number = |at, format, group: usize| {
            let mut lanes = [0.0; LANES];
            read_numbers(panel, at, format, group * LANES, &mut lanes);
            lanes[lane]
        };
        let (groups, outer) = (grid.groups(columns), grid.outer_groups(columns));
        for group in 0..groups {
            out.scales[row * groups + group] = number(0, grid.scales, group);
            match grid.minimum {
                Minimum::Centred => {}
                Minimum::Stored => {
                    out.minima[row * groups + group] = number(self.minima, grid.scales, group);
                }
                Minimum::ZeroPoint => {
                    out.minima[row * groups + group] = self.zero_points(panel, group)[lane];
                }
            }
        }
        for (part, at) in
            [(&mut out.outer_scales, self.outer_scales), (&mut out.outer_minima, self.outer_minima)]
        {
            // Without stored minima there are no outer minima.
            for index in 0..if part.is_empty() { 0 } else { outer } {
                part[row * outer + index] = number(at, ScaleFormat::F16, index);
            }
        }
    }

    /// Whether a floating-point code is NaN. Products do not decode it, so the scale of its group is NaN instead.
    fn has_nan(&self, codes: &[u8]) -> bool {
        self.grid.bits == CodeBits::E4m3 && codes.iter().any(|code| code & 0x7f == 0x7f)
    }

    fn write_code(&self, codes: &mut [u8], k: usize, lane: usize, code: u8) {
        let block = &mut codes[k / BLOCK * block_bytes(self.grid.bits)..];
        let (quad, byte) = (k % BLOCK / 4, k % 4);
        if self.grid.bits.count() == 8 {
            block[quad * 64 + lane * 4 + byte] = code;
            return;
        }
        block[quad / 2 * 64 + lane * 4 + byte] |= (code & 15) << (quad % 2 * 4);
        match self.grid.bits {
            CodeBits::Five => block[256 + lane * 4 + byte] |= (code >> 4) << quad,
            CodeBits::Six => block[256 + quad / 4 * 64 + lane * 4 + byte] |= (code >> 4) << (quad % 4 * 2),
            _ => {}
        }
    }

    fn read_code(&self, codes: &[u8], k: usize, lane: usize) -> u8 {
        let block = &codes[k / BLOCK * block_bytes(self.grid.bits)..];
        let (quad, byte) = (k % BLOCK / 4, k % 4);
        if self.grid.bits.count() == 8 {
            return block[quad * 64 + lane * 4 + byte];
        }
        let low = block[quad / 2 * 64 + lane * 4 + byte] >> (quad % 2 * 4) & 15;
        let high = match self.grid.bits {
            CodeBits::Five => block[256 + lane * 4 + byte] >> quad & 1,
            CodeBits::Six => block[256 + quad / 4 * 64 + lane * 4 + byte] >> (quad % 4 * 2) & 3,
            _ => 0,
        };
        low | high << 4
    }

    /// The row of `lane` as float32.
    pub(crate) fn read_row(&self, panel: &[u8], lane: usize, out: &mut [f32]) {
        let width = self.grid.group.map_or(self.columns, usize::from);
        for (group, out) in out.chunks_mut(width).enumerate() {
            let (mut scales, mut minima) = ([0.0; LANES], [0.0; LANES]);
            self.decode_group(panel, group, &mut scales, &mut minima);
            let (scale, minimum, zero) = (scales[lane], minima[lane], self.zero_points(panel, group)[lane]);
            for (k, value) in out.iter_mut().enumerate() {
                let code = self.read_code(&panel[self.codes..], group * width + k, lane);
                let code = self.grid.bits.value(code);
                *value = match self.grid.minimum {
                    Minimum::Stored => scale * code + minimum,
                    // Rounded once: the difference of integers is exact.
                    Minimum::Centred | Minimum::ZeroPoint => scale * (code - zero),
                };
            }
        }
    }

    /// The scales and the minima of a group. Centred minima are not written.
    #[inline(always)]
    pub(crate) fn decode_group(
        &self,
        panel: &[u8],
        group: usize,
        scales: &mut [f32; LANES],
        minima: &mut [f32; LANES],
    ) {
        let grid = &self.grid;
        let at = group * LANES;
        read_numbers(panel, 0, grid.scales, at, scales);
        match grid.minimum {
            Minimum::Centred => {}
            Minimum::Stored => read_numbers(panel, self.minima, grid.scales, at, minima),
            Minimum::ZeroPoint => {
                let zero_points = &panel[self.minima + at..][..LANES];
                for lane in 0..LANES {
                    minima[lane] = -scales[lane] * f32::from(zero_points[lane]);
                }
            }
        }
        if grid.scales == ScaleFormat::Nested {
            let outer = group * grid.group.map_or(0, usize::from) / penstock_types::OUTER_GROUP * LANES;
            let mut factors = [0.0; LANES];
            read_numbers(panel, self.outer_scales, ScaleFormat::F16, outer, &mut factors);
            for lane in 0..LANES {
                scales[lane] *= factors[lane];
            }
            if grid.minimum == Minimum::Stored {
                read_numbers(panel, self.outer_minima, ScaleFormat::F16, outer, &mut factors);
                for lane in 0..LANES {
                    minima[lane] *= factors[lane];
                }
            }
        }
    }

    /// The code of zero of a group; unspecified if the minima are stored.
    #[inline(always)]
    pub(crate) fn zero_points(&self, panel: &[u8], group: usize) -> [f32; LANES] {
        let mut zeros = [self.grid.bits.centre() as f32; LANES];
        if self.grid.minimum == Minimum::ZeroPoint {
            let bytes = &panel[self.minima + group * LANES..][..LANES];
            for lane in 0..LANES {
                zeros[lane] = f32::from(bytes[lane]);
            }
        }
        zeros
    }
}

#[inline(always)]
fn read_numbers(bytes: &[u8], at: usize, format: ScaleFormat, first: usize, out: &mut [f32; LANES]) {
    let bytes = &bytes[at + first * format.bytes()..][..LANES * format.bytes()];
    match format {
        ScaleFormat::F32 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        ScaleFormat::F16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f16_to_f32(u16::from_le_bytes(*bytes));
            }
        }
        ScaleFormat::Bf16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
            }
        }
        ScaleFormat::Nested => {
            for (out, byte) in out.iter_mut().zip(bytes) {
                *out = f32::from(byte.cast_signed());
            }
        }
    }
}

fn write_number(bytes: &mut [u8], at: usize, format: ScaleFormat, index: usize, value: f32) {
    let at = at + index * format.bytes();
    match format {
        ScaleFormat::F32 => bytes[at..at + 4].copy_from_slice(&value.to_le_bytes()),
        ScaleFormat::F16 => bytes[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        ScaleFormat::Bf16 => bytes[at..at + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        ScaleFormat::Nested => bytes[at] = (value as i8).cast_unsigned(),
    }
}
