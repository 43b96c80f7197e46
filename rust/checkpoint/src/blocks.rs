//! ggml's block types as integer codes with scales.
//!
//! The functions run when a model is loaded. Loops run over arrays of constant length without branches or overflow
//! checks, which the compiler vectorises for any target.

use penstock_types::{Activations, CodeBits, Grid, GridRows, Minimum, ScaleFormat, f16_to_f32};

use crate::storage::Storage;

/// The half-precision number at a byte offset of a block.
#[inline(always)]
pub(crate) fn half_at<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// A block of `ELEMENTS` codes in `GROUPS` groups.
pub(crate) struct Block<const ELEMENTS: usize, const GROUPS: usize> {
    codes: [u8; ELEMENTS],
    /// The factor of all scales: 1 if the scales are not nested.
    outer_scale: f32,
    scales: [f32; GROUPS],
    /// The factor of all minima: 1 if the scales are not nested, 0 if the codes are centred.
    outer_minimum: f32,
    minima: [f32; GROUPS],
}

impl<const ELEMENTS: usize, const GROUPS: usize> Block<ELEMENTS, GROUPS> {
    fn centred(codes: [u8; ELEMENTS], outer_scale: f32, scales: [f32; GROUPS]) -> Self {
        Block { codes, outer_scale, scales, outer_minimum: 0.0, minima: [0.0; GROUPS] }
    }

    /// The weights of a block of centred codes, rounded after the product.
    #[inline(always)]
    pub(crate) fn write_centred(&self, centre: u8, out: &mut [f32; ELEMENTS]) {
        let groups = self.codes.chunks_exact(ELEMENTS / GROUPS).zip(&self.scales);
        for (out, (codes, scale)) in out.chunks_exact_mut(ELEMENTS / GROUPS).zip(groups) {
            let scale = self.outer_scale * scale;
            for (out, code) in out.iter_mut().zip(codes) {
                *out = scale * (f32::from(*code) - f32::from(centre));
            }
        }
    }

    /// The weights of a block with minima, rounded after the product and after the sum.
    #[inline(always)]
    pub(crate) fn write_with_minima(&self, out: &mut [f32; ELEMENTS]) {
        let groups = self.codes.chunks_exact(ELEMENTS / GROUPS).zip(&self.scales).zip(&self.minima);
        for (out, ((codes, scale), minimum)) in out.chunks_exact_mut(ELEMENTS / GROUPS).zip(groups) {
            let (scale, minimum) = (self.outer_scale * scale, self.outer_minimum * minimum);
            for (out, code) in out.iter_mut().zip(codes) {
                *out = scale * f32::from(*code) + minimum;
            }
        }
    }
}

/// The grid that holds the values of a type exactly; `None` for plain types, and for quantised types that are
/// dequantised when a model is loaded.
pub(crate) fn grid(storage: Storage) -> Option<Grid> {
    use CodeBits::{Eight, Five, Four, Six};
    use Minimum::{Centred, Stored};
    use ScaleFormat::{F16, Nested};
    let (bits, group, scales, minimum) = match storage {
        Storage::Q4_0 => (Four, 32, F16, Centred),
        Storage::Q4_1 => (Four, 32, F16, Stored),
        Storage::Q5_0 => (Five, 32, F16, Centred),
        Storage::Q5_1 => (Five, 32, F16, Stored),
        Storage::Q8_0 | Storage::Iq4Nl => (Eight, 32, F16, Centred),
        Storage::Q4K => (Four, 32, Nested, Stored),
        Storage::Q5K => (Five, 32, Nested, Stored),
        Storage::Q6K => (Six, 16, Nested, Centred),
        Storage::F64
        | Storage::F32
        | Storage::F16
        | Storage::Bf16
        | Storage::Q2K
        | Storage::Q3K
        | Storage::Iq4Xs => {
            return None;
        }
    };
    Some(Grid { bits, group: Some(group), scales, minimum, activations: Activations::Int8 })
}

