//! The tile shape of a product, and its split-K: large tiles, if the device has about a block for each multiprocessor
//! then, and smaller ones otherwise. No choice changes a bit.

use std::mem::size_of;

use half::f16;
use penstock_cuda::Device;
use penstock_types::{Activations, CodeBits, Grid, Minimum};

use super::quantised_matrix;
use crate::arena::Region;

/// Columns of a split; its partial sum is one chain, as in `gemm.cu`.
pub(super) const SPLIT_COLUMNS: usize = 2048;
/// Outputs and rows of the tiles of `gemm_middle`, of plain numbers; those of `gemm_narrow` have half the rows.
pub(super) const TILE: usize = 64;
/// Tiles of chains that there is room for, for each multiprocessor.
const CHAINS_PER_MULTIPROCESSOR: usize = 8;

/// The kernels of products, by their tile shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TileShape {
    Vectors,
    Narrow,
    Middle,
    Wide,
}

/// The tile shapes of the kernels of warpgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WarpgroupTileShape {
    Narrow,
    Middle,
    Wide,
    Widest,
}

impl WarpgroupTileShape {
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

/// The tile of the kernel of warpgroups for quantised weights.
pub(super) struct QuantisedWarpgroupTile;

impl QuantisedWarpgroupTile {
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

    /// Dynamic shared memory of a block, as `Shared` of `gemm_quantised_warpgroup.cu`, from a multiple of 1024 bytes
    /// on.
    pub fn shared_bytes(grid: &Grid) -> usize {
        const ALIGNMENT: usize = 1024;
        const SCALE_BYTES: usize = 8; // of x; and those of the factors of a row
        let rows = Self::ROWS;
        let is_quantised = grid.activations != Activations::Float;
        let (blocks, stages) = if is_quantised { (2, 4) } else { (1, 6) };
        let x = rows * quantised_matrix::BLOCK * size_of::<f16>(); // or two blocks of bytes
        let codes = blocks * Self::OUTPUTS * quantised_matrix::BLOCK * grid.bits.count() as usize / 8;
        let row_scales = if is_quantised { 2 * blocks * rows * SCALE_BYTES } else { 0 };
        let has_factors = is_quantised || grid.minimum != Minimum::Centred;
        let slices = blocks * quantised_matrix::BLOCK / quantised_matrix::chunk(grid);
        let factors = if has_factors { 2 * slices * rows * SCALE_BYTES } else { 0 };
        let totals = rows * Self::OUTPUTS * size_of::<f32>();
        ALIGNMENT + stages * (x + codes + row_scales) + factors + totals
    }
}

/// The choice of a tile shape and of split-K for a device. If a product has few tiles, several blocks compute one tile:
/// each block computes a split of the columns and stores a chain, and another launch adds the chains in order.
pub(super) struct TileSelector {
    pub multiprocessors: usize,
    /// Memory of the chains; `None` before it is allocated.
    pub chains: Option<Region>,
}

impl TileSelector {
    pub fn new(device: &Device) -> Self {
        Self { multiprocessors: device.multiprocessors as usize, chains: None }
    }

    /// The tile shape of a product of plain numbers.
    pub fn tile_shape(&self, rows: usize, outputs: usize) -> TileShape {
        match rows {
            0..=8 => TileShape::Vectors,
            9..=32 => TileShape::Narrow,
            65.. if self.are_enough(rows.div_ceil(128) * outputs.div_ceil(128)) => TileShape::Wide,
            _ => TileShape::Middle,
        }
    }

    /// The tile shape of a quantised product that warpgroups do not compute. `wide` takes longer than `middle` where it
    /// has been measured: on an H100, with the formats that have a kernel of warpgroups.
    pub fn quantised_tile_shape(&self, rows: usize, outputs: usize, has_warpgroups: bool) -> TileShape {
        let are_enough = |tile_rows| self.are_enough(rows.div_ceil(tile_rows) * outputs.div_ceil(128));
        match rows {
            0..=8 => TileShape::Vectors,
            33.. if !has_warpgroups && are_enough(64) => TileShape::Wide,
            _ if rows > 64 || are_enough(32) => TileShape::Middle,
            _ => TileShape::Narrow,
        }
    }

