//! Low-rank updates of products: their layout in the memory of adapters, the rows that have them, and their launches.
//!
//! ```text
//! update      [rank][columns] of A, then [rows][rank, rounded up to 4] of B
//! ```

use std::mem::size_of;

use bytemuck::{NoUninit, Pod, Zeroable};
use penstock_cuda::{DevicePointer, Parameter};
use penstock_types::{Dtype, LowRankShape, LowRankUpdate};

use super::Cuda;
use super::adapters::{CudaAdapters, Largest};
use super::kernels::float_type;
use super::matrix::write_as;
use super::queue::Shape;
use crate::error::DeviceError;
use crate::step::{AdapterRows, AdapterSpec, StepInputs, StepRows};

/// Updates of a matrix, as in `lora.cu`.
pub(super) const MAX_UPDATES: usize = 3;
/// Rows of a tile.
const TILE_ROWS: usize = 16;
/// Ranks of a block of the first product, and its threads.
const SHRINK_RANKS: usize = 16;
const SHRINK_THREADS: usize = 512;
/// Columns of the output of a block of the second product, and its threads.
const EXPAND_COLUMNS: usize = 128;
const EXPAND_THREADS: usize = 128;
/// Values to which a row of B is filled up.
const B_UNIT: usize = 4;
/// Values of x and A that a thread reads at once, if they are aligned.
const ALIGNED_COLUMNS: usize = 4;
/// Alignment of A and of B.
pub(super) const ALIGNMENT: usize = 64;

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

/// An update, as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Update {
    a: u64,
    b: u32,
    dtype: i32,
    scale: f32,
    /// 0 if there is none.
    rank: i32,
    first_column: i32,
    num_columns: i32,
}

impl Update {
    /// An update of an adapter that begins at `offset` in the memory of all of them.
    pub fn new(update: &LowRankUpdate, offset: usize) -> Self {
        let LowRankUpdate { first_row, shape, scale, .. } = *update;
        Self {
            a: (offset + update.offset) as u64,
            b: a_bytes(&shape) as u32,
            dtype: float_type(shape.dtype),
            scale,
            rank: shape.rank as i32,
            first_column: first_row as i32,
            num_columns: shape.rows as i32,
        }
    }
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

/// Bytes of A.
fn a_bytes(shape: &LowRankShape) -> usize {
    shape.rank.saturating_mul(shape.columns).saturating_mul(shape.dtype.bytes()).next_multiple_of(ALIGNMENT)
}

/// Values of a row of B.
fn b_pitch(shape: &LowRankShape) -> usize {
    shape.rank.next_multiple_of(B_UNIT)
}

/// Bytes of A and B.
pub(super) fn low_rank_bytes(shape: &LowRankShape) -> usize {
    let b = shape.rows.saturating_mul(b_pitch(shape)).saturating_mul(shape.dtype.bytes());
    a_bytes(shape).saturating_add(b.next_multiple_of(ALIGNMENT))
}

/// Packs A, `[rank, columns]`, and B, `[rows, rank]`.
pub(super) fn pack_low_rank(shape: &LowRankShape, a: &[f32], b: &[f32], out: &mut [u8]) {
    let &LowRankShape { rank, dtype, .. } = shape;
    out.fill(0);
    let (of_a, of_b) = out.split_at_mut(a_bytes(shape));
    write_as(a, dtype, &mut of_a[..a.len() * dtype.bytes()]);
    let rows = of_b.chunks_exact_mut(b_pitch(shape) * dtype.bytes());
    for (row, out) in b.chunks_exact(rank).zip(rows) {
        write_as(row, dtype, &mut out[..rank * dtype.bytes()]);
    }
}

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

/// Values of the first product of a row and an update.
pub(super) fn hidden_pitch(adapters: &AdapterSpec) -> usize {
    adapters.rank.next_multiple_of(SHRINK_RANKS)
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
    fn rows_of_b_are_filled_up_with_zeros() {
        let shape = LowRankShape { rows: 2, columns: 3, rank: 5, dtype: Dtype::F32 };
        assert_eq!(low_rank_bytes(&shape), 64 + 64);
        let a: Vec<f32> = (0..15_u8).map(f32::from).collect();
        let b: Vec<f32> = (100..110_u8).map(f32::from).collect();
        let mut values = [f32::NAN; 32];
        pack_low_rank(&shape, &a, &b, bytemuck::cast_slice_mut(&mut values));
        assert_eq!((&values[..15], values[15]), (&a[..], 0.0));
        let rows = [[100., 101., 102., 103., 104., 0., 0., 0.], [105., 106., 107., 108., 109., 0., 0., 0.]];
        assert_eq!(values[16..], rows.concat());
    }

    #[test]
    fn half_precision_takes_half_the_memory() {
        let shape = |dtype| LowRankShape { rows: 64, columns: 128, rank: 8, dtype };
        let [float, half] = [Dtype::F32, Dtype::Bf16].map(|dtype| low_rank_bytes(&shape(dtype)));
        assert_eq!((float, half), (4 * 8 * 192, 2 * 8 * 192));
        let mut values = [0_u16; 8 * 192];
        pack_low_rank(
            &shape(Dtype::Bf16),
            &[1.5; 8 * 128],
            &[-2.0; 8 * 64],
            bytemuck::cast_slice_mut(&mut values),
        );
        assert_eq!((values[0], values[8 * 128 - 1], values[8 * 128]), (0x3fc0, 0x3fc0, 0xc000));
    }

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