/// Reads the blocks of row `row` of `out`, which has the grid of `storage`.
pub(crate) fn read_row(storage: Storage, bytes: &[u8], row: usize, out: &mut GridRows) {
    match storage {
        Storage::Q4_0 => each_block(bytes, row, out, q4_0),
        Storage::Q4_1 => each_block(bytes, row, out, q4_1),
        Storage::Q5_0 => each_block(bytes, row, out, q5_0),
        Storage::Q5_1 => each_block(bytes, row, out, q5_1),
        Storage::Q8_0 => each_block(bytes, row, out, q8_0),
        Storage::Iq4Nl => each_block(bytes, row, out, iq4_nl),
        Storage::Q4K => each_block(bytes, row, out, q4_k),
        Storage::Q5K => each_block(bytes, row, out, q5_k),
        Storage::Q6K => each_block(bytes, row, out, q6_k),
        _ => panic!("{storage} has no grid; this is a bug"),
    }
}

#[inline(always)]
fn each_block<const BYTES: usize, const ELEMENTS: usize, const GROUPS: usize>(
    bytes: &[u8],
    row: usize,
    out: &mut GridRows,
    unpack: impl Fn(&[u8; BYTES]) -> Block<ELEMENTS, GROUPS>,
) {
    let (blocks, rest) = bytes.as_chunks::<BYTES>();
    assert!(rest.is_empty(), "the input is complete blocks; this is a bug");
    let first = row * blocks.len();
    for (index, bytes) in (first..).zip(blocks) {
        let block = unpack(bytes);
        out.codes[index * ELEMENTS..][..ELEMENTS].copy_from_slice(&block.codes);
        out.scales[index * GROUPS..][..GROUPS].copy_from_slice(&block.scales);
        if !out.minima.is_empty() {
            out.minima[index * GROUPS..][..GROUPS].copy_from_slice(&block.minima);
        }
        if let Some(outer_scale) = out.outer_scales.get_mut(index) {
            *outer_scale = block.outer_scale;
        }
        if let Some(outer_minimum) = out.outer_minima.get_mut(index) {
            *outer_minimum = block.outer_minimum;
        }
    }
}

/// The low nibbles of 16 bytes, then the high nibbles.
#[inline(always)]
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    let mut codes = [0; 32];
    let (low, high) = codes.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
    codes
}

/// As [`nibbles`], with the fifth bits of the codes in the order of the codes.
#[inline(always)]
fn five_bits(bits: &[u8], bytes: &[u8]) -> [u8; 32] {
    let bits = u32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
    let mut codes = nibbles(bytes);
    for (at, code) in codes.iter_mut().enumerate() {
        *code |= (bits >> at & 1) as u8 * 16;
    }
    codes
}

#[inline]
pub(crate) fn q4_0(block: &[u8; 18]) -> Block<32, 1> {
    Block::centred(nibbles(&block[2..]), 1.0, [half_at(block, 0)])
}

#[inline]
pub(crate) fn q4_1(block: &[u8; 20]) -> Block<32, 1> {
    Block {
        codes: nibbles(&block[4..]),
        outer_scale: 1.0,
        scales: [half_at(block, 0)],
        outer_minimum: 1.0,
        minima: [half_at(block, 2)],
    }
}

#[inline]
pub(crate) fn q5_0(block: &[u8; 22]) -> Block<32, 1> {
    Block::centred(five_bits(&block[2..6], &block[6..]), 1.0, [half_at(block, 0)])
}

#[inline]
pub(crate) fn q5_1(block: &[u8; 24]) -> Block<32, 1> {
    Block {
        codes: five_bits(&block[4..8], &block[8..]),
        outer_scale: 1.0,
        scales: [half_at(block, 0)],
        outer_minimum: 1.0,
        minima: [half_at(block, 2)],
    }
}