    /// Whether the kernel of warpgroups computes a quantised product in less time than `gemm_middle`: by their rates,
    /// and the share of padding and of multiprocessors that are idle at the end.
    pub fn are_warpgroups_faster(&self, grid: &Grid, rows: usize, outputs: usize) -> bool {
        const MIDDLE_ROWS: usize = 32; // of as many outputs
        let padded =
            |tiles: usize, tile_rows| (tiles.next_multiple_of(self.multiprocessors) * tile_rows) as f64;
        let middle = rows.div_ceil(MIDDLE_ROWS) * outputs.div_ceil(QuantisedWarpgroupTile::OUTPUTS);
        let by_warpgroups =
            padded(QuantisedWarpgroupTile::count(rows, outputs), QuantisedWarpgroupTile::ROWS);
        by_warpgroups < QuantisedWarpgroupTile::rate(grid) * padded(middle, MIDDLE_ROWS)
    }

    /// The tile shape of a product of more than 8 rows of plain numbers, on devices with warpgroups: the one with the
    /// highest rate, less the share of padding and of multiprocessors that are idle at the end.
    pub fn warpgroup_tile_shape(&self, rows: usize, outputs: usize) -> WarpgroupTileShape {
        let score = |shape: &WarpgroupTileShape| {
            let (tile_outputs, tile_rows, _) = shape.shape();
            let at_a_time = shape.blocks() * self.multiprocessors;
            let blocks = shape.count(rows, outputs).next_multiple_of(at_a_time);
            shape.rate() * (rows * outputs) as f64 / (blocks * tile_outputs * tile_rows) as f64
        };
        WarpgroupTileShape::ALL.into_iter().max_by(|a, b| score(a).total_cmp(&score(b))).expect("not empty")
    }

    /// The splits of a product by warpgroups, if split-K is used: for one of narrow tiles that leaves multiprocessors
    /// idle.
    pub fn warpgroup_splits(
        &self,
        shape: WarpgroupTileShape,
        rows: usize,
        outputs: usize,
        inner: usize,
    ) -> Option<usize> {
        let (count, splits) = (shape.count(rows, outputs), inner.div_ceil(SPLIT_COLUMNS));
        let has_room = count * splits <= CHAINS_PER_MULTIPROCESSOR * self.multiprocessors;
        let is_small = shape == WarpgroupTileShape::Narrow && 10 * count < 7 * self.multiprocessors;
        (splits > 1 && is_small && has_room).then_some(splits)
    }

    /// Whether the multiprocessors have about a block each.
    fn are_enough(&self, tiles: usize) -> bool {
        4 * tiles >= 3 * self.multiprocessors
    }

    /// The splits of a product of narrow or middle tiles of plain numbers, if split-K is used.
    pub fn splits(&self, rows: usize, outputs: usize, inner: usize) -> Option<usize> {
        let (tiles, splits) = (rows.div_ceil(TILE) * outputs.div_ceil(TILE), inner.div_ceil(SPLIT_COLUMNS));
        let has_room = tiles * splits <= CHAINS_PER_MULTIPROCESSOR * self.multiprocessors;
        (splits > 1 && tiles < self.multiprocessors && has_room).then_some(splits)
    }

