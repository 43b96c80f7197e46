//! The division of a product into blocks: large tiles, if the device has about a block for each multiprocessor then,
//! and smaller ones otherwise. No division changes a bit.

use std::mem::size_of;

use half::f16;
use penstock_cuda::Device;
use penstock_types::{Activations, CodeBits, Grid, Minimum};

use super::codes;
use crate::arena::Region;

/// Columns of a chain: a partial sum of a product, as in `gemm.cu`.
pub(super) const SEGMENT: usize = 2048;
/// Outputs and rows of the tiles of `gemm_middle`, of plain numbers; those of `gemm_narrow` have half the rows.
pub(super) const TILE: usize = 64;
/// Tiles of chains that there is room for, for each multiprocessor.
const CHAINS_PER_MULTIPROCESSOR: usize = 8;

/// The kernels of products, by the size of their tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tiles {
    Vectors,
    Narrow,
    Middle,
    Wide,
}

/// The tiles of the kernels of warpgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupTiles {
    Narrow,
    Middle,
    Wide,
    Widest,
}

impl GroupTiles {
    pub const ALL: [Self; 4] = [Self::Narrow, Self::Middle, Self::Wide, Self::Widest];

    /// The name of the kernel, without the type of numbers.
    pub fn kernel(self) -> &'static str {
        match self {
            Self::Narrow => "gemm_warpgroup_narrow",
            Self::Middle => "gemm_warpgroup_middle",
            Self::Wide => "gemm_warpgroup_wide",
            Self::Widest => "gemm_warpgroup_widest",
        }
    }

    /// Outputs and rows of a tile, and the stages of a block, as in `gemm_warpgroup.cu`.
    const fn shape(self) -> (usize, usize, usize) {
        match self {
            Self::Narrow => (64, 32, 8),
            Self::Middle => (64, 64, 6),
            Self::Wide => (128, 128, 6),
            Self::Widest => (128, 256, 4),
        }
    }

    /// Blocks that a multiprocessor has room for.
    const fn blocks(self) -> usize {
        match self {
            Self::Narrow | Self::Middle => 2,
            Self::Wide | Self::Widest => 1,
        }
    }

    /// The rate of a product of many tiles, as a share of that of the widest ones: measured on an H100.
    const fn rate(self) -> f64 {
        match self {
            Self::Narrow => 0.52,
            Self::Middle => 0.78,
            Self::Wide => 0.92,
            Self::Widest => 1.0,
        }
    }

    /// The tiles of a product.
    pub fn count(self, rows: usize, outputs: usize) -> usize {
        let (tile_outputs, tile_rows, _) = self.shape();
        rows.div_ceil(tile_rows) * outputs.div_ceil(tile_outputs)
    }

    /// Threads of a block: a warpgroup for 64 outputs.
    pub const fn threads(self) -> usize {
        2 * self.shape().0
    }

    /// Dynamic shared memory of a block: the stages, of 64 columns, from a multiple of 1024 bytes on.
    pub const fn shared_bytes(self) -> usize {
        let (outputs, rows, stages) = self.shape();
        1024 + stages * (outputs + rows) * 64 * size_of::<u16>()
    }
}

/// The tiles of the kernel of warpgroups for codes.
pub(super) struct CodesTiles;

impl CodesTiles {
    const OUTPUTS: usize = 128;
    const ROWS: usize = 128;
    /// Threads of a block.
    pub const THREADS: usize = 256;

    /// The tiles of a product.
    pub fn count(rows: usize, outputs: usize) -> usize {
        rows.div_ceil(Self::ROWS) * outputs.div_ceil(Self::OUTPUTS)
    }

    /// The rate of a product of many tiles, as a multiple of that of `gemm_middle`: measured on an H100 with groups of
    /// 32 and 128.
    fn rate(grid: &Grid) -> f64 {
        if grid.bits == CodeBits::Four && grid.activations == Activations::Int8 { 1.05 } else { 1.2 }
    }