#[inline]
pub(crate) fn q8_0(block: &[u8; 34]) -> Block<32, 1> {
    Block::centred(std::array::from_fn(|at| block[2 + at] ^ 0x80), 1.0, [half_at(block, 0)])
}

/// The values of the 4-bit indices of the IQ4 types.
pub(crate) const IQ4_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

#[inline]
pub(crate) fn iq4_nl(block: &[u8; 18]) -> Block<32, 1> {
    let codes = nibbles(&block[2..]).map(|index| IQ4_VALUES[usize::from(index)].cast_unsigned() ^ 0x80);
    Block::centred(codes, 1.0, [half_at(block, 0)])
}

/// The 6-bit scales and minima of the groups of 32, packed into 12 bytes. Groups 0..4 are in the low six bits of bytes
/// 0..4 (scales) and 4..8 (minima). Groups 4..8 have their low four bits in the nibbles of bytes 8..12 and their high
/// two bits in the top bits of bytes 0..8.
fn scales_and_minima(packed: &[u8]) -> [[f32; 8]; 2] {
    let scale = |group: usize| match group {
        0..4 => packed[group] & 63,
        _ => packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
    };
    let minimum = |group: usize| match group {
        0..4 => packed[group + 4] & 63,
        _ => packed[group + 4] >> 4 | packed[group] >> 6 << 4,
    };
    [
        std::array::from_fn(|group| f32::from(scale(group))),
        std::array::from_fn(|group| f32::from(minimum(group))),
    ]
}

/// Four pairs of runs of 32 elements: the low and the high nibbles of 32 bytes.
#[inline(always)]
fn paired_nibbles(quants: &[u8]) -> [u8; 256] {
    let mut codes = [0; 256];
    for (codes, quants) in codes.chunks_exact_mut(64).zip(quants.chunks_exact(32)) {
        let (low, high) = codes.split_at_mut(32);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(quants) {
            (*low, *high) = (byte & 15, byte >> 4);
        }
    }
    codes
}

#[inline]
pub(crate) fn q4_k(block: &[u8; 144]) -> Block<256, 8> {
    let [scales, minima] = scales_and_minima(&block[4..16]);
    let codes = paired_nibbles(&block[16..]);
    // The file stores the minima negated.
    Block { codes, outer_scale: half_at(block, 0), scales, outer_minimum: -half_at(block, 2), minima }
}

#[inline]
pub(crate) fn q5_k(block: &[u8; 176]) -> Block<256, 8> {
    let [scales, minima] = scales_and_minima(&block[4..16]);
    let mut codes = paired_nibbles(&block[48..]);
    // Bit `i` of byte `j` is the fifth bit of element `j` of run `i`.
    for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
        for (code, fifth) in codes.iter_mut().zip(&block[16..48]) {
            *code |= (fifth >> run & 1) << 4;
        }
    }
    Block { codes, outer_scale: half_at(block, 0), scales, outer_minimum: -half_at(block, 2), minima }
}

#[inline]
pub(crate) fn q6_k(block: &[u8; 210]) -> Block<256, 16> {
    let (low_bits, rest) = block.split_at(128);
    let (high_bits, scales) = rest[..80].split_at(64);
    let mut codes = [0; 256];
    let halves = low_bits.chunks_exact(64).zip(high_bits.chunks_exact(32));
    for (codes, (low, high)) in codes.chunks_exact_mut(128).zip(halves) {
        // Four runs of 32 elements. Runs 0 and 2 are the nibbles of one half of `low`, runs 1 and 3 of the other. Each
        // byte of `high` contains the upper two bits of one element of every run.
        for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
            let low = &low[run % 2 * 32..][..32];
            for (code, (low, high)) in codes.iter_mut().zip(low.iter().zip(high)) {
                *code = low >> (run / 2 * 4) & 15 | (high >> (run * 2) & 3) << 4;
            }
        }
    }
    let scales = std::array::from_fn(|group| f32::from(scales[group].cast_signed()));
    Block::centred(codes, half_at(block, 208), scales)
}
