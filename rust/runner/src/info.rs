//! The properties of an open model.

use std::sync::Arc;

use penstock_device::Profile;
use penstock_models::ModuleFormat;
use penstock_types::{Device, Dtype, KvDtype, Minimum, WeightFormat};

use crate::adapters::AdapterLoader;

/// The properties of an open model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// Hugging Face architecture name, such as `LlamaForCausalLM`.
    pub architecture: String,
    /// Number of weights; tied weights count once.
    pub parameters: u64,
    /// Width of a hidden state.
    pub hidden_size: usize,
    pub dtype: Dtype,
    pub weight_formats: Vec<WeightFormatInfo>,
    pub kv_cache_dtype: KvDtype,
    pub memory: MemoryInfo,
    /// See `EngineConfig::memory_ratio`.
    pub memory_ratio: f64,
    /// `None` without a host tier.
    pub host_tier: Option<HostTierInfo>,
    pub warm_up_seconds: f64,
    /// The device that computes.
    pub device: Device,
    /// Compute threads of the host.
    pub threads: usize,
    /// Instruction set of the kernels, as in `PENSTOCK_ISA`, or the architecture of the CUDA device.
    pub isa: String,
    /// Whether a request has the same tokens and logprobs in every batch.
    pub deterministic: bool,
    /// `None` if threads and memory are anywhere.
    pub numa: Option<NumaInfo>,
    /// `None` without adapters.
    pub adapters: Option<AdapterLoader>,
    /// The operations of the device, measured since the warm-up, if `EngineConfig::profile` is set.
    pub profile: Option<Arc<Profile>>,
}

/// The format of the weight matrices of one module in all layers, or in some of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightFormatInfo {
    /// The name of the module without that of its layer, such as `mlp.down_proj`.
    pub module: String,
    /// `float32`, `float16`, `bfloat16`, or the type of the codes.
    pub format: String,
    /// Columns that share a scale; `None` for a whole row and for plain numbers.
    pub group_size: Option<usize>,
    /// Whether groups have no minimum and no zero point; `None` for plain numbers.
    pub symmetric: Option<bool>,
    /// The type of the activations in a product.
    pub activations: String,
    /// Number of matrices.
    pub count: usize,
    /// Bytes of these matrices.
    pub bytes: u64,
}

impl WeightFormatInfo {
    /// The format of a module, with these activations.
    pub(crate) fn new(
        ModuleFormat { module, format, count, bytes }: ModuleFormat,
        activations: &str,
    ) -> Self {
        let activations = activations.to_owned();
        let (format, group_size, symmetric) = match format {
            WeightFormat::Float(dtype) => (dtype.name().to_owned(), None, None),
            WeightFormat::Grid(grid) => (
                grid.bits.name().to_owned(),
                grid.group.map(usize::from),
                Some(grid.minimum == Minimum::Centred),
            ),
        };
        Self { module, format, group_size, symmetric, activations, count, bytes }
    }
}

/// The NUMA nodes of threads and memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaInfo {
    pub nodes: Vec<u32>,
    /// CPUs of the nodes that the process may use.
    pub cpus: Vec<u32>,
    /// Whether the system accepted the CPUs.
    pub threads_pinned: bool,
    /// Whether the system accepted the nodes of the memory.
    pub memory_placed: bool,
}

/// The use of the memory in bytes, as planned when the model was opened; nothing grows afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// The most that the engine may take: its share of the memory that was available when the model was opened.
    pub limit: u64,
    /// Packed weights.
    pub weights: u64,
    /// Activations and scratch buffers of the largest step.
    pub workspace: u64,
    /// The input arrays of the largest step, and the page-locked buffers of a CUDA device. They are not in the arena.
    pub inputs: u64,
    /// The KV cache. On the CPU, the system provides its pages when they are first written.
    pub kv_cache: u64,
    /// The host tier. The system provides its pages when they are first written. With a CUDA device, it is page-locked
    /// memory beside the arena.
    pub host_cache: u64,
    /// The adapters on the device and their buffer. On the CPU, the system provides its pages when they are first
    /// written.
    pub adapters: u64,
    /// The most bytes of the arena in use at once, up to the end of the warm-up.
    pub peak: u64,
}

/// The measured costs of the host tier, in seconds per block of all layers, and the resulting decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostTierInfo {
    /// Copying a block to the host tier.
    pub save_seconds: f64,
    /// Copying a block back.
    pub load_seconds: f64,
    /// Computing a block again, at the speed of the largest prompt chunk.
    pub recompute_seconds: f64,
    /// Whether the host tier keeps prefixes: there is a prefix cache, and loading is faster than computing.
    pub keeps_prefixes: bool,
}
