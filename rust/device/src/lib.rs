//! Devices: the operations that a decoder consists of, and the backends that implement them.
//!
//! [`seam`] is the interface, in four traits that make a [`Backend`]: opaque matrices, vectors, buffers and caches, and
//! about a dozen operations of the size of a language model's layer. Nothing here knows a model family, a request or a
//! scheduler. [`cpu::Cpu`] is the CPU backend; it calls `penstock-kernels` and contains no arithmetic of its own except
//! for sampling.
//!
//! All memory of a device is one [`arena`], divided by [`bfc`], the best-fit allocator with coalescing.

pub mod arena;
pub mod bfc;
mod counts;
pub mod cpu;
pub mod cuda;
mod error;
pub mod packed;
mod profile;
pub mod seam;
mod system;
mod timed;

#[cfg(feature = "testing")]
pub use cpu::probabilities_for_testing;
pub use error::DeviceError;
pub use profile::{Profile, ProfileRow};
pub use seam::{
    AdapterLayout, AdapterRows, AdapterSpec, AdapterUpdates, Allocation, Backend, CacheSpec, Compute, EXTRA,
    FOLLOWS, HeadNorms, LayerAttention, LayerHeads, Load, MatrixPart, Memory, MemoryUse, PackedLayout,
    PlannedMatrix, RowSource, Sample, Sampled, SamplingBatch, SamplingEntry, SlotParams, StepInputs,
    StepLimits, StepRows, StepSpec, WeightSource,
};
pub use system::{AvailableMemory, MemoryLimit};
pub use timed::Timed;
