//! The CUDA backend: weights, activations and the KV cache in the memory of one NVIDIA GPU, every operation a launch of
//! kernels of `cuda/` in one stream.
//!
//! Operations are complete in the order of the stream. The host waits only for the tokens of a step, in
//! [`Sample::collect`](crate::Sample::collect). A step takes no memory: all of it is reserved when a model is opened,
//! except for what the driver takes for graphs and for code that cuBLASLt loads. The inputs of a step are one copy from
//! page-locked memory.
//!
//! Activations are float32. The operand of a product has the type of its matrix: float32, float16 or bfloat16; for
//! quantised weights, bfloat16, or 8-bit integers or e4m3 with scales.

mod adapters;
mod attention;
mod backend;
mod cache;
mod cublas;
mod gemm_quantised;
mod graphs;
mod kernels;
mod low_rank;
mod matrix;
mod memory;
mod operand;
mod operations;
mod pinned;
mod product;
mod quantised_matrix;
mod queue;
mod sampling;
mod step;
mod tile_shape;
mod updates;
mod upload;

use std::sync::Arc;

use penstock_cuda::{Context, Cublas, CudaError, Device, Driver, KernelCompiler, PinnedMemory, Version};

use crate::cpu::CpuHost;
use crate::error::DeviceError;
pub use adapters::CudaAdapters;
use backend::DOWNLOAD_BYTES;
pub use cache::CudaCache;
use cache::LoadedAttention;
use cublas::CublasProducts;
use gemm_quantised::LoadedQuantisedGemm;
use kernels::{CommonKernels, Loader};
pub use matrix::CudaMatrix;
pub use memory::CudaBuffer;
use memory::CudaMemory;
pub use operand::CudaOperand;
use operand::Operands;
use pinned::{Counted, HostMemory};
use queue::Queue;
pub use sampling::{CudaSlots, CudaTicket};
pub use step::{CudaRope, CudaStep};
use tile_shape::TileSelector;
pub use updates::CudaAdapterLayout;
use upload::Uploader;

/// The first compute capability with products of e4m3.
const FP8_COMPUTE_CAPABILITY: Version = Version::new(8, 9);

/// A CUDA device.
pub struct Cuda {
    queue: Queue,
    memory: CudaMemory,
    uploader: Uploader,
    kernels: CommonKernels,
    loader: Loader,
    attention: LoadedAttention,
    operands: Operands,
    /// Whether kernels multiply e4m3 by tensor cores.
    has_fp8: bool,
    quantised_gemm: LoadedQuantisedGemm,
    tile_selector: TileSelector,
    /// Opened when the operations are prepared.
    cublas_library: Option<Cublas>,
    /// `None` if a row has the same bits in every batch.
    cublas: Option<CublasProducts>,
    /// Rows of the partial results of attention that the scratch memory has room for.
    most_partial_rows: usize,
    /// For copies to the host that it waits for.
    downloads: Counted<PinnedMemory>,
    pinned: HostMemory,
    host: Arc<CpuHost>,
    context: Arc<Context>,
}

impl Cuda {
    /// Opens a device in the calling thread, and loads the kernels that every model needs. Slow, if they have to be
    /// compiled, by this number of threads. With `cublas`, products may have other bits in another batch.
    pub fn open(
        driver: &Driver,
        device: &Device,
        compiler: KernelCompiler,
        host: &Arc<CpuHost>,
        threads: usize,
        cublas: Option<Cublas>,
    ) -> Result<Self, DeviceError> {
        let context = Context::open(driver, device).map_err(start)?;
        context.bind_thread().map_err(start)?;
        let mut loader = Loader::new(&context, compiler, device, threads);
        let queue = Queue::new(&context, driver, device).map_err(start)?;
        let pinned = HostMemory::new(&context, host);
        Ok(Self {
            memory: CudaMemory::empty(&context, queue.shared_stream()),
            queue,
            uploader: Uploader::new(&pinned, threads),
            kernels: CommonKernels::load(&mut loader)?,
            loader,
            attention: LoadedAttention::default(),
            operands: Operands::default(),
            has_fp8: device.architecture.version >= FP8_COMPUTE_CAPABILITY,
            quantised_gemm: LoadedQuantisedGemm::default(),
            tile_selector: TileSelector::new(device),
            cublas_library: cublas,
            cublas: None,
            most_partial_rows: 0,
            downloads: pinned.zeroed("the buffer of copies to the host", DOWNLOAD_BYTES)?,
            pinned,
            host: Arc::clone(host),
            context,
        })
    }
}

impl Drop for Cuda {
    /// Nothing may be freed while the device uses it. A lost device has stopped.
    fn drop(&mut self) {
        let _ = self.context.bind_thread().and_then(|()| self.queue.stop());
    }
}

/// The error of a call while a model is opened.
fn start(error: CudaError) -> DeviceError {
    if error.is_sticky() { lost(error) } else { DeviceError::Start(error.to_string()) }
}

/// The error of an allocation.
fn allocation(what: &'static str, bytes: usize, error: CudaError) -> DeviceError {
    if !error.is_out_of_memory() {
        return start(error);
    }
    DeviceError::OutOfMemory { what, bytes: bytes as u64, reason: error.to_string() }
}

/// The error of a device that was in use. Errors of kernels occur in later calls, so no error concerns one call only.
fn lost(error: CudaError) -> DeviceError {
    DeviceError::Lost(error.to_string())
}
