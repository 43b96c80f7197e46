//! The slots of the CPU, and their sampling, which is complete when a call returns.

use std::task::{Poll, Waker};

use bytemuck::{cast_slice, cast_slice_mut};

use crate::cpu::buffers::lend;
use crate::cpu::{Cpu, CpuBuffer, CpuScratch, CpuSlots, sampling};
use crate::error::DeviceError;
use crate::seam::{Sample, Sampled, SamplingBatch, SlotParams, StepSpec};

/// The results of a `sample` call.
pub struct CpuTicket(Vec<Sampled>);

impl Sample for Cpu {
    type Slots = CpuSlots;
    type Ticket = CpuTicket;

    fn allocate_slots(&mut self, step: &StepSpec) -> Result<CpuSlots, DeviceError> {
        Ok(CpuSlots::new(step.sequences, step.vocabulary))
    }

    fn admit_slot(
        &mut self,
        slots: &mut CpuSlots,
        slot: u32,
        params: &SlotParams<'_>,
    ) -> Result<(), DeviceError> {
        slots.admit(slot as usize, params);
        Ok(())
    }

    fn free_slot(&mut self, slots: &mut CpuSlots, slot: u32) -> Result<(), DeviceError> {
        slots.free(slot as usize);
        Ok(())
    }

    fn sample(
        &mut self,
        logits: &CpuBuffer,
        batch: &SamplingBatch,
        slots: &mut CpuSlots,
        scratch: &mut CpuScratch,
    ) -> Result<CpuTicket, DeviceError> {
        let mut results = self.spare_results.pop().unwrap_or_default();
        results.resize_with(batch.len(), Sampled::default);
        let [logits, floats] = lend(&mut self.arena, [&logits.0, &scratch.sampling]);
        let (logits, floats) = (cast_slice(logits), cast_slice_mut(floats));
        sampling::sample_batch(self.kernels, &self.pool, logits, batch, slots, floats, &mut results);
        Ok(CpuTicket(results))
    }

    fn poll(&mut self, _: &mut CpuTicket, _: &Waker) -> Poll<()> {
        Poll::Ready(())
    }

    fn collect(&mut self, ticket: CpuTicket, out: &mut Vec<Sampled>) -> Result<(), DeviceError> {
        self.spare_results.push(std::mem::replace(out, ticket.0));
        Ok(())
    }
}