    /// Dynamic shared memory of a block, as `Shared` of `codes_warpgroup.cu`, from a multiple of 1024 bytes on.
    pub fn shared_bytes(grid: &Grid) -> usize {
        const ALIGNMENT: usize = 1024;
        const SPAN_BYTES: usize = 8; // and those of the factors of a row
        let rows = Self::ROWS;
        let is_quantised = grid.activations != Activations::Float;
        let (blocks, stages) = if is_quantised { (2, 4) } else { (1, 6) };
        let x = rows * codes::BLOCK * size_of::<f16>(); // or two blocks of bytes
        let codes = blocks * Self::OUTPUTS * codes::BLOCK * grid.bits.count() as usize / 8;
        let spans = if is_quantised { 2 * blocks * rows * SPAN_BYTES } else { 0 };
        let has_factors = is_quantised || grid.minimum != Minimum::Centred;
        let slices = blocks * codes::BLOCK / codes::chunk(grid);
        let factors = if has_factors { 2 * slices * rows * SPAN_BYTES } else { 0 };
        let totals = rows * Self::OUTPUTS * size_of::<f32>();
        ALIGNMENT + stages * (x + codes + spans) + factors + totals
    }
}

/// The choice of tiles and segments for a device. If a product has few tiles, several blocks compute one tile: each
/// block computes a segment of the columns and stores a chain, and another launch adds the chains in order.
pub(super) struct Division {
    pub multiprocessors: usize,
    /// Memory of the chains; `None` before it is allocated.
    pub chains: Option<Region>,
}

impl Division {
    pub fn new(device: &Device) -> Self {
        Self { multiprocessors: device.multiprocessors as usize, chains: None }
    }

    /// The kernel of a product of plain numbers.
    pub fn tiles_of_floats(&self, rows: usize, outputs: usize) -> Tiles {
        match rows {
            0..=8 => Tiles::Vectors,
            9..=32 => Tiles::Narrow,
            65.. if self.are_enough(rows.div_ceil(128) * outputs.div_ceil(128)) => Tiles::Wide,
            _ => Tiles::Middle,
        }
    }

    /// The kernel of a product of codes that warpgroups do not compute. `wide` takes longer than `middle` where it has
    /// been measured: on an H100, with the formats that have a kernel of warpgroups.
    pub fn tiles_of_codes(&self, rows: usize, outputs: usize, has_warpgroups: bool) -> Tiles {
        let are_enough = |tile_rows| self.are_enough(rows.div_ceil(tile_rows) * outputs.div_ceil(128));
        match rows {
            0..=8 => Tiles::Vectors,
            33.. if !has_warpgroups && are_enough(64) => Tiles::Wide,
            _ if rows > 64 || are_enough(32) => Tiles::Middle,
            _ => Tiles::Narrow,
        }
    }

    /// Whether the kernel of warpgroups computes a product of codes in less time than `gemm_middle`: by their rates, and
    /// the share of padding and of multiprocessors that are idle at the end.
    pub fn are_warpgroups_faster(&self, grid: &Grid, rows: usize, outputs: usize) -> bool {
        const MIDDLE_ROWS: usize = 32; // of as many outputs
        let padded =
            |tiles: usize, tile_rows| (tiles.next_multiple_of(self.multiprocessors) * tile_rows) as f64;
        let middle = rows.div_ceil(MIDDLE_ROWS) * outputs.div_ceil(CodesTiles::OUTPUTS);
        let by_warpgroups = padded(CodesTiles::count(rows, outputs), CodesTiles::ROWS);
        by_warpgroups < CodesTiles::rate(grid) * padded(middle, MIDDLE_ROWS)
    }

    /// The kernel of a product of more than 8 rows of plain numbers, on devices with warpgroups: the one with the highest
    /// rate, less the share of padding and of multiprocessors that are idle at the end.
    pub fn tiles_of_warpgroups(&self, rows: usize, outputs: usize) -> GroupTiles {
        let score = |tiles: &GroupTiles| {
            let (tile_outputs, tile_rows, _) = tiles.shape();
            let at_a_time = tiles.blocks() * self.multiprocessors;
            let blocks = tiles.count(rows, outputs).next_multiple_of(at_a_time);
            tiles.rate() * (rows * outputs) as f64 / (blocks * tile_outputs * tile_rows) as f64
        };
        GroupTiles::ALL.into_iter().max_by(|a, b| score(a).total_cmp(&score(b))).expect("not empty")
    }