    /// Bytes of the chains of steps of up to `rows` rows: 17 MB for 132 multiprocessors. A product that needs more is
    /// not split.
    pub fn chains_bytes(&self, rows: usize) -> usize {
        let tile = TILE * TILE.min(rows) * size_of::<f32>();
        CHAINS_PER_MULTIPROCESSOR * self.multiprocessors * tile
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::ScaleFormat;

    use super::*;

    const SELECTOR: TileSelector = TileSelector { multiprocessors: 132, chains: None };

    #[test]
    fn products_of_few_tiles_are_split() {
        assert_eq!(SELECTOR.splits(9, 4096, 4096), Some(2));
        assert_eq!(SELECTOR.splits(128, 4096, 14336), Some(7));
        assert_eq!(SELECTOR.splits(128, 6144, 4096), None);
        assert_eq!(SELECTOR.splits(32, 28672, 4096), None);
        assert_eq!(SELECTOR.splits(32, 4096, 2048), None);
        assert_eq!(SELECTOR.splits(32, 8192, 28672), None);
    }

    #[test]
    fn tiles_are_as_large_as_the_multiprocessors_allow() {
        let floats = |rows, outputs| SELECTOR.tile_shape(rows, outputs);
        assert_eq!([floats(8, 28672), floats(9, 28672)], [TileShape::Vectors, TileShape::Narrow]);
        assert_eq!([floats(64, 28672), floats(65, 28672)], [TileShape::Middle, TileShape::Wide]);
        assert_eq!([floats(256, 4096), floats(512, 4096)], [TileShape::Middle, TileShape::Wide]);
        let quantised = |rows, outputs| SELECTOR.quantised_tile_shape(rows, outputs, false);
        assert_eq!([quantised(8, 28672), quantised(9, 28672)], [TileShape::Vectors, TileShape::Middle]);
        assert_eq!([quantised(33, 28672), quantised(9, 4096)], [TileShape::Wide, TileShape::Narrow]);
        assert_eq!([quantised(65, 4096), quantised(256, 4096)], [TileShape::Middle, TileShape::Wide]);
        let beside_warpgroups = |rows, outputs| SELECTOR.quantised_tile_shape(rows, outputs, true);
        assert_eq!(
            [beside_warpgroups(33, 28672), beside_warpgroups(64, 4096)],
            [TileShape::Middle, TileShape::Narrow]
        );
    }

    #[test]
    fn tiles_of_warpgroups_leave_few_multiprocessors_idle() {
        use WarpgroupTileShape::{Middle, Narrow, Wide, Widest};
        let of = |rows| [6144, 4096, 28672].map(|outputs| SELECTOR.warpgroup_tile_shape(rows, outputs));
        assert_eq!(of(9), [Narrow; 3]);
        assert_eq!(of(64), [Narrow, Narrow, Middle]);
        assert_eq!(of(128), [Middle, Narrow, Wide]);
        assert_eq!(of(256), [Wide, Middle, Widest]);
        assert_eq!(of(1024), [Wide, Widest, Widest]);
        assert_eq!(of(8192), [Widest; 3]);
        assert_eq!(
            WarpgroupTileShape::ALL.map(WarpgroupTileShape::shared_bytes),
            [99_328, 99_328, 197_632, 197_632]
        );
    }

    fn grid(bits: CodeBits, group: u16, activations: Activations) -> Grid {
        Grid { bits, group: Some(group), scales: ScaleFormat::F16, minimum: Minimum::Centred, activations }
    }

    #[test]
    fn warpgroups_multiply_quantised_weights_where_they_are_faster() {
        // As measured on an H100.
        let of = |bits, activations, rows| {
            let grid = grid(bits, 32, activations);
            [4096, 6144, 28672].map(|outputs| SELECTOR.are_warpgroups_faster(&grid, rows, outputs))
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
    fn shared_memory_of_quantised_gemm_is_that_of_the_kernels() {
        let bytes =
            |bits, group, activations| QuantisedWarpgroupTile::shared_bytes(&grid(bits, group, activations));
        assert_eq!(bytes(CodeBits::Four, 32, Activations::Int8), 189_440);
        assert_eq!(bytes(CodeBits::Eight, 32, Activations::Int8), 222_208);
        assert_eq!(bytes(CodeBits::Four, 128, Activations::Float), 189_440);
        assert_eq!(bytes(CodeBits::Eight, 128, Activations::Float), 214_016);
    }

    #[test]
    fn products_of_few_tiles_of_warpgroups_are_split() {
        let of = |rows, outputs, inner| {
            let tile_shape = SELECTOR.warpgroup_tile_shape(rows, outputs);
            SELECTOR.warpgroup_splits(tile_shape, rows, outputs, inner)
        };
        assert_eq!([of(16, 4096, 4096), of(16, 4096, 14336)], [Some(2), Some(7)]);
        assert_eq!([of(16, 6144, 4096), of(16, 4096, 2048), of(256, 4096, 14336)], [None; 3]);
    }

    #[test]
    fn chains_of_split_products_have_room() {
        let mut count = 0;
        for rows in 1..400 {
            for outputs in (8..9000).step_by(56) {
                for inner in [2056, 14336, 40000] {
                    let tile_shape = SELECTOR.warpgroup_tile_shape(rows, outputs);
                    let choices = [
                        SELECTOR.splits(rows, outputs, inner),
                        SELECTOR.warpgroup_splits(tile_shape, rows, outputs, inner),
                    ];
                    for splits in choices.into_iter().flatten() {
                        count += 1;
                        let bytes = splits * rows * outputs * size_of::<f32>();
                        assert!(bytes <= SELECTOR.chains_bytes(rows));
                        assert!(bytes <= SELECTOR.chains_bytes(4 * rows));
                    }
                }
            }
        }
        assert!(count > 1000);
    }
}
