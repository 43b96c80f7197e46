//! LoRA adapters on the device: their memory, and the updates of products.
//!
//! ```text
//! weights     A and B of the adapters, in one region that is divided among them
//! table       [number of the adapter][matrix][update]
//! update      [rank][columns] of A, then [rows][rank, rounded up to 4] of B
//! ```
//!
//! An adapter is copied to the device in the stream of the steps: the steps before it are complete when its copy
//! replaces another one, which may have been unloaded before they were.

use std::mem::size_of;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{NoUninit, Pod, Zeroable, cast_slice};
use penstock_cuda::{DevicePointer, Kernel, Parameter};
use penstock_types::{Dtype, LowRankShape, LowRankUpdate, PackedAdapter};

use super::Cuda;
use super::kernels::ByDtype;
use super::matrix::write_as;
use super::queue::Shape;
use super::upload::Uploader;
use crate::arena::Region;
use crate::backend::DeviceError;
use crate::bfc::{Bfc, Block, DEFAULT_ALIGNMENT, Placement};
use crate::step::{AdapterRows, AdapterSpec, StepInputs, StepRows, StepSpec};

/// Updates of a matrix, as in `lora.cu`.
const MAX_UPDATES: usize = 3;
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
const ALIGNMENT: usize = 64;

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
struct Update {
    a: u64,
    b: u32,
    dtype: i32,
    scale: f32,
    /// 0 if there is none.
    rank: i32,
    first_column: i32,
    num_columns: i32,
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

/// Adapters that are loaded.
pub struct CudaAdapters {
    weights: Region,
    table: Region,
    /// The products with A of the rows of a step.
    hidden: Region,
    hidden_pitch: usize,
    /// The division of `weights`.
    space: Bfc,
    /// By number.
    loaded: Vec<Option<Loaded>>,
    /// By matrix.
    largest: Vec<Largest>,
    uploader: Uploader,
    shrink: ByDtype,
    /// For operands of any number of columns.
    shrink_any: ByDtype,
    expand: Kernel,
}

struct Loaded {
    adapter: Arc<PackedAdapter>,
    block: Block,
}

/// The largest updates of a matrix that are loaded.
#[derive(Clone, Copy, Default)]
struct Largest {
    updates: usize,
    rank: usize,
    rows: usize,
}

impl CudaAdapters {
    /// Whether an adapter is loaded.
    pub(super) fn is_loaded(&self, number: usize) -> bool {
        self.loaded.get(number).is_some_and(Option::is_some)
    }

    /// The updates of the matrices of an adapter, of which a matrix has `MAX_UPDATES`.
    fn updates(&self, number: usize) -> Vec<Update> {
        let mut table = vec![Update::zeroed(); self.largest.len() * MAX_UPDATES];
        let loaded = self.loaded[number].as_ref().expect("the adapter is loaded; this is a bug");
        for of_matrix in loaded.adapter.updates.chunk_by(|one, other| one.matrix == other.matrix) {
            let first = of_matrix[0].matrix as usize * MAX_UPDATES;
            for (update, place) in of_matrix.iter().zip(&mut table[first..first + MAX_UPDATES]) {
                let LowRankUpdate { first_row, shape, scale, offset, .. } = *update;
                *place = Update {
                    a: (loaded.block.offset + offset) as u64,
                    b: a_bytes(&shape) as u32,
                    dtype: type_number(shape.dtype),
                    scale,
                    rank: shape.rank as i32,
                    first_column: first_row as i32,
                    num_columns: shape.rows as i32,
                };
            }
        }
        table
    }

    /// Finds the largest updates of all matrices.
    fn find_largest(&mut self) {
        self.largest.fill(Largest::default());
        for loaded in self.loaded.iter().flatten() {
            for of_matrix in loaded.adapter.updates.chunk_by(|one, other| one.matrix == other.matrix) {
                let largest = &mut self.largest[of_matrix[0].matrix as usize];
                assert!(of_matrix.len() <= MAX_UPDATES, "{of_matrix:?}; this is a bug");
                largest.updates = largest.updates.max(of_matrix.len());
                for LowRankUpdate { shape, .. } in of_matrix {
                    largest.rank = largest.rank.max(shape.rank);
                    largest.rows = largest.rows.max(shape.rows);
                }
            }
        }
    }
}

/// The type of A and B, as in `lora.cu`.
fn type_number(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
    }
}

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

