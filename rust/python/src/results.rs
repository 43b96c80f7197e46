//! What comes back: `Chunk`, `Result`, `Usage`, `Timings`, `Stats`, `ModelInfo`. Values only; `_core.pyi` documents the fields.

use penstock_engine::Limits;
use penstock_engine::request::{CachedTokens, Finish};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

use crate::record::{Shared, Tuple, record};
use crate::tensor::Tensor;

/// Ids and log probabilities of the likeliest tokens at a position.
pub type TopLogprobs = Tuple<(u32, f32)>;

record! {
    /// A piece of one choice, as it arrives.
    Chunk {
        text: String,
        token_ids: Tuple<u32>,
        logprobs: Option<Tuple<f32>>,
        top_logprobs: Option<Tuple<TopLogprobs>>,
        index: usize,
        content: String,
        reasoning: String,
        tool_calls: Tuple<ToolCallDelta>,
    }
}

record! {
    /// A function that the model wants called.
    ToolCall { id: String, name: String, arguments: String }
}

record! {
    /// A piece of a call, as it arrives.
    ToolCallDelta { index: usize, id: Option<String>, name: Option<String>, arguments: String }
}

record! {
    /// How many tokens a request took.
    Usage { prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize, cached_host_tokens: usize }
}

record! {
    /// How long a request took, in seconds since its arrival.
    Timings { queued: f64, first_token: Option<f64>, total: f64 }
}

record! {
    /// One answer, whole.
    Choice {
        index: usize,
        text: Shared<String>,
        token_ids: Shared<Tuple<u32>>,
        logprobs: Option<Shared<Tuple<f32>>>,
        top_logprobs: Option<Shared<Tuple<TopLogprobs>>>,
        cumulative_logprob: Option<f64>,
        finish_reason: String,
        stop_reason: Option<StopReason>,
        seed: u64,
        score: Option<f64>,
        content: Shared<String>,
        reasoning: Shared<String>,
        tool_calls: Shared<Tuple<ToolCall>>,
        logits: Option<Tensor>,
        hidden_states: Option<Tensor>,
    }
}

/// The class `Result`, and the fields that it has of its first choice.
macro_rules! result {
    ($($field:ident),*) => {
        record! {
            /// Everything that came of a request.
            Result {
                choices: Tuple<Choice>,
                prompt_token_ids: Shared<Tuple<u32>>,
                prompt_logprobs: Option<Shared<Tuple<Option<f32>>>>,
                prompt_top_logprobs: Option<Shared<Tuple<Option<TopLogprobs>>>>,
                usage: Usage,
                timings: Timings,
            }

            $(
                #[getter]
                fn $field<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                    self.of_first_choice(py, stringify!($field))
                }
            )*
        }
    };
}

result! {
    text, token_ids, logprobs, top_logprobs, cumulative_logprob, finish_reason, stop_reason, seed, score, content,
    reasoning, tool_calls, logits, hidden_states
}

record! {
    /// How likely a text is.
    Score { token_ids: Tuple<u32>, logprobs: Tuple<Option<f32>>, perplexity: Option<f64> }
}

record! {
    /// What the engine is doing.
    Stats {
        running: u64,
        waiting: u64,
        paused: u64,
        blocks_total: u64,
        blocks_used: u64,
        blocks_reserved: u64,
        requests_admitted: u64,
        requests_finished: u64,
        prompt_tokens: u64,
        generation_tokens: u64,
        drafted_tokens: u64,
        accepted_tokens: u64,
        steps: u64,
        blocks_cached: u64,
        host_blocks_total: u64,
        host_blocks_used: u64,
        prefix_query_tokens: u64,
        prefix_hit_tokens: u64,
        prefix_host_hit_tokens: u64,
        preemptions: u64,
        swaps: u64,
        recomputed_tokens: u64,
    }

    #[getter]
    fn prefix_hit_rate(&self) -> f64 {
        self.prefix_hit_tokens as f64 / self.prefix_query_tokens.max(1) as f64
    }
}

record! {
    /// Where the memory is, in bytes.
    MemoryInfo { limit: u64, weights: u64, workspace: u64, inputs: u64, kv_cache: u64, host_cache: u64, peak: u64 }
}

record! {
    /// What the host tier costs, in seconds per block, and what that decided.
    HostTierInfo { save_seconds: f64, load_seconds: f64, recompute_seconds: f64, keeps_prefixes: bool }
}