    /// The segments of a product by warpgroups, if its sums are divided: one of narrow tiles that leaves multiprocessors
    /// idle.
    pub fn segments_of_warpgroups(
        &self,
        tiles: GroupTiles,
        rows: usize,
        outputs: usize,
        inner: usize,
    ) -> Option<usize> {
        let (count, segments) = (tiles.count(rows, outputs), inner.div_ceil(SEGMENT));
        let has_room = count * segments <= CHAINS_PER_MULTIPROCESSOR * self.multiprocessors;
        let is_small = tiles == GroupTiles::Narrow && 10 * count < 7 * self.multiprocessors;
        (segments > 1 && is_small && has_room).then_some(segments)
    }

    /// Whether the multiprocessors have about a block each.
    fn are_enough(&self, tiles: usize) -> bool {
        4 * tiles >= 3 * self.multiprocessors
    }

    /// The segments of a product of narrow or middle tiles of plain numbers, if its sums are divided.
    pub fn segments(&self, rows: usize, outputs: usize, inner: usize) -> Option<usize> {
        let (tiles, segments) = (rows.div_ceil(TILE) * outputs.div_ceil(TILE), inner.div_ceil(SEGMENT));
        let has_room = tiles * segments <= CHAINS_PER_MULTIPROCESSOR * self.multiprocessors;
        (segments > 1 && tiles < self.multiprocessors && has_room).then_some(segments)
    }

