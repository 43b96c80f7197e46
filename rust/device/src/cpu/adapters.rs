//! The adapters of the CPU backend, which are used where the host has them, without a copy.

use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use penstock_kernels::{LowRank, LowRankRows, Rows, low_rank_bytes, pack_low_rank};
use penstock_types::{LowRankShape, PackedAdapter};

use super::PAGE;
use crate::arena::Region;
use crate::seam::{AdapterLayout, AdapterRows, StepInputs, StepRows};

/// The layout of adapters, which kernels read.
pub enum CpuAdapterLayout {}

impl AdapterLayout for CpuAdapterLayout {
    fn adapter_bytes(packed: u64) -> u64 {
        packed.next_multiple_of(PAGE as u64)
    }

    fn update_bytes(shape: &LowRankShape) -> usize {
        low_rank_bytes(shape)
    }

    fn pack(shape: &LowRankShape, a: &[f32], b: &[f32], out: &mut [u8]) {
        pack_low_rank(shape, a, b, out);
    }
}

/// Adapters that are loaded.
pub struct CpuAdapters {
    /// The products with A of the rows of a step.
    pub(super) hidden: Region,
    /// By number.
    loaded: Vec<Option<Arc<PackedAdapter>>>,
    /// The groups of the current product.
    groups: Vec<LowRankRows>,
}

impl CpuAdapters {
    /// Room for `count` adapters.
    pub(super) fn new(hidden: Region, count: usize) -> Self {
        Self { hidden, loaded: vec![None; count], groups: Vec::with_capacity(count) }
    }

    /// Uses an adapter until it is unloaded.
    pub(super) fn load(&mut self, index: usize, adapter: &Arc<PackedAdapter>) {
        let former = self.loaded[index].replace(Arc::clone(adapter));
        assert!(former.is_none(), "adapter {index} is loaded already; this is a bug");
    }

    pub(super) fn unload(&mut self, index: usize) {
        self.loaded[index].take().expect("the adapter is loaded; this is a bug");
    }

    /// The updates of a product of a matrix with `columns` columns and rows of the step. `x` has the rows as float32.
    pub(super) fn updates_of<'a>(
        &'a mut self,
        step: &StepInputs,
        rows: StepRows,
        matrix: u32,
        (x, columns): (&'a [u8], usize),
        hidden: &'a mut [u8],
    ) -> LowRank<'a> {
        self.groups.clear();
        for AdapterRows { rows, adapter } in step.adapter_rows(rows) {
            let adapter = adapter as usize;
            let loaded = self.loaded[adapter].as_ref().expect("the adapter is loaded; this is a bug");
            let first = loaded.updates.partition_point(|update| update.matrix < matrix);
            let count = loaded.updates[first..].iter().take_while(|update| update.matrix == matrix).count();
            if count > 0 {
                self.groups.push(LowRankRows { rows, adapter, updates: first..first + count });
            }
        }
        let count = self.groups.last().map_or(0, |group| group.rows.end);
        LowRank {
            x: Rows::dense(&cast_slice(x)[..count * columns], columns),
            groups: &self.groups,
            adapters: &self.loaded,
            hidden: cast_slice_mut(hidden),
        }
    }

    /// Whether an adapter is loaded.
    pub(super) fn is_loaded(&self, index: usize) -> bool {
        self.loaded.get(index).is_some_and(Option::is_some)
    }
}
