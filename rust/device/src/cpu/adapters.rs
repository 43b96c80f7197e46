//! The adapters of the CPU backend: one region, divided by a best-fit allocator, and the updates of each adapter.

use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut};
use penstock_kernels::{LowRank, LowRankRows, Rows};
use penstock_types::{LowRankUpdate, PackedAdapter};

use super::buffers::PAGE;
use crate::arena::Region;
use crate::backend::DeviceError;
use crate::bfc::{AllocationId, Bfc, Exhausted, Placement};
use crate::step::{AdapterRows, StepInputs, StepRows};

/// Adapters that are loaded.
pub struct CpuAdapters {
    /// A and B of all adapters.
    pub(super) memory: Region,
    /// The products with A of the rows of a step.
    pub(super) hidden: Region,
    /// Divides `memory`.
    allocator: Bfc,
    loaded: Vec<Option<Loaded>>,
    /// The groups and updates of the current product.
    groups: Vec<LowRankRows>,
    updates: Vec<LowRankUpdate>,
}

struct Loaded {
    block: AllocationId,
    /// With offsets in `memory`.
    updates: Vec<LowRankUpdate>,
}

impl CpuAdapters {
    /// `memory` has room for the adapters, at most `count`.
    pub(super) fn new(memory: Region, hidden: Region, count: usize) -> Result<Self, DeviceError> {
        let allocator =
            Bfc::new(memory.len(), PAGE).map_err(|error| DeviceError::Start(error.to_string()))?;
        let loaded = (0..count).map(|_| None).collect();
        let (groups, updates) = (Vec::with_capacity(count), Vec::with_capacity(count * MOST_UPDATES));
        Ok(Self { memory, hidden, allocator, loaded, groups, updates })
    }

    /// Stores an adapter; `memory` has the bytes of the region. If no free part is large enough, the others are moved
    /// together.
    pub(super) fn load(
        &mut self,
        index: usize,
        adapter: &PackedAdapter,
        memory: &mut [u8],
    ) -> Result<(), DeviceError> {
        assert!(self.loaded[index].is_none(), "adapter {index} is loaded already; this is a bug");
        let size = adapter.bytes.len();
        let block = match self.allocate(size) {
            Ok(block) => block,
            Err(_) => {
                self.compact(memory)?;
                self.allocate(size)?
            }
        };
        memory[block.offset..][..size].copy_from_slice(&adapter.bytes);
        let moved =
            |update: &LowRankUpdate| LowRankUpdate { offset: update.offset + block.offset, ..*update };
        let updates = adapter.updates.iter().map(moved).collect();
        self.loaded[index] = Some(Loaded { block: block.id, updates });
        Ok(())
    }

    fn allocate(&mut self, size: usize) -> Result<crate::bfc::Block, Exhausted> {
        self.allocator.allocate(size, Placement::Low, "adapter")
    }

    /// Frees the memory of an adapter.
    pub(super) fn unload(&mut self, index: usize) {
        let loaded = self.loaded[index].take().expect("the adapter is loaded; this is a bug");
        self.allocator.free(loaded.block).expect("a block of this allocator; this is a bug");
    }

    /// Moves all adapters to the bottom of the region, in their order.
    fn compact(&mut self, memory: &mut [u8]) -> Result<(), DeviceError> {
        let mut blocks = Vec::new();
        for (index, loaded) in self.loaded.iter().enumerate() {
            if let Some(loaded) = loaded {
                let block =
                    self.allocator.get(loaded.block).expect("a block of this allocator; this is a bug");
                blocks.push((block.offset, block.size, index));
            }
        }
        blocks.sort_unstable();
        self.allocator =
            Bfc::new(memory.len(), PAGE).map_err(|error| DeviceError::Start(error.to_string()))?;
        for (offset, size, index) in blocks {
            let block = self.allocate(size)?;
            memory.copy_within(offset..offset + size, block.offset);
            if let Some(loaded) = &mut self.loaded[index] {
                loaded.block = block.id;
                loaded.updates.iter_mut().for_each(|update| update.offset -= offset - block.offset);
            }
        }
        Ok(())
    }

    /// The updates of a product of a matrix with `columns` columns and rows of the step. `bytes` has the rows as float32 and
    /// the memory of the adapters.
    pub(super) fn updates_of<'a>(
        &'a mut self,
        step: &StepInputs,
        rows: StepRows,
        matrix: u32,
        columns: usize,
        bytes: [&'a [u8]; 2],
        hidden: &'a mut [u8],
    ) -> LowRank<'a> {
        self.groups.clear();
        self.updates.clear();
        for AdapterRows { rows: all, adapter } in &step.adapters {
            let rows = match rows {
                StepRows::All => all.clone(),
                StepRows::Outputs => outputs_among(&step.output_rows, all),
            };
            let loaded =
                self.loaded[*adapter as usize].as_ref().expect("the adapter is loaded; this is a bug");
            let first = loaded.updates.partition_point(|update| update.matrix < matrix);
            let found = loaded.updates[first..].iter().take_while(|update| update.matrix == matrix);
            let start = self.updates.len();
            if !rows.is_empty() {
                self.updates.extend(found);
            }
            if self.updates.len() > start {
                self.groups.push(LowRankRows { rows, updates: start..self.updates.len() });
            }
        }
        let count = self.groups.last().map_or(0, |group| group.rows.end);
        LowRank {
            x: Rows::dense(&cast_slice(bytes[0])[..count * columns], columns),
            groups: &self.groups,
            updates: &self.updates,
            bytes: bytes[1],
            hidden: cast_slice_mut(hidden),
        }
    }

    /// Whether an adapter is loaded.
    pub(super) fn is_loaded(&self, index: usize) -> bool {
        self.loaded.get(index).is_some_and(Option::is_some)
    }
}

/// The most updates of one matrix: query, key and value.
const MOST_UPDATES: usize = 3;

/// The output rows among some rows of a step, as rows of the output.
fn outputs_among(output_rows: &[u32], rows: &Range<usize>) -> Range<usize> {
    let first = |row: usize| output_rows.partition_point(|output| (*output as usize) < row);
    first(rows.start)..first(rows.end)
}
