//! Matrices of quantised weights: their layout on the device, `cuda/quantised_matrix.cuh`.

use std::ops::Range;

use half::{bf16, f16};
use penstock_kernels::quantise;
use penstock_types::{
    Activations, CodeBits, Grid, GridRows, Minimum, OUTER_GROUP, ScaleFormat, WeightFormat,
};

use crate::seam::WeightSource;

/// Rows of a tile. Ranges of rows that are packed begin at a multiple of it.
pub(super) const TILE_ROWS: usize = 16;
/// Columns of a block.
pub(super) const BLOCK: usize = 64;
const MATRIX_ALIGNMENT: usize = 64;
const LANES: usize = 32;

/// Whether a matrix can have this format: all that the CPU has, with groups of any power of two from 32 columns on,
/// and 8 columns or a multiple.
pub(super) fn supports(grid: &Grid, columns: usize) -> bool {
    if grid.bits == CodeBits::E4m3 && (grid.scales == ScaleFormat::Nested || grid.minimum != Minimum::Centred)
    {
        return false;
    }
    let has_group = match grid.group {
        None => grid.scales != ScaleFormat::Nested,
        Some(16) => grid.minimum == Minimum::Centred,
        Some(group) => group.is_power_of_two() && group >= 32,
    };
    let is_nested = grid.scales == ScaleFormat::Nested;
    let has_outer = !is_nested
        || grid.minimum != Minimum::ZeroPoint
            && grid.group.is_some_and(|group| usize::from(group) <= OUTER_GROUP);
    has_group && has_outer && columns > 0 && columns.is_multiple_of(8)
}

/// Bytes of some rows: a multiple of 64, the same for each [`TILE_ROWS`].
pub(super) fn bytes(rows: usize, columns: usize, grid: &Grid) -> usize {
    rows.div_ceil(TILE_ROWS).saturating_mul(Tile::new(grid, columns).bytes)
}

/// Reads rows and packs them. Rows of another format are quantised.
pub(super) fn read(source: &dyn WeightSource, grid: &Grid, rows: Range<usize>, out: &mut [u8]) {
    let columns = source.columns();
    let is_stored = match source.format() {
        WeightFormat::Grid(from) => Grid { activations: from.activations, ..*grid } == from,
        WeightFormat::Float(_) => false,
    };
    let (mut codes, mut floats) = (GridRows::default(), Vec::new());
    for (first, out) in rows.clone().step_by(TILE_ROWS).zip(out.chunks_mut(bytes(1, columns, grid))) {
        let tile = first..rows.end.min(first + TILE_ROWS);
        if is_stored {
            source.read_grid(tile.clone(), &mut codes);
        } else {
            floats.resize(tile.len() * columns, 0.0);
            source.read(tile.clone(), &mut floats);
            quantise(grid, &floats, columns, &mut codes);
        }
        pack(grid, &codes, tile.len(), columns, out);
    }
}

/// Packs the first `num_rows` of `rows` into `out`, of as many [`bytes()`].
fn pack(grid: &Grid, rows: &GridRows, num_rows: usize, columns: usize, out: &mut [u8]) {
    let tile = Tile::new(grid, columns);
    assert_eq!(out.len(), bytes(num_rows, columns, grid), "bytes of packed codes; this is a bug");
    for (index, out) in out.chunks_exact_mut(tile.bytes).enumerate() {
        let first = index * TILE_ROWS;
        tile.pack(rows, first..num_rows.min(first + TILE_ROWS), out);
    }
}

/// The layout of a tile.
struct Tile<'a> {
    grid: &'a Grid,
    columns: usize,
    /// Columns of the smallest unit that has a scale.
    chunk: usize,
    /// Scales and minima of a chunk.
    values: usize,
    blocks: usize,
    units: usize,
    /// Offsets of the scales and of the outer factors.
    scales: usize,
    outers: usize,
    bytes: usize,
}

impl<'a> Tile<'a> {
    fn new(grid: &'a Grid, columns: usize) -> Self {
        let chunk = chunk(grid);
        let values = if grid.minimum == Minimum::Centred { 2 } else { 4 };
        let blocks = columns.div_ceil(BLOCK);
        let units = if chunk < BLOCK { blocks } else { grid.groups(columns) };
        let scales = blocks * LANES * size_of::<u32>() * grid.bits.count() as usize;
        let outers = scales + units * 8 * (BLOCK / chunk) * values * grid.scales.bytes();
        let bytes = outers + grid.outer_groups(columns) * 8 * values * size_of::<f16>();
        let bytes = bytes.next_multiple_of(MATRIX_ALIGNMENT);
        Self { grid, columns, chunk, values, blocks, units, scales, outers, bytes }
    }

