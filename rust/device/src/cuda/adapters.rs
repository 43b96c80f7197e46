//! LoRA adapters on the device: their memory.
//!
//! ```text
//! weights     A and B of the adapters, in one region that is divided among them
//! table       [number of the adapter][matrix][update]
//! update      as in `updates.rs`
//! ```
//!
//! An adapter is copied to the device in the stream of the steps: the steps before it are complete when its copy
//! replaces another one, which may have been unloaded before they were.

use std::mem::size_of;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Zeroable, cast_slice};
use penstock_cuda::Kernel;
use penstock_types::{LowRankUpdate, PackedAdapter};

use super::Cuda;
use super::kernels::ByDtype;
use super::updates::{ALIGNMENT, MAX_UPDATES, Update, hidden_pitch};
use super::upload::Uploader;
use crate::arena::Region;
use crate::bfc::{Bfc, Block, DEFAULT_ALIGNMENT, Placement};
use crate::error::DeviceError;
use crate::seam::{AdapterSpec, StepSpec};

/// Adapters that are loaded.
pub struct CudaAdapters {
    pub(super) weights: Region,
    pub(super) table: Region,
    /// The products with A of the rows of a step.
    pub(super) hidden: Region,
    pub(super) hidden_pitch: usize,
    /// The division of `weights`.
    space: Bfc,
    /// By number.
    loaded: Vec<Option<Loaded>>,
    /// By matrix.
    pub(super) largest: Vec<Largest>,
    uploader: Uploader,
    pub(super) shrink: ByDtype,
    /// For operands of any number of columns.
    pub(super) shrink_any: ByDtype,
    pub(super) expand: Kernel,
}

struct Loaded {
    adapter: Arc<PackedAdapter>,
    block: Block,
}

/// The largest updates of a matrix that are loaded.
#[derive(Clone, Copy, Default)]
pub(super) struct Largest {
    pub updates: usize,
    pub rank: usize,
    pub rows: usize,
}

impl CudaAdapters {
    /// Room for adapters.
    pub(super) fn new(cuda: &mut Cuda, adapters: &AdapterSpec, step: &StepSpec) -> Result<Self, DeviceError> {
        let [weights, table, hidden] = sizes(adapters, step);
        let region = cuda.memory.allocate(weights, "adapters")?;
        cuda.memory.report(&region, 0..region.len(), false); // until an adapter is there
        Ok(Self {
            weights: region,
            table: cuda.memory.allocate(table, "adapters")?,
            hidden: cuda.memory.allocate_workspace(hidden, "workspace")?,
            hidden_pitch: hidden_pitch(adapters),
            space: new_space(weights),
            loaded: (0..adapters.adapters).map(|_| None).collect(),
            largest: vec![Largest::default(); adapters.matrices],
            uploader: Uploader::ready(&cuda.pinned, cuda.uploader.threads)?,
            shrink: ByDtype::load(&mut cuda.loader, "lora.cu", "lora_shrink")?,
            shrink_any: ByDtype::load(&mut cuda.loader, "lora.cu", "lora_shrink_any")?,
            expand: cuda.loader.kernel("lora.cu", "", "lora_expand")?,
        })
    }

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
                *place = Update::new(update, loaded.block.offset);
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

/// Bytes of the weights, the table, and the first products.
pub(super) fn sizes(adapters: &AdapterSpec, step: &StepSpec) -> [usize; 3] {
    let product = |factors: [usize; 4]| factors.into_iter().fold(1_usize, usize::saturating_mul);
    [
        usize::try_from(adapters.bytes).unwrap_or(usize::MAX),
        product([adapters.adapters, adapters.matrices, MAX_UPDATES, size_of::<Update>()]),
        product([step.tokens, MAX_UPDATES, hidden_pitch(adapters), size_of::<f32>()]),
    ]
}

impl Cuda {
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
}

/// The bytes of a block in the memory of adapters.
fn range(block: &Block) -> Range<usize> {
    block.offset..block.offset + block.size
}

/// The division of the memory of adapters, all of it free.
fn new_space(bytes: usize) -> Bfc {
    Bfc::new(bytes.max(DEFAULT_ALIGNMENT), DEFAULT_ALIGNMENT).expect("a size that was granted; this is a bug")
}