/// Bytes that an adapter takes in the memory of all of them.
pub(super) fn adapter_bytes(packed: u64) -> u64 {
    packed.max(1).checked_next_multiple_of(DEFAULT_ALIGNMENT as u64).unwrap_or(u64::MAX)
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
fn hidden_pitch(adapters: &AdapterSpec) -> usize {
    adapters.rank.next_multiple_of(SHRINK_RANKS)
}

/// Bytes of the weights, the table, and the first products.
fn sizes(adapters: &AdapterSpec, spec: &StepSpec) -> [usize; 3] {
    let product = |factors: [usize; 4]| factors.into_iter().fold(1_usize, usize::saturating_mul);
    [
        usize::try_from(adapters.bytes).unwrap_or(usize::MAX),
        product([adapters.adapters, adapters.matrices, MAX_UPDATES, size_of::<Update>()]),
        product([spec.tokens, MAX_UPDATES, hidden_pitch(adapters), size_of::<f32>()]),
    ]
}

impl Cuda {
    /// Bytes that [`new_adapters`](Self::new_adapters) takes.
    pub(super) fn adapters_size(&self, adapters: &AdapterSpec, spec: &StepSpec) -> u64 {
        sizes(adapters, spec).into_iter().fold(0, |sum, bytes| sum.saturating_add(self.memory.granted(bytes)))
    }

    /// Room for adapters.
    pub(super) fn new_adapters(
        &mut self,
        adapters: &AdapterSpec,
        spec: &StepSpec,
    ) -> Result<CudaAdapters, DeviceError> {
        let [weights, table, hidden] = sizes(adapters, spec);
        Ok(CudaAdapters {
            weights: self.memory.allocate(weights, "adapters")?,
            table: self.memory.allocate(table, "adapters")?,
            hidden: self.memory.allocate_workspace(hidden, "workspace")?,
            hidden_pitch: hidden_pitch(adapters),
            space: new_space(weights),
            loaded: (0..adapters.adapters).map(|_| None).collect(),
            largest: vec![Largest::default(); adapters.matrices],
            uploader: Uploader::ready(&self.pinned, self.uploader.threads)?,
            shrink: ByDtype::load(&mut self.loader, "lora.cu", "lora_shrink")?,
            shrink_any: ByDtype::load(&mut self.loader, "lora.cu", "lora_shrink_any")?,
            expand: self.loader.kernel("lora.cu", "", "lora_expand")?,
        })
    }

    /// Copies an adapter to the device.
    pub(super) fn put_adapter(
        &mut self,
        adapters: &mut CudaAdapters,
        number: usize,
        adapter: &Arc<PackedAdapter>,
    ) -> Result<(), DeviceError> {
        assert!(!adapters.is_loaded(number), "adapter {number} is loaded already; this is a bug");
        let bytes = adapter.bytes().len();
        let block = match adapters.space.allocate(bytes, Placement::Low, "adapters") {
            Ok(block) => block,
            Err(_) => {
                self.move_together(adapters)?;
                adapters.space.allocate(bytes, Placement::Low, "adapters")?
            }
        };
        self.memory.report(&adapters.weights, range(&block), true);
        adapters.loaded[number] = Some(Loaded { adapter: Arc::clone(adapter), block });
        adapters.find_largest();
        self.copy_adapter(adapters, number)
    }

    /// Frees an adapter. Steps before it may still use it: its memory is written by later copies of the same stream.
    pub(super) fn remove_adapter(&self, adapters: &mut CudaAdapters, number: usize) {
        let Loaded { block, .. } =
            adapters.loaded[number].take().expect("the adapter is loaded; this is a bug");
        adapters.space.free(block.id).expect("a block of the adapters; this is a bug");
        self.memory.report(&adapters.weights, range(&block), false);
        adapters.find_largest();
    }

    /// Moves the adapters to the beginning of their memory: they are copied again. Rare: only if adapters of several
    /// sizes have left room that is large enough, but not in one piece.
    fn move_together(&mut self, adapters: &mut CudaAdapters) -> Result<(), DeviceError> {
        let mut numbers: Vec<usize> = (0..adapters.loaded.len()).collect();
        let offset = |number: &usize| adapters.loaded[*number].as_ref().map(|loaded| loaded.block.offset);
        numbers.sort_unstable_by_key(offset);
        adapters.space = new_space(adapters.weights.len());
        for number in numbers {
            let Some(loaded) = &mut adapters.loaded[number] else { continue };
            let bytes = loaded.adapter.bytes().len();
            let block = adapters.space.allocate(bytes, Placement::Low, "adapters")?;
            let former = std::mem::replace(&mut loaded.block, block);
            if former.offset != block.offset {
                self.memory.report(&adapters.weights, range(&former), false);
                self.memory.report(&adapters.weights, range(&block), true);
                self.copy_adapter(adapters, number)?;
            }
        }
        Ok(())
    }

    fn copy_adapter(&mut self, adapters: &mut CudaAdapters, number: usize) -> Result<(), DeviceError> {
        let loaded = adapters.loaded[number].as_ref().expect("the adapter is loaded; this is a bug");
        let (adapter, target) = (Arc::clone(&loaded.adapter), loaded.block.offset);
        let updates = adapters.updates(number);
        let table: &[u8] = cast_slice(&updates);
        let weights = self.memory.pointer(&adapters.weights).offset(target);
        let of_number = self.memory.pointer(&adapters.table).offset(number * table.len());
        for (target, bytes) in [(weights, adapter.bytes()), (of_number, table)] {
            adapters.uploader.upload(&self.queue, target, (bytes.len(), 1), ALIGNMENT, &|range, out| {
                out.copy_from_slice(&bytes[range]);
            })?;
        }
        Ok(())
    }

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

/// The bytes of a block in the memory of adapters.
fn range(block: &Block) -> Range<usize> {
    block.offset..block.offset + block.size
}

/// The division of the memory of adapters, all of it free.
fn new_space(bytes: usize) -> Bfc {
    Bfc::new(bytes.max(DEFAULT_ALIGNMENT), DEFAULT_ALIGNMENT).expect("a size that was granted; this is a bug")
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

    #[test]
    fn adapters_take_whole_units() {
        assert_eq!([0, 1, 256, 257].map(adapter_bytes), [256, 256, 256, 512]);
        assert_eq!(adapter_bytes(u64::MAX), u64::MAX);
    }
}