    /// Packs a tile of rows.
    fn pack(&self, from: &GridRows, rows: Range<usize>, out: &mut [u8]) {
        out[self.outers..].fill(0);
        let block_bytes = self.scales / self.blocks;
        // A code minus its centre, in two's complement, is the code with its highest bit flipped.
        let centre = self.grid.bits.centre() as u8;
        for (block, out) in out[..self.scales].chunks_exact_mut(block_bytes).enumerate() {
            let first = block * BLOCK;
            let count = BLOCK.min(self.columns - first);
            let mut codes = [[0; BLOCK]; TILE_ROWS];
            for (row, codes) in rows.clone().zip(&mut codes) {
                let from = &from.codes[row * self.columns + first..][..count];
                codes.iter_mut().zip(from).for_each(|(code, from)| *code = from ^ centre);
            }
            self.pack_block(&codes, out);
        }
        let groups = self.grid.groups(self.columns);
        let record = (self.outers - self.scales) / (self.units * 8);
        for (unit, out) in out[self.scales..self.outers].chunks_exact_mut(8 * record).enumerate() {
            for chunk in 0..BLOCK / self.chunk {
                let group = unit * (BLOCK / self.chunk) + chunk;
                self.pack_values(self.grid.scales, &rows, chunk, out, |row, is_minimum| {
                    let values = if is_minimum { &from.minima } else { &from.scales };
                    if group < groups { values[row * groups + group] } else { 0.0 }
                });
            }
        }
        let groups = self.grid.outer_groups(self.columns);
        let out = &mut out[self.outers..][..groups * 8 * self.values * size_of::<f16>()];
        for (group, out) in out.chunks_exact_mut(8 * self.values * size_of::<f16>()).enumerate() {
            self.pack_values(ScaleFormat::F16, &rows, 0, out, |row, is_minimum| {
                let values = if is_minimum { &from.outer_minima } else { &from.outer_scales };
                values[row * groups + group]
            });
        }
    }

    /// Packs the codes of a block.
    fn pack_block(&self, codes: &[[u8; BLOCK]; TILE_ROWS], out: &mut [u8]) {
        let bits = self.grid.bits.count() as usize;
        let (low, high) = out.split_at_mut(LANES * 16);
        for lane in 0..LANES {
            let mut words = [0_u32; 8];
            for mma in 0..4 {
                for register in 0..4 {
                    let row = lane / 4 + register % 2 * 8;
                    let column = self.first_column(mma, lane % 4) + register / 2 * 2;
                    let [first, second] = [codes[row][column], codes[row][column + 1]].map(u32::from);
                    add_pair(bits, &mut words, mma, register, first | second << 16);
                }
            }
            let bytes: &[u8] = bytemuck::cast_slice(&words[..bits]);
            low[lane * 16..][..16].copy_from_slice(&bytes[..16]);
            let rest = bytes.len() - 16;
            high[lane * rest..][..rest].copy_from_slice(&bytes[16..]);
        }
    }

    /// The first of the 4 columns of a lane for an mma.
    fn first_column(&self, mma: usize, quad: usize) -> usize {
        if self.chunk == 16 { 16 * mma + 4 * quad } else { 32 * (mma / 2) + 8 * quad + 4 * (mma % 2) }
    }

    /// Packs the values of a chunk into the records of a unit. `value` has them by row, and whether it is a minimum.
    fn pack_values(
        &self,
        format: ScaleFormat,
        rows: &Range<usize>,
        chunk: usize,
        out: &mut [u8],
        value: impl Fn(usize, bool) -> f32,
    ) {
        let size = format.bytes();
        for (lane, out) in out.chunks_exact_mut(out.len() / 8).enumerate() {
            for index in 0..self.values {
                let row = rows.start + lane + index % 2 * 8;
                let value = if row < rows.end { value(row, index >= 2) } else { 0.0 };
                let out = &mut out[(chunk * self.values + index) * size..][..size];
                match format {
                    ScaleFormat::F32 => out.copy_from_slice(&value.to_ne_bytes()),
                    ScaleFormat::F16 => out.copy_from_slice(&f16::from_f32(value).to_ne_bytes()),
                    ScaleFormat::Bf16 => out.copy_from_slice(&bf16::from_f32(value).to_ne_bytes()),
                    ScaleFormat::Nested => out.copy_from_slice(&(value as i8).to_ne_bytes()),
                }
            }
        }
    }
}

