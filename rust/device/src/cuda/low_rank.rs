//! Low-rank updates of products: the rows that have them, and their launches.

use std::mem::size_of;

use bytemuck::{NoUninit, Pod, Zeroable};
use penstock_cuda::{DevicePointer, Parameter};
use penstock_types::Dtype;

use super::Cuda;
use super::adapters::{CudaAdapters, Largest};
use super::queue::Shape;
use super::updates::{MAX_UPDATES, SHRINK_RANKS, Update};
use crate::error::DeviceError;
use crate::seam::{AdapterRows, StepInputs, StepRows};

/// Rows of a tile.
const TILE_ROWS: usize = 16;
/// Threads of a block of the first product.
const SHRINK_THREADS: usize = 512;
/// Columns of the output of a block of the second product, and its threads.
const EXPAND_COLUMNS: usize = 128;
const EXPAND_THREADS: usize = 128;
/// Values of x and A that a thread reads at once, if they are aligned.
const ALIGNED_COLUMNS: usize = 4;

/// Adjacent rows with the same adapter, as the kernels read them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct Tile {
    first: u32,
    rows: u32,
    adapter: u32,
}

/// The rows of an operation that have adapters.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    pub tiles: DevicePointer,
    pub count: usize,
}

/// The arguments of `lora.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct LowRank {
    x: DevicePointer,
    hidden: DevicePointer,
    out: DevicePointer,
    tiles: DevicePointer,
    adapters: DevicePointer,
    updates: DevicePointer,
    columns: i32,
    width: i32,
    hidden_pitch: i32,
    update_pitch: i32,
}

// SAFETY: the type is that of `lora.cu`.
unsafe impl Parameter for LowRank {}

/// Divides the rows of an operation that have adapters into tiles.
pub(super) fn divide_rows(inputs: &StepInputs, rows: StepRows, tiles: &mut Vec<Tile>) {
    tiles.clear();
    for AdapterRows { rows, adapter } in inputs.adapter_rows(rows) {
        tiles.extend(rows.clone().step_by(TILE_ROWS).map(|first| Tile {
            first: first as u32,
            rows: TILE_ROWS.min(rows.end - first) as u32,
            adapter,
        }));
    }
}

impl Cuda {
    /// Adds the updates of the rows of `x`, of this type, to those of `out`, both in the order of `tiles`.
    pub(super) fn launch_adapters(
        &mut self,
        adapters: &CudaAdapters,
        matrix: u32,
        Tiles { tiles, count }: Tiles,
        (x, dtype, columns): (DevicePointer, Dtype, usize),
        (out, width): (DevicePointer, usize),
    ) -> Result<(), DeviceError> {
        let Largest { updates, rank, rows } = adapters.largest[matrix as usize];
        let of_matrix = matrix as usize * MAX_UPDATES * size_of::<Update>();
        let call = LowRank {
            x,
            hidden: self.memory.pointer(&adapters.hidden),
            out,
            tiles,
            adapters: self.memory.pointer(&adapters.weights),
            updates: self.memory.pointer(&adapters.table).offset(of_matrix),
            columns: columns as i32,
            width: width as i32,
            hidden_pitch: adapters.hidden_pitch as i32,
            update_pitch: (adapters.largest.len() * MAX_UPDATES) as i32,
        };
        let is_aligned = columns.is_multiple_of(ALIGNED_COLUMNS);
        let shrink = if is_aligned { &adapters.shrink } else { &adapters.shrink_any };
        let shape = Shape::of([count, rank.div_ceil(SHRINK_RANKS), updates], SHRINK_THREADS);
        self.queue.launch(shrink.get(dtype), shape, &[(&call).into()])?;
        let shape = Shape::of([count, rows.div_ceil(EXPAND_COLUMNS), updates], EXPAND_THREADS);
        self.queue.launch(&adapters.expand, shape, &[(&call).into()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_divided_into_tiles_of_one_adapter() {
        let rows = |rows, adapter| AdapterRows { rows, adapter };
        let inputs = StepInputs {
            output_rows: vec![0, 3, 21, 30],
            adapters: vec![rows(1..20, 7), rows(20..22, 2), rows(22..38, 7), rows(40..41, 3)],
            ..StepInputs::default()
        };
        let mut tiles = Vec::new();
        let mut tiles = |rows| -> Vec<(u32, u32, u32)> {
            divide_rows(&inputs, rows, &mut tiles);
            tiles.iter().map(|tile| (tile.first, tile.rows, tile.adapter)).collect()
        };
        assert_eq!(tiles(StepRows::All), [(1, 16, 7), (17, 3, 7), (20, 2, 2), (22, 16, 7), (40, 1, 3)]);
        assert_eq!(tiles(StepRows::Outputs), [(1, 1, 7), (2, 1, 2), (3, 1, 7)]);
    }
}
