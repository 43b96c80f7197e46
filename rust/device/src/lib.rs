//! Devices: the operations a decoder is written over, and the backends that carry them out.
//!
//! [`Backend`] is the seam: opaque matrices, vectors, buffers and caches, and about a dozen operations of the size of a
//! language model's layer. Nothing here knows a model family, a request or a scheduler. [`cpu::Cpu`] is the CPU backend; it
//! calls `penstock-kernels` and contains no arithmetic of its own except for sampling.
//!
//! All memory of a device is one [`arena`], divided by [`bfc`], the best-fit allocator with coalescing.

pub mod arena;
pub mod backend;
pub mod bfc;
mod counts;
pub mod cpu;
mod sample;
mod step;

pub use backend::{Backend, CacheSpec, DeviceError, MemoryUse, RowSource};
pub use counts::{TokenCount, TokenCounts};
pub use cpu::probabilities_for_testing;
pub use sample::{SampleParams, Sampled};
pub use step::{StepInputs, StepSpec};
