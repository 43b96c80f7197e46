//! The division of a product into blocks: large tiles, if the device has about a block for each multiprocessor then,
//! and smaller ones otherwise. No division changes a bit.

use std::mem::size_of;

use penstock_cuda::Device;

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

/// The choice of tiles and segments for a device. If a product has few tiles, several blocks compute one tile: each
/// block computes a segment of the columns and stores a chain, and another launch adds the chains in order.
pub(super) struct Division {
    multiprocessors: usize,
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

    /// The kernel of a product of codes.
    pub fn tiles_of_codes(&self, rows: usize, outputs: usize) -> Tiles {
        let are_enough = |tile_rows| self.are_enough(rows.div_ceil(tile_rows) * outputs.div_ceil(128));
        match rows {
            0..=8 => Tiles::Vectors,
            33.. if are_enough(64) => Tiles::Wide,
            _ if rows > 64 || are_enough(32) => Tiles::Middle,
            _ => Tiles::Narrow,
        }
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
        let codes = |rows, outputs| DIVISION.tiles_of_codes(rows, outputs);
        assert_eq!([codes(8, 28672), codes(9, 28672)], [Tiles::Vectors, Tiles::Middle]);
        assert_eq!([codes(33, 28672), codes(9, 4096)], [Tiles::Wide, Tiles::Narrow]);
        assert_eq!([codes(65, 4096), codes(256, 4096)], [Tiles::Middle, Tiles::Wide]);
    }

    #[test]
    fn chains_of_divided_products_have_room() {
        let mut divided = 0;
        for rows in 1..400 {
            for outputs in (8..9000).step_by(56) {
                for inner in [2056, 14336, 40000] {
                    let Some(segments) = DIVISION.segments(rows, outputs, inner) else { continue };
                    divided += 1;
                    let bytes = segments * rows * outputs * size_of::<f32>();
                    assert!(bytes <= DIVISION.chains_bytes(rows));
                    assert!(bytes <= DIVISION.chains_bytes(4 * rows));
                }
            }
        }
        assert!(divided > 1000);
    }
}
