//! From a checkpoint to a running engine: divides the memory, loads the model, warms it up, starts the device thread that
//! owns it, and hands back the engine's handle. Each [`StepPlan`] is turned into input
//! buffers, a forward pass and sampled tokens here; what to compute is decided in `penstock-engine` alone.

mod device_thread;
mod grammar;
mod inputs;
mod launch;
mod logits_rows;
mod memory;
mod options;
mod remedies;
mod runner;
mod slot;
mod user_code;
mod warm_up;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use penstock_types::{Dtype, KvDtype};

pub use launch::logits;
use penstock_device::DeviceError;
use penstock_device::cpu::Cpu;
pub use penstock_engine::PreemptionMode;
use penstock_engine::request::Request;
use penstock_engine::{Limits, StepOutput, StepPlan};
pub use penstock_models::LoadProgress;
use runner::Runner;
use slot::{Slot, slot_params};

/// What the user may choose when a model is opened; `None` means the default that its comment gives.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Compute threads; by default every CPU this process may run on.
    pub threads: Option<usize>,
    /// Type the weights are kept in; by default the checkpoint's own (float32 for GGUF files).
    pub dtype: Option<Dtype>,
    /// Type of the KV cache; by default that of the weights.
    pub kv_cache_dtype: Option<KvDtype>,
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
    /// Share of the available memory that the engine may take, above 0 and at most 1; by default 0.9. Where it is given, the
    /// KV cache takes all that is left of that share; otherwise a quarter, as a guest should.
    pub memory_ratio: Option<f64>,
    /// Bytes of the available memory that are left alone before the share is worked out; by default none.
    pub memory_leftover_bytes: Option<u64>,
    /// Size of the KV cache in bytes; by default as `memory_ratio` says. It is never made larger than `max_num_seqs`
    /// sequences of `max_model_len` tokens need, or twice that with a prefix cache.
    pub kv_cache_bytes: Option<u64>,
    /// How long blocks that nobody uses stay in the prefix cache; `None` for no prefix cache.
    pub prefix_cache_ttl: Option<Duration>,
    /// What happens when the KV cache is full.
    pub preemption_mode: PreemptionMode,
    /// Size of the host tier in bytes, for the prefix cache or for swapping; by default as large as the KV cache where
    /// sequences are swapped, else none.
    pub host_cache_bytes: Option<u64>,
    /// Most tokens of a sequence that are guessed from what came before and verified in one step; 0 for no guesses.
    pub num_speculative_tokens: usize,
    /// A private hook for tests: the step that computes this token fails.
    pub failing_token: Option<u32>,
}

/// What was opened: for whoever opened it, and the log.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// Hugging Face architecture name, such as `LlamaForCausalLM`.
    pub architecture: String,
    /// Number of weights, tied ones counted once.
    pub parameters: u64,
    /// Width of a hidden state.
    pub hidden_size: usize,
    /// Type the weights are kept in.
    pub dtype: Dtype,
    /// Type of the KV cache.
    pub kv_cache_dtype: KvDtype,
    /// Where the memory is.
    pub memory: MemoryInfo,
    /// What the host tier's copies cost, and whether it keeps prefixes; `None` without a host tier.
    pub host_tier: Option<HostTierInfo>,
    /// Time the warm-up took.
    pub warm_up_seconds: f64,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set of the kernels, as `PENSTOCK_ISA` spells it.
    pub isa: &'static str,
}

/// Where the memory is, in bytes, as it was divided when the model was opened; nothing grows afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// The most the engine may take: the share of what was available when the model was opened.
    pub limit: u64,
    /// Packed weights.
    pub weights: u64,
    /// Activations and scratch of the largest step.
    pub workspace: u64,
    /// The arrays that describe the largest step. All else here is in the arena.
    pub inputs: u64,
    /// The KV cache; its pages are taken from the system when they are first written.
    pub kv_cache: u64,
    /// Its host tier, likewise.
    pub host_cache: u64,
    /// Most bytes of the arena in use at once, as it counted them itself up to the end of the warm-up.
    pub peak: u64,
}

/// The host tier: seconds per block, of all layers, as measured at the warm-up, and what they decided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostTierInfo {
    /// To copy it to the host tier.
    pub save: f64,
    /// To copy it back.
    pub load: f64,
    /// To compute it again, at the speed of the largest chunk of a prompt.
    pub recompute: f64,
    /// Whether it keeps prefixes: there is a prefix cache, and loading is quicker than computing again.
    pub keeps_prefixes: bool,
}

/// Opens a model and starts its engine. Blocks until the weights are in memory.
pub fn launch(
    checkpoint: &penstock_checkpoint::Checkpoint,
    options: &Options,
    progress: LoadProgress<'_>,
) -> Result<(penstock_engine::Engine, ModelInfo), LaunchError> {
    launch::launch(checkpoint, options, progress)
}

/// A model that carries out plans as they come, on the caller's thread. A private hook for tests and benchmarks: no engine.
pub struct BareRunner(Runner<Cpu>);

impl BareRunner {
    /// Opens a model as [`launch()`] does.
    pub fn open(
        checkpoint: &penstock_checkpoint::Checkpoint,
        options: &Options,
    ) -> Result<(Self, Limits), LaunchError> {
        let opened = launch::open(checkpoint, options, &mut |_, _| ControlFlow::Continue(()))?;
        Ok((Self(opened.runner), opened.limits))
    }

    /// Runs a plan and writes its output.
    pub fn run(&mut self, plan: &StepPlan, output: &mut StepOutput) -> Result<(), DeviceError> {
        let flight = self.0.launch(plan, output, false)?;
        self.0.finish(flight, plan, output)
    }
}

/// The probabilities from which the next token of a request is sampled, `generated` so far, 0 for masked and filtered ids;
/// `mask` is its grammar's. A private hook for tests: no model, and everything that sampling does but the random draw.
pub fn probabilities(
    request: Request,
    generated: &[u32],
    logits: &[f32],
    mask: Option<&[u32]>,
) -> Result<Vec<f32>, String> {
    let request = Arc::new(request);
    let mut processed = logits.to_vec();
    let mut slot = Slot::default();
    slot.admit(&request, generated, logits.len());
    slot.process(&mut processed)?;
    let params = slot_params(&request, generated);
    Ok(penstock_device::probabilities_for_testing(logits, &params, mask, Some(&processed)))
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
