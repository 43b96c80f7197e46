//! Sampling. For now on the host, by the code of the CPU backend.

use std::mem::size_of;

use penstock_cuda::PinnedMemory;
use penstock_kernels::{Kernels, Pool};

use super::upload::Staging;
use super::{Cuda, CudaBuffer, start};
use crate::arena::Region;
use crate::backend::DeviceError;
use crate::cpu::{CpuSlots, SamplingWorkspace, sample_batch};
use crate::sample::{Sampled, SamplingBatch, SlotParams};
use crate::step::StepSpec;

/// The sampling state of each sequence.
pub struct CudaSlots {
    pub(super) host: CpuSlots,
    /// The token sampled last for each slot, on the device.
    pub(super) last_tokens: Region,
    tokens: Vec<u32>,
    staging: Staging,
    logits: PinnedMemory,
    floats: Vec<f32>,
    pool: Pool,
}

/// The results of a `sample` call.
pub struct CudaTicket(pub(super) Vec<Sampled>);

impl Cuda {
    pub(super) fn slots_size(&self, spec: &StepSpec) -> u64 {
        self.memory.granted(spec.sequences * size_of::<u32>())
    }

    pub(super) fn new_slots(&mut self, spec: &StepSpec) -> Result<CudaSlots, DeviceError> {
        let bytes = spec.sequences * size_of::<u32>();
        let logits = spec.logits_rows * spec.vocabulary * size_of::<f32>();
        Ok(CudaSlots {
            host: CpuSlots::new(spec.sequences, spec.vocabulary),
            last_tokens: self.memory.allocate_workspace(bytes, "workspace")?,
            tokens: vec![0; spec.sequences],
            staging: Staging::new(&self.context, bytes).map_err(|error| start(&error))?,
            logits: PinnedMemory::new(&self.context, logits).map_err(|error| start(&error))?,
            floats: vec![0.0; SamplingWorkspace::len(spec.vocabulary)],
            pool: Pool::new(1).map_err(|error| DeviceError::Start(error.to_string()))?,
        })
    }

    pub(super) fn admit(
        &mut self,
        slots: &mut CudaSlots,
        slot: u32,
        params: &SlotParams<'_>,
    ) -> Result<(), DeviceError> {
        slots.host.admit(slot as usize, params);
        slots.tokens[slot as usize] = slots.host.last_token(slot as usize);
        self.upload_tokens(slots)
    }

    fn upload_tokens(&mut self, slots: &mut CudaSlots) -> Result<(), DeviceError> {
        slots.staging.wait()?;
        let bytes: &[u8] = bytemuck::cast_slice(&slots.tokens);
        slots.staging.memory.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        slots.staging.upload(&self.queue, bytes.len(), self.memory.pointer(&slots.last_tokens))
    }

    pub(super) fn sample_batch(
        &mut self,
        logits: &CudaBuffer,
        batch: &SamplingBatch,
        slots: &mut CudaSlots,
    ) -> Result<CudaTicket, DeviceError> {
        let mut results = vec![Sampled::default(); batch.len()];
        if batch.is_empty() {
            return Ok(CudaTicket(results));
        }
        let entries = || (0..batch.len()).map(|index| batch.entry(index));
        let rows = entries().map(|entry| entry.row as usize + 1).max().unwrap_or_default();
        let bytes = rows * slots.host.vocabulary * size_of::<f32>();
        self.queue.download(self.memory.pointer(&logits.0), &mut slots.logits, bytes)?;
        self.queue.synchronize()?;
        let values = bytemuck::cast_slice(&slots.logits.bytes()[..bytes]);
        let kernels = Kernels::best();
        sample_batch(kernels, &slots.pool, values, batch, &slots.host, &mut slots.floats, &mut results);
        for entry in entries().filter(|entry| entry.given.is_none()) {
            slots.tokens[entry.slot as usize] = slots.host.last_token(entry.slot as usize);
        }
        self.upload_tokens(slots)?;
        Ok(CudaTicket(results))
    }
}
