//! The memory of a CUDA device: one allocation, and page-locked memory of the host for its copies.

use std::mem::size_of;

use penstock_types::BlockCopy;

use crate::arena::Region;
use crate::cuda::cache::{CacheShape, LISTS_BYTES};
use crate::cuda::cublas::WORKSPACE_BYTES;
use crate::cuda::matrix::matrix_bytes;
use crate::cuda::step::{input_buffer_bytes, input_bytes, rotation_width};
use crate::cuda::upload::Uploader;
use crate::cuda::{Cuda, CudaBuffer, CudaCache, CudaOperand, CudaSlots, adapters, attention};
use crate::error::DeviceError;
use crate::seam::{AdapterSpec, Allocation, CacheSpec, Memory, MemoryUse, StepSpec};
use crate::system::AvailableMemory;

/// Floats that [`Memory::download`] copies at once.
const DOWNLOADED_AT_ONCE: usize = 1 << 18;
pub(in crate::cuda) const DOWNLOAD_BYTES: usize = DOWNLOADED_AT_ONCE * size_of::<f32>();

impl Memory for Cuda {
    type Buffer = CudaBuffer;
    type Operand = CudaOperand;
    /// Partial results of attention.
    type Scratch = Region;
    type Cache = CudaCache;

    fn bytes(&self, allocation: Allocation<'_>) -> u64 {
        let granted = |bytes| self.memory.granted(bytes);
        let sum = |regions: &[usize]| regions.iter().copied().map(granted).fold(0, u64::saturating_add);
        match allocation {
            Allocation::Matrix { columns, parts } => granted(matrix_bytes(columns, parts)),
            Allocation::Floats(len) => granted(len.saturating_mul(size_of::<f32>())),
            Allocation::Operand { rows, columns } => granted(self.operands.bytes(rows, columns).0),
            Allocation::Rope { positions, step } => {
                let table = positions.saturating_mul(rotation_width(step)).saturating_mul(size_of::<f32>());
                sum(&[table, input_bytes(step)])
            }
            Allocation::Scratch(step) => {
                let row = attention::partial_row_bytes(step.heads.head_dim);
                let partials = attention::partial_rows(step).saturating_mul(row);
                let cublas = self.cublas.as_ref().map_or(0, |_| granted(WORKSPACE_BYTES));
                sum(&[partials, self.tile_selector.chains_bytes(step.tokens)]).saturating_add(cublas)
            }
            Allocation::Slots(step) => granted(CudaSlots::bytes(step)),
            Allocation::Blocks { count: 0, .. } => 0,
            Allocation::Blocks { cache, count } => {
                granted(CacheShape::new(cache).block_bytes().saturating_mul(count))
            }
            Allocation::Adapters { adapters, step } => sum(&adapters::sizes(adapters, step)),
        }
    }

    fn block_bytes(&self, cache: &CacheSpec) -> u64 {
        CacheShape::new(cache).block_bytes() as u64
    }

    fn host_buffer_bytes(&self, step: &StepSpec, adapters: Option<&AdapterSpec>) -> u64 {
        let uploaders = if adapters.is_some() { 2 } else { 1 }; // of weights, and of adapters
        let parts = [
            DOWNLOAD_BYTES,
            uploaders * Uploader::BYTES,
            LISTS_BYTES,
            input_buffer_bytes(step),
            CudaSlots::host_bytes(step),
        ];
        parts.into_iter().fold(0, usize::saturating_add) as u64
    }

    fn host_memory(&self) -> Option<u64> {
        Some(self.host.available_memory().bytes.saturating_add(self.pinned.taken()))
    }

    fn available_memory(&self) -> Result<AvailableMemory, DeviceError> {
        self.memory.available().map(AvailableMemory::from)
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError> {
        self.memory.reserve(usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    fn reserve_outside(&mut self, bytes: u64) {
        self.pinned.reserve(bytes);
    }

    fn memory(&self) -> MemoryUse {
        self.memory.usage()
    }

    fn allocate(&mut self, len: usize) -> Result<CudaBuffer, DeviceError> {
        let bytes = len.saturating_mul(size_of::<f32>());
        let region = self.memory.allocate_workspace(bytes, "workspace")?;
        self.queue.clear(self.memory.pointer(&region), bytes)?;
        Ok(CudaBuffer(region))
    }

    fn allocate_operand(&mut self, rows: usize, columns: usize) -> Result<CudaOperand, DeviceError> {
        let (bytes, quantised) = self.operands.bytes(rows, columns);
        let region = self.memory.allocate_workspace(bytes, "workspace")?;
        Ok(CudaOperand { region, quantised })
    }

    fn allocate_scratch(&mut self, step: &StepSpec) -> Result<Region, DeviceError> {
        let chains = self.tile_selector.chains_bytes(step.tokens);
        self.tile_selector.chains = Some(self.memory.allocate_workspace(chains, "workspace")?);
        if let Some(cublas) = &mut self.cublas {
            cublas.workspace = Some(self.memory.allocate_workspace(WORKSPACE_BYTES, "workspace")?);
        }
        self.most_partial_rows = attention::partial_rows(step);
        let bytes = self.most_partial_rows * attention::partial_row_bytes(step.heads.head_dim);
        self.memory.allocate_workspace(bytes, "attention scratch")
    }

    fn allocate_cache(&mut self, cache: &CacheSpec) -> Result<CudaCache, DeviceError> {
        CudaCache::new(self, cache)
    }

    fn copy_blocks(
        &mut self,
        cache: &mut CudaCache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError> {
        self.queue.end_step()?;
        self.run_copies(cache, copies)
    }

    fn download(&mut self, x: &CudaBuffer, start: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        let mut rest = out;
        let mut index = start;
        while !rest.is_empty() {
            let (part, others) = rest.split_at_mut(rest.len().min(DOWNLOADED_AT_ONCE));
            rest = others;
            let bytes = size_of_val(part);
            let source = self.memory.float(x, index);
            self.queue.download(source, &mut self.downloads, bytes)?;
            self.queue.synchronize()?;
            part.copy_from_slice(bytemuck::cast_slice(&self.downloads.bytes()[..bytes]));
            index += part.len();
        }
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.queue.synchronize()
    }
}