    /// Bytes of the chains of steps of up to `rows` rows: 17 MB for 132 multiprocessors. A product that needs more is
    /// not divided.
    pub fn chains_bytes(&self, rows: usize) -> usize {
        let tile = TILE * TILE.min(rows) * size_of::<f32>();
        CHAINS_PER_MULTIPROCESSOR * self.multiprocessors * tile
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::ScaleFormat;

    use super::*;

    const DIVISION: Division = Division { multiprocessors: 132, chains: None };

    #[test]
    fn products_of_few_tiles_are_divided() {
        assert_eq!(DIVISION.segments(9, 4096, 4096), Some(2));
        assert_eq!(DIVISION.segments(128, 4096, 14336), Some(7));
        assert_eq!(DIVISION.segments(128, 6144, 4096), None);
        assert_eq!(DIVISION.segments(32, 28672, 4096), None);
        assert_eq!(DIVISION.segments(32, 4096, 2048), None);
        assert_eq!(DIVISION.segments(32, 8192, 28672), None);
    }

    #[test]
    fn tiles_are_as_large_as_the_multiprocessors_allow() {
        let floats = |rows, outputs| DIVISION.tiles_of_floats(rows, outputs);
        assert_eq!([floats(8, 28672), floats(9, 28672)], [Tiles::Vectors, Tiles::Narrow]);
        assert_eq!([floats(64, 28672), floats(65, 28672)], [Tiles::Middle, Tiles::Wide]);
        assert_eq!([floats(256, 4096), floats(512, 4096)], [Tiles::Middle, Tiles::Wide]);
        let codes = |rows, outputs| DIVISION.tiles_of_codes(rows, outputs, false);
        assert_eq!([codes(8, 28672), codes(9, 28672)], [Tiles::Vectors, Tiles::Middle]);
        assert_eq!([codes(33, 28672), codes(9, 4096)], [Tiles::Wide, Tiles::Narrow]);
        assert_eq!([codes(65, 4096), codes(256, 4096)], [Tiles::Middle, Tiles::Wide]);
        let beside_warpgroups = |rows, outputs| DIVISION.tiles_of_codes(rows, outputs, true);
        assert_eq!(
            [beside_warpgroups(33, 28672), beside_warpgroups(64, 4096)],
            [Tiles::Middle, Tiles::Narrow]
        );
    }

    #[test]
    fn tiles_of_warpgroups_leave_few_multiprocessors_idle() {
        use GroupTiles::{Middle, Narrow, Wide, Widest};
        let of = |rows| [6144, 4096, 28672].map(|outputs| DIVISION.tiles_of_warpgroups(rows, outputs));
        assert_eq!(of(9), [Narrow; 3]);
        assert_eq!(of(64), [Narrow, Narrow, Middle]);
        assert_eq!(of(128), [Middle, Narrow, Wide]);
        assert_eq!(of(256), [Wide, Middle, Widest]);
        assert_eq!(of(1024), [Wide, Widest, Widest]);
        assert_eq!(of(8192), [Widest; 3]);
        assert_eq!(GroupTiles::ALL.map(GroupTiles::shared_bytes), [99_328, 99_328, 197_632, 197_632]);
    }

    fn grid(bits: CodeBits, group: u16, activations: Activations) -> Grid {
        Grid { bits, group: Some(group), scales: ScaleFormat::F16, minimum: Minimum::Centred, activations }
    }

    #[test]
    fn warpgroups_multiply_codes_where_they_are_faster() {
        // As measured on an H100.
        let of = |bits, activations, rows| {
            let grid = grid(bits, 32, activations);
            [4096, 6144, 28672].map(|outputs| DIVISION.are_warpgroups_faster(&grid, rows, outputs))
        };
        let floats = |rows| of(CodeBits::Four, Activations::Float, rows);
        assert_eq!([floats(64), floats(96), floats(192)], [[false; 3]; 3]);
        assert_eq!([floats(128), floats(256)], [[false, false, true]; 2]);
        assert_eq!([floats(512), floats(8192)], [[true, false, true], [true; 3]]);
        let integers = |rows| of(CodeBits::Four, Activations::Int8, rows);
        assert_eq!([integers(256), integers(8192)], [[false; 3], [true; 3]]);
        assert_eq!(of(CodeBits::Eight, Activations::Int8, 128), [false, false, true]);
    }

    #[test]
    fn shared_memory_of_codes_is_that_of_the_kernels() {
        let bytes = |bits, group, activations| CodesTiles::shared_bytes(&grid(bits, group, activations));
        assert_eq!(bytes(CodeBits::Four, 32, Activations::Int8), 189_440);
        assert_eq!(bytes(CodeBits::Eight, 32, Activations::Int8), 222_208);
        assert_eq!(bytes(CodeBits::Four, 128, Activations::Float), 189_440);
        assert_eq!(bytes(CodeBits::Eight, 128, Activations::Float), 214_016);
    }

    #[test]
    fn products_of_few_tiles_of_warpgroups_are_divided() {
        let of = |rows, outputs, inner| {
            let tiles = DIVISION.tiles_of_warpgroups(rows, outputs);
            DIVISION.segments_of_warpgroups(tiles, rows, outputs, inner)
        };
        assert_eq!([of(16, 4096, 4096), of(16, 4096, 14336)], [Some(2), Some(7)]);
        assert_eq!([of(16, 6144, 4096), of(16, 4096, 2048), of(256, 4096, 14336)], [None; 3]);
    }

    #[test]
    fn chains_of_divided_products_have_room() {
        let mut divided = 0;
        for rows in 1..400 {
            for outputs in (8..9000).step_by(56) {
                for inner in [2056, 14336, 40000] {
                    let tiles = DIVISION.tiles_of_warpgroups(rows, outputs);
                    let divisions = [
                        DIVISION.segments(rows, outputs, inner),
                        DIVISION.segments_of_warpgroups(tiles, rows, outputs, inner),
                    ];
                    for segments in divisions.into_iter().flatten() {
                        divided += 1;
                        let bytes = segments * rows * outputs * size_of::<f32>();
                        assert!(bytes <= DIVISION.chains_bytes(rows));
                        assert!(bytes <= DIVISION.chains_bytes(4 * rows));
                    }
                }
            }
        }
        assert!(divided > 1000);
    }
}
