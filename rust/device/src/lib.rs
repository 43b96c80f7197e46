//! Devices: the operations that a decoder consists of, and the backends that implement them.
//!
//! [`Backend`] is the interface: opaque matrices, vectors, buffers and caches, and about a dozen operations of the size
//! of a language model's layer. Nothing here knows a model family, a request or a scheduler. [`cpu::Cpu`] is the CPU
//! backend; it calls `penstock-kernels` and contains no arithmetic of its own except for sampling.
//!
//! All memory of a device is one [`arena`], divided by [`bfc`], the best-fit allocator with coalescing.

pub mod arena;
pub mod backend;
pub mod bfc;
mod counts;
pub mod cpu;
pub mod cuda;
mod error;
pub mod packed;
mod profile;
mod sample;
mod step;
mod system;
mod timed;

pub use backend::{
    Backend, CacheSpec, MatrixPart, MemoryUse, PackedLayout, PlannedMatrix, RowSource, WeightSource,
};
#[cfg(feature = "testing")]
pub use cpu::probabilities_for_testing;
pub use error::DeviceError;
pub use profile::{Profile, ProfileRow};
pub use sample::{SampleOutcome, Sampled, SamplingBatch, SamplingEntry, SlotParams};
pub use step::{AdapterRows, AdapterSpec, EXTRA, FOLLOWS, StepInputs, StepLimits, StepRows, StepSpec};
pub use timed::Timed;