record! {
    /// What was opened.
    ModelInfo {
        architecture: String,
        parameters: u64,
        vocabulary_size: usize,
        dtype: String,
        kv_cache_dtype: String,
        memory: MemoryInfo,
        host_tier: Option<HostTierInfo>,
        warm_up_seconds: f64,
        block_size: usize,
        num_blocks: usize,
        max_model_len: usize,
        max_num_seqs: usize,
        max_num_batched_tokens: usize,
        max_waiting: usize,
        threads: usize,
        isa: String,
    }
}

/// What ended a request whose finish reason is `stop`.
#[derive(Clone, Debug, PartialEq, pyo3::IntoPyObjectRef, pyo3::FromPyObject)]
pub enum StopReason {
    /// A stop string.
    Text(String),
    /// A stop token.
    Token(u32),
    /// A stop sequence.
    Sequence(Tuple<u32>),
}

impl ModelInfo {
    /// Of a model and the sizes its engine runs with.
    pub fn of(info: &penstock_runner::ModelInfo, limits: &Limits) -> Self {
        Self {
            architecture: info.architecture.clone(),
            parameters: info.parameters,
            vocabulary_size: limits.vocabulary_size,
            dtype: info.dtype.name().to_owned(),
            kv_cache_dtype: info.kv_cache_dtype.name().to_owned(),
            memory: MemoryInfo::from(info.memory),
            host_tier: info.host_tier.map(HostTierInfo::from),
            warm_up_seconds: info.warm_up_seconds,
            block_size: limits.block_size,
            num_blocks: limits.num_blocks,
            max_model_len: limits.max_model_len,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_waiting: limits.max_waiting,
            threads: info.threads,
            isa: info.isa.to_owned(),
        }
    }
}

impl From<penstock_runner::MemoryInfo> for MemoryInfo {
    fn from(info: penstock_runner::MemoryInfo) -> Self {
        let penstock_runner::MemoryInfo { limit, weights, workspace, inputs, kv_cache, host_cache, peak } =
            info;
        Self { limit, weights, workspace, inputs, kv_cache, host_cache, peak }
    }
}

impl From<penstock_runner::HostTierInfo> for HostTierInfo {
    fn from(info: penstock_runner::HostTierInfo) -> Self {
        let penstock_runner::HostTierInfo { save, load, recompute, keeps_prefixes } = info;
        Self { save_seconds: save, load_seconds: load, recompute_seconds: recompute, keeps_prefixes }
    }
}

impl Usage {
    /// Of a request that is over.
    pub fn of(prompt_tokens: usize, completion_tokens: usize, cached: CachedTokens) -> Self {
        let CachedTokens { device, host } = cached;
        Self { prompt_tokens, completion_tokens, cached_tokens: device + host, cached_host_tokens: host }
    }
}

impl From<penstock_engine::Stats> for Stats {
    fn from(stats: penstock_engine::Stats) -> Self {
        Self {
            running: stats.running,
            waiting: stats.waiting,
            paused: stats.paused,
            blocks_total: stats.blocks_total,
            blocks_used: stats.blocks_used,
            blocks_reserved: stats.blocks_reserved,
            requests_admitted: stats.requests_admitted,
            requests_finished: stats.requests_finished,
            prompt_tokens: stats.prompt_tokens,
            generation_tokens: stats.generation_tokens,
            drafted_tokens: stats.drafted_tokens,
            accepted_tokens: stats.accepted_tokens,
            steps: stats.steps,
            blocks_cached: stats.blocks_cached,
            host_blocks_total: stats.host_blocks_total,
            host_blocks_used: stats.host_blocks_used,
            prefix_query_tokens: stats.prefix_query_tokens,
            prefix_hit_tokens: stats.prefix_hit_tokens,
            prefix_host_hit_tokens: stats.prefix_host_hit_tokens,
            preemptions: stats.preemptions,
            swaps: stats.swaps,
            recomputed_tokens: stats.recomputed_tokens,
        }
    }
}

impl Result {
    fn of_first_choice<'py>(&self, py: Python<'py>, field: &str) -> PyResult<Bound<'py, PyAny>> {
        let first =
            self.choices.0.first().ok_or_else(|| PyIndexError::new_err("this result has no choices"))?;
        first.into_pyobject(py)?.getattr(field)
    }
}

impl Timings {
    /// Of a request whose choices ended so: from the first that is computed to the last that ends.
    pub fn of(finishes: &[&Finish]) -> Self {
        let first_token = finishes.iter().filter_map(|finish| finish.first_token).min();
        Self {
            queued: finishes.iter().map(|finish| finish.queued).min().unwrap_or_default().as_secs_f64(),
            first_token: first_token.map(|elapsed| elapsed.as_secs_f64()),
            total: finishes.iter().map(|finish| finish.total).max().unwrap_or_default().as_secs_f64(),
        }
    }
}
