//! The memory of the CPU: one arena of the host.

use std::mem::size_of;

use bytemuck::cast_slice;
use penstock_kernels::{MatrixLayout, OperandLayout};
use penstock_types::BlockCopy;

use super::{hidden_len, rotation_width};
use crate::bfc::Placement;
use crate::cpu::buffers::{arena, lend};
use crate::cpu::cache::{CacheShape, kv_layout};
use crate::cpu::{Cpu, CpuBuffer, CpuCache, CpuOperand, CpuScratch, PAGE};
use crate::error::DeviceError;
use crate::seam::{AdapterSpec, Allocation, CacheSpec, Memory, MemoryUse, StepSpec};
use crate::system::{AvailableMemory, available_memory};

impl Memory for Cpu {
    type Buffer = CpuBuffer;
    type Operand = CpuOperand;
    type Scratch = CpuScratch;
    type Cache = CpuCache;

    fn bytes(&self, allocation: Allocation<'_>) -> u64 {
        let sum = |parts: &[u64]| parts.iter().copied().fold(0, u64::saturating_add);
        let floats = |len: usize| self.granted(len.saturating_mul(size_of::<f32>()));
        match allocation {
            Allocation::Matrix { columns, parts } => {
                let bytes = |(rows, format): &(usize, _)| {
                    MatrixLayout { rows: *rows, columns, format: *format }.bytes()
                };
                self.granted(parts.iter().map(bytes).fold(0, usize::saturating_add))
            }
            Allocation::Floats(len) => floats(len),
            Allocation::Operand { rows, columns } => {
                let codes = self.granted(rows.saturating_mul(OperandLayout::most_row_bytes(columns)));
                sum(&[floats(rows.saturating_mul(columns)), codes])
            }
            Allocation::Rope { positions, step } => {
                sum(&[positions, step.tokens].map(|rows| floats(rows.saturating_mul(rotation_width(step)))))
            }
            Allocation::Scratch(step) => {
                let (attention, sampling) = self.scratch_lens(step);
                sum(&[attention, step.tokens, sampling].map(floats))
            }
            Allocation::Slots(_) => 0, // they are on the host's heap: their size depends on the requests
            Allocation::Blocks { count: 0, .. } => 0,
            Allocation::Blocks { cache, count } => {
                self.granted(CacheShape::new(cache).block_bytes().saturating_mul(count))
            }
            Allocation::Adapters { adapters, step } => floats(hidden_len(adapters, step)),
        }
    }

    fn block_bytes(&self, cache: &CacheSpec) -> u64 {
        CacheShape::new(cache).block_bytes() as u64
    }

    fn host_buffer_bytes(&self, _: &StepSpec, _: Option<&AdapterSpec>) -> u64 {
        0
    }

    fn host_memory(&self) -> Option<u64> {
        None
    }

    fn available_memory(&self) -> Result<AvailableMemory, DeviceError> {
        let of_nodes = self.numa_memory.available().unwrap_or(u64::MAX);
        Ok(self.host.remaining(available_memory().at_most(of_nodes)))
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError> {
        assert_eq!(self.memory().peak, 0, "memory is reserved after the first allocation; this is a bug");
        self.reservation = None;
        self.arena = arena(PAGE, &self.numa_memory)?; // releases the former reservation first
        self.arena = arena(usize::try_from(bytes).unwrap_or(usize::MAX), &self.numa_memory)?;
        self.reservation = Some(self.host.reserve(self.arena.slab().as_ref()));
        Ok(())
    }

    fn reserve_outside(&mut self, bytes: u64) {
        let reservation = self.reservation.as_ref().expect("memory is reserved first; this is a bug");
        reservation.set_outside(bytes);
    }

    fn memory(&self) -> MemoryUse {
        let stats = self.arena.bfc().stats();
        MemoryUse { in_use: stats.in_use as u64, peak: stats.peak as u64 }
    }

    fn allocate(&mut self, len: usize) -> Result<CpuBuffer, DeviceError> {
        self.workspace(len, "workspace").map(CpuBuffer)
    }

    fn allocate_operand(&mut self, rows: usize, columns: usize) -> Result<CpuOperand, DeviceError> {
        let codes = OperandLayout::most_row_bytes(columns) / size_of::<f32>();
        Ok(CpuOperand {
            floats: self.workspace(rows.saturating_mul(columns), "workspace")?,
            codes: self.workspace(rows.saturating_mul(codes), "workspace")?,
        })
    }

    fn allocate_scratch(&mut self, step: &StepSpec) -> Result<CpuScratch, DeviceError> {
        let (attention, sampling) = self.scratch_lens(step);
        Ok(CpuScratch {
            attention: self.workspace(attention, "attention scratch")?,
            counters: self.workspace(step.tokens, "attention scratch")?,
            sampling: self.workspace(sampling, "sampling scratch")?,
        })
    }

    fn allocate_cache(&mut self, cache: &CacheSpec) -> Result<CpuCache, DeviceError> {
        let shape = CacheShape::new(cache);
        let mut blocks = |count, name| self.region(count, shape.block_bytes(), Placement::Low, name);
        Ok(CpuCache {
            layout: kv_layout(cache),
            num_blocks: cache.blocks,
            blocks: blocks(cache.blocks, "KV cache")?,
            host_blocks: match cache.host_blocks {
                0 => None,
                count => Some(blocks(count, "host cache")?),
            },
            shape,
        })
    }

    fn copy_blocks(
        &mut self,
        cache: &mut CpuCache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError> {
        let host = cache.host_blocks.as_ref().expect("copies without a host tier; this is a bug");
        let [blocks, host] = lend(&mut self.arena, [&cache.blocks, host]);
        copies.for_each(|copy| cache.shape.copy(blocks, host, copy));
        Ok(())
    }

    fn download(&mut self, x: &CpuBuffer, start: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        let [x] = lend(&mut self.arena, [&x.0]);
        out.copy_from_slice(&cast_slice(x)[start..][..out.len()]);
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}
