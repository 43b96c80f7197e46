//! CUDA, found when the program runs: [`Driver`] loads its library and lists its devices, [`Nvrtc`] compiles
//! kernels, and [`KernelCompiler`] keeps compiled kernels in a [`KernelCache`]. A [`Context`] uses a device: memory,
//! streams, events and launches of kernels; [`Cublas`] multiplies matrices in it. Nothing of CUDA is needed to build
//! the crate.
//!
//! A library that is missing, old or damaged is an error with a reason and a remedy. Nothing panics, and nothing is
//! loaded before it is asked for.

mod cache;
mod compiler;
mod context;
mod cublas;
mod device;
mod driver;
mod error;
mod functions;
mod graph;
mod library;
mod memory;
mod module;
mod nvrtc;
#[cfg(feature = "testing")]
mod observer;
mod sources;
mod stream;
mod system;
mod table;
#[cfg(feature = "testing")]
pub mod testing;
mod unavailable;

pub use cache::{KernelArchive, KernelCache};
pub use compiler::{CompileError, KernelCompiler, OPTIONS};
pub use context::{CallerThread, Context};
pub use cublas::{CUBLAS_ALIGNMENT, Cublas, CublasHandle, MatrixProduct, ProductOperands, ProductShape};
pub use device::{Architecture, Device};
pub use driver::Driver;
pub use error::{CallError, CublasError, CudaError};
pub use graph::GraphExec;
pub use library::{NotFound, Search};
pub use memory::{DeviceMemory, DevicePointer, PinnedBlock, PinnedMemory};
pub use module::{Argument, Grid, Kernel, Module, Parameter};
pub use nvrtc::{Nvrtc, NvrtcError};
pub use sources::Sources;
pub use stream::{Event, Stream};
pub use system::{others_may_change, own_folder};
pub use unavailable::Unavailable;

use std::fmt::{self, Display, Formatter};

/// A version of CUDA, or a compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second number.
    pub minor: u32,
}

impl Version {
    /// The version of these numbers.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }
}

impl Display for Version {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
