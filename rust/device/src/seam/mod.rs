//! The contract between a model and a device, in four traits, one for each duty:
//!
//! | trait | duty |
//! |---|---|
//! | [`Memory`] | sizes, the reservation, buffers, copies, waiting for the device |
//! | [`Load`] | the supported formats; packing and loading weights, rope tables and adapters |
//! | [`Sample`] | slots and their sampling |
//! | [`Compute`] | the operations of a step |
//!
//! A backend owns its device; one thread drives it. Weights, activations and caches are associated types that only the
//! backend looks into, so a model is written once and does not depend on the device. The inputs of a step (tokens,
//! positions, block tables) are uploaded once and shared by every layer.
//!
//! Operations take effect in the order of the calls, but may return before they have: only [`Sample::collect`],
//! [`Memory::download`] and [`Memory::synchronize`] wait for the device. Host arguments may be reused as soon as a call
//! returns.
//!
//! Every operation of a [deterministic](Compute::is_deterministic) backend is: an output row depends on its own input
//! row (and, for attention, on the sequence's own cache) alone, never on the number of rows or of threads.

mod compute;
mod load;
mod memory;
pub(crate) mod sample;
mod step;

pub use compute::{AdapterUpdates, Compute, HeadNorms, LayerAttention, LayerHeads};
pub use load::{AdapterLayout, Load, MatrixPart, PackedLayout, PlannedMatrix, RowSource, WeightSource};
pub use memory::{Allocation, CacheSpec, Memory, MemoryUse};
pub use sample::{Sample, Sampled, SamplingBatch, SamplingEntry, SlotParams};
pub(crate) use sample::{factor, has_penalty, is_greedy};
pub use step::{AdapterRows, AdapterSpec, EXTRA, FOLLOWS, StepInputs, StepLimits, StepRows, StepSpec};

/// A device that can run a decoder: it has all four duties.
pub trait Backend: Memory + Load + Sample + Compute {}

impl<D: Memory + Load + Sample + Compute> Backend for D {}