/// Adds two codes, of which the second is 16 bits higher, to the words of a lane.
fn add_pair(bits: usize, words: &mut [u32; 8], mma: usize, register: usize, pair: u32) {
    if bits == 8 {
        words[2 * mma + register % 2] |= pair << (8 * (register / 2));
        return;
    }
    words[mma] |= (pair & 0x000f_000f) << (4 * register);
    let high = pair >> 4 & 0x0003_0003;
    match bits {
        5 => words[4] |= high << (4 * mma + register),
        6 => words[4 + mma / 2] |= high << (2 * (4 * (mma % 2) + register)),
        _ => {}
    }
}

/// Columns of the smallest unit that has a scale: 16, 32, or 64 for all larger groups.
pub(super) fn chunk(grid: &Grid) -> usize {
    grid.group.map_or(BLOCK, usize::from).min(BLOCK)
}

/// Whether `gemm_quantised_warpgroup.cu` has kernels of a format and its activations.
pub(super) fn has_warpgroups(grid: &Grid) -> bool {
    grid.activations != Activations::Fp8 && chunk(grid) >= 32
}

/// The variant of `gemm_quantised.cu`, and of `gemm_quantised_warpgroup.cu`, that has the kernels of a format and its
/// activations.
pub(super) fn variant(grid: &Grid) -> String {
    let code = match grid.bits {
        CodeBits::Four => "code4",
        CodeBits::Five => "code5",
        CodeBits::Six => "code6",
        CodeBits::Eight => "code8",
        CodeBits::E4m3 => "e4m3",
    };
    let scales = match grid.scales {
        ScaleFormat::F32 => "scale32",
        ScaleFormat::F16 | ScaleFormat::Bf16 => "scale16",
        ScaleFormat::Nested => "nested",
    };
    let minimum = if grid.minimum == Minimum::Centred { "centred" } else { "affine" };
    let rows = match grid.activations {
        Activations::Int8 => "int8",
        Activations::Fp8 => "fp8",
        Activations::Float => "bf16",
    };
    format!("{code},{},{scales},{minimum},{rows}", chunk(grid))
}

#[cfg(test)]
mod tests {
    use super::super::matrix::PACKED_LAYOUT;
    use super::*;

    /// Format, rows, columns, and the hash of the packed bytes of [`numbered`], which
    /// tests/support/kernels/quantised_matrix.py writes.
    const HASHES: &str =
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/cuda_quantised.txt"));

    /// The variants of `gemm_quantised.cu` that a matrix can have, which tests/kernels/test_kernels_cuda_compile.py
    /// compiles. Those of `gemm_quantised_warpgroup.cu` are marked.
    const VARIANTS: &str =
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/cuda_quantised_variants.txt"));

    #[test]
    fn variants_of_the_tests_are_those_of_supported_formats() {
        let mut found = std::collections::BTreeSet::new();
        let mut add = |grid: &Grid| {
            let mark = if has_warpgroups(grid) { " warpgroups" } else { "" };
            found.insert(variant(grid) + mark);
        };
        for bits in ["code4", "code5", "code6", "code8", "e4m3"] {
            for scales in ["f32", "f16", "bf16", "nested"] {
                for minimum in ["centred", "stored", "zero_point"] {
                    for group in ["0", "16", "32", "64", "128", "256", "1024"] {
                        let grid = grid(bits, group, scales, minimum);
                        if !supports(&grid, 4096) {
                            continue;
                        }
                        add(&grid);
                        let activations = match grid.bits {
                            CodeBits::E4m3 if chunk(&grid) < BLOCK => continue,
                            CodeBits::E4m3 => Activations::Fp8,
                            _ => Activations::Int8,
                        };
                        add(&Grid { activations, ..grid });
                    }
                }
            }
        }
        assert!(VARIANTS.lines().eq(found.iter().map(String::as_str)), "{found:#?}");
    }

    fn grid(bits: &str, group: &str, scales: &str, minimum: &str) -> Grid {
        Grid {
            bits: match bits {
                "code4" => CodeBits::Four,
                "code5" => CodeBits::Five,
                "code6" => CodeBits::Six,
                "code8" => CodeBits::Eight,
                _ => CodeBits::E4m3,
            },
            group: group.parse().ok().filter(|group| *group > 0),
            scales: match scales {
                "f32" => ScaleFormat::F32,
                "f16" => ScaleFormat::F16,
                "bf16" => ScaleFormat::Bf16,
                _ => ScaleFormat::Nested,
            },
            minimum: match minimum {
                "centred" => Minimum::Centred,
                "stored" => Minimum::Stored,
                _ => Minimum::ZeroPoint,
            },
            activations: Activations::Float,
        }
    }

