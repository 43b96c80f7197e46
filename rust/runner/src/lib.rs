//! From a checkpoint to a running engine: loads the model, sizes the KV cache, starts the device thread that owns both,
//! and hands back the engine's handle. Each [`StepPlan`](penstock_engine::executor::StepPlan) is turned into input buffers,
//! a forward pass and sampled tokens here; what to compute is decided in `penstock-engine` alone.

mod inputs;
mod launch;
mod runner;

use std::ops::ControlFlow;

pub use launch::logits;
pub use penstock_device::{Element, KvElement};

/// What the user may choose when a model is opened; `None` means the default that its comment gives.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Compute threads; by default every CPU this process may run on.
    pub threads: Option<usize>,
    /// Type the weights are kept in; by default the checkpoint's own (float32 for GGUF files).
    pub dtype: Option<Element>,
    /// Type of the KV cache; by default that of the weights.
    pub kv_cache_dtype: Option<KvElement>,
    /// Most tokens of one sequence; by default the model's own context length.
    pub max_model_len: Option<usize>,
    /// Most sequences computed together, at most `max_num_batched_tokens`; by default 64.
    pub max_num_seqs: Option<usize>,
    /// Token budget of a step; by default 512.
    pub max_num_batched_tokens: Option<usize>,
    /// Most requests that may wait; by default 1024.
    pub max_waiting: Option<usize>,
    /// Tokens per KV block: 16, 32, 64 or 128; by default 16.
    pub block_size: Option<usize>,
    /// Size of the KV cache in bytes; by default a quarter of the memory available when the model is opened, and never
    /// more than `max_num_seqs` sequences of `max_model_len` tokens need.
    pub kv_cache_bytes: Option<u64>,
    /// A private hook for tests: the step that computes this token fails.
    pub failing_token: Option<u32>,
}

/// What was opened, for `penstock info`, logs and statistics.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// Hugging Face architecture name, such as `LlamaForCausalLM`.
    pub architecture: String,
    /// Number of weights, tied ones counted once.
    pub parameters: u64,
    /// Bytes of packed weights in memory.
    pub weight_bytes: u64,
    /// Type the weights are kept in.
    pub dtype: Element,
    /// Type of the KV cache.
    pub kv_cache_dtype: KvElement,
    /// Bytes of the KV cache.
    pub kv_cache_bytes: u64,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set of the kernels, as `PENSTOCK_ISA` spells it.
    pub isa: &'static str,
}

/// Progress of loading: bytes of packed weights written, and how many there will be. `Break` stops the loading.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// Opens a model and starts its engine. Blocks until the weights are in memory.
pub fn launch(
    checkpoint: &penstock_checkpoint::Checkpoint,
    options: &Options,
    progress: Progress<'_>,
) -> Result<(penstock_engine::Engine, ModelInfo), LaunchError> {
    launch::launch(checkpoint, options, progress)
}

/// Why a model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// An option, or a variable of the environment, outside its range.
    #[error("{field}={value} is out of range: {limit}")]
    Option {
        /// The option's name.
        field: &'static str,
        /// What was given.
        value: String,
        /// What is allowed, in words.
        limit: String,
    },
    /// The files cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] penstock_checkpoint::CheckpointError),
    /// The model is not one we know, or its configuration makes no sense.
    #[error("{0}")]
    Model(String),
    /// Memory does not suffice.
    #[error("{0}")]
    OutOfMemory(String),
    /// `progress` asked to stop.
    #[error("loading was cancelled")]
    Cancelled,
    /// A thread could not be started.
    #[error("the engine could not be started: {0}")]
    Start(String),
}