    /// Rows of numbers that follow from their index.
    fn numbered(grid: &Grid, rows: usize, columns: usize) -> GridRows {
        let mask = (1_usize << grid.bits.count()) - 1;
        let fill = |values: &mut [f32], value: &dyn Fn(i32) -> f32| {
            (0..).zip(values).for_each(|(index, out)| *out = value(index));
        };
        let is_nested = grid.scales == ScaleFormat::Nested;
        let mut new = GridRows::new(grid, rows, columns);
        new.codes.iter_mut().enumerate().for_each(|(i, code)| *code = ((i * 7 + i / 11) & mask) as u8);
        fill(&mut new.scales, &|i| {
            if is_nested { (i * 5 % 256 - 128) as f32 } else { (i % 61 - 30) as f32 / 64.0 }
        });
        fill(&mut new.minima, &|i| match grid.minimum {
            Minimum::ZeroPoint => (i * 3 % 256) as f32,
            _ if is_nested => (i * 3 % 256 - 128) as f32,
            _ => (i % 53 - 26) as f32 / 32.0,
        });
        fill(&mut new.outer_scales, &|i| (i % 13 + 1) as f32 / 1024.0);
        fill(&mut new.outer_minima, &|i| (i % 11 - 5) as f32 / 256.0);
        new
    }

    /// FNV-1a.
    fn hash(bytes: &[u8]) -> u64 {
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
    }

    #[test]
    fn packed_bytes_are_those_of_the_kernel_tests() {
        let mut count = 0;
        for line in HASHES.lines() {
            let [bits, group, scales, minimum, rows, columns, expected] =
                line.split(' ').collect::<Vec<_>>()[..]
            else {
                panic!("{line}");
            };
            let (rows, columns) = (rows.parse().expect("a number"), columns.parse().expect("a number"));
            let grid = grid(bits, group, scales, minimum);
            assert!(supports(&grid, columns), "{line}");
            let from = numbered(&grid, rows, columns);
            let mut packed = vec![0xff; bytes(rows, columns, &grid)];
            pack(&grid, &from, rows, columns, &mut packed);
            assert_eq!(format!("{:016x}", hash(&packed)), expected, "{line}");
            count += 1;
        }
        assert!(count >= 18);
        assert_eq!(
            (PACKED_LAYOUT, hash(HASHES.as_bytes())),
            ("cuda-rows-2", 0xc7d9_242c_1f6d_e775),
            "if the bytes have changed, files of the previous layout must be refused: give PACKED_LAYOUT a new number"
        );
    }

    #[test]
    fn tiles_are_packed_one_by_one() {
        let grid = grid("code6", "16", "nested", "centred");
        let (rows, columns) = (40, 520);
        let from = numbered(&grid, rows, columns);
        let mut expected = vec![0; bytes(rows, columns, &grid)];
        pack(&grid, &from, rows, columns, &mut expected);
        let (first, rest) = expected.split_at(bytes(TILE_ROWS, columns, &grid));
        let mut rows_of_first = from.clone();
        rows_of_first.codes.truncate(TILE_ROWS * columns);
        let mut packed = vec![0; first.len()];
        pack(&grid, &rows_of_first, TILE_ROWS, columns, &mut packed);
        assert_eq!(packed, first);
        let mut others = GridRows::new(&grid, rows - TILE_ROWS, columns);
        others.codes.copy_from_slice(&from.codes[TILE_ROWS * columns..]);
        others.scales.copy_from_slice(&from.scales[TILE_ROWS * grid.groups(columns)..]);
        others.outer_scales.copy_from_slice(&from.outer_scales[TILE_ROWS * grid.outer_groups(columns)..]);
        let mut packed = vec![0; rest.len()];
        pack(&grid, &others, rows - TILE_ROWS, columns, &mut packed);
        assert_eq!(packed, rest);
    }

    #[test]
    fn int4_takes_at_most_4_25_bits_with_16_bit_scales() {
        let bits_of = |minimum| 8 * bytes(4096, 4096, &grid("code4", "128", "f16", minimum));
        assert_eq!(bits_of("centred") as f64 / f64::from(1 << 24), 4.125);
        assert_eq!(bits_of("zero_point") as f64 / f64::from(1 << 24), 4.25);
    }

    #[test]
    fn every_grid_of_the_cpu_is_supported() {
        for bits in ["code4", "code5", "code6", "code8", "e4m3"] {
            for group in ["0", "16", "32", "64", "128", "256"] {
                for scales in ["f32", "f16", "bf16", "nested"] {
                    for minimum in ["centred", "stored", "zero_point"] {
                        let grid = grid(bits, group, scales, minimum);
                        assert!(!penstock_kernels::is_supported(&grid) || supports(&grid, 512), "{grid:?}");
                    }
                }
            }
        }
        assert!(!supports(&grid("code4", "32", "f16", "centred"), 100));
        assert!(!supports(&grid("e4m3", "32", "f16", "stored"), 64));
    }
}
