//! The requested configuration of an engine: its fields, their defaults, and the checks that do not need the model.

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use penstock_types::config_limits::*;
use penstock_types::{Device, Dtype, FieldError, KvDtype, PreemptionMode, PreemptionVictim, Quantization};
use serde_json::{Map, Value};

use crate::CudaSettings;

/// The requested configuration of an engine; `None` selects the default.
#[derive(Clone, Debug, Default)]
pub struct EngineConfig {
    /// Values that are merged into the model's `config.json`.
    pub config_overrides: Map<String, Value>,
    /// Compute threads; by default the number of CPUs available to the process, or with `numa_nodes`
    /// the physical cores of the smallest node times the number of nodes.
    pub threads: Option<usize>,
    /// NUMA nodes of the threads and the memory; `None` for any.
    pub numa_nodes: Option<Vec<usize>>,
    /// Instruction set of the kernels; by default the best of the CPU. Only the environment sets it.
    pub isa: Option<String>,
    /// Type of the weights that are not quantised; by default that of the checkpoint.
    pub dtype: Option<Dtype>,
    pub quantization: Quantization,
    /// Type of the KV cache; by default that of the weights.
    pub kv_cache_dtype: Option<KvDtype>,
    /// Maximum sequence length; by default the model's, or the longest that fits the KV cache.
    pub max_model_len: Option<usize>,
    /// Maximum number of sequences in a step, at most `max_num_batched_tokens`; by default 64.
    pub max_num_seqs: Option<usize>,
    /// Token budget of a step; by default 512.
    pub max_num_batched_tokens: Option<usize>,
    /// Maximum number of waiting requests; by default without a bound.
    pub max_waiting: Option<usize>,
    /// Maximum number of unfinished sequences, without the paused ones; by default 65,536.
    pub max_unfinished: Option<usize>,
    /// Maximum size of the tensors and logprobs of open requests in bytes; by default 4 GiB.
    pub max_output_bytes: Option<usize>,
    /// Maximum number of paused sequences; by default 4096.
    pub max_paused: Option<usize>,
    /// Tokens per KV block: 16, 32, 64 or 128; by default 16.
    pub block_size: Option<usize>,
    /// Share of the available memory that the engine may take, above 0 and at most 1; by default 0.9. If set, the KV
    /// cache takes all that weights and workspace leave of it, otherwise a quarter.
    pub memory_ratio: Option<f64>,
    /// Bytes of the available memory that are not counted in the share; by default 0.
    pub memory_leftover_bytes: Option<u64>,
    /// Size of the KV cache; by default see `memory_ratio`. It is never larger than `max_num_seqs` sequences of
    /// `max_model_len` tokens need, or twice that with a prefix cache.
    pub kv_cache_bytes: Option<u64>,
    /// Size of the KV cache in blocks, exactly.
    pub kv_cache_blocks: Option<usize>,
    /// Size of the KV cache as a share of the memory that weights, workspace and host tier leave.
    pub kv_cache_ratio: Option<f64>,
    /// Time for which unused blocks stay in the prefix cache; `None` for no prefix cache.
    pub prefix_cache_ttl: Option<Duration>,
    pub preemption_mode: PreemptionMode,
    pub preemption_victim: PreemptionVictim,
    /// Size of the host tier, for the prefix cache or for swapping; by default the size of the KV cache with
    /// `PreemptionMode::Swap`, otherwise 0.
    pub host_cache_bytes: Option<u64>,
    /// Size of the host tier in blocks.
    pub host_cache_blocks: Option<usize>,
    /// Maximum number of adapters on the device.
    pub max_adapters: usize,
    /// Maximum rank of an adapter; by default 64.
    pub max_adapter_rank: Option<usize>,
    /// Bytes of the adapters on the device; by default room for `max_adapters` of rank 16, and for one of the maximum.
    pub adapter_cache_bytes: Option<u64>,
    /// Maximum number of loaded adapters; by default `max_adapters`.
    pub max_cpu_adapters: Option<usize>,
    /// Bytes of the loaded adapters; by default the host memory that is available once the engine's is reserved.
    pub max_cpu_adapter_bytes: Option<u64>,
    /// Maximum number of draft tokens that a step verifies for a sequence; `None` for no speculation.
    pub num_speculative_tokens: Option<usize>,
    /// Size of the cache of packed weights on disk; 0 or `None` for no cache.
    pub weights_cache_bytes: Option<u64>,
    /// The device that computes.
    pub device: Device,
    /// Whether a request has the same tokens and logprobs in every batch; by default true.
    pub deterministic: Option<bool>,
    /// The settings of CUDA. Only the environment sets them.
    pub cuda: CudaSettings,
    /// The directory of that cache. Only the environment sets it.
    pub cache_directory: Option<PathBuf>,
    /// Measure the operations of the device.
    pub profile: bool,
    /// Failures for tests.
    #[cfg(feature = "testing")]
    pub faults: Faults,
}

/// Failures for tests. Steps fail after their model has been submitted.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A step panics if it computes this token, as far as the host knows its tokens.
    pub token: Option<u32>,
    /// A step panics if a row begins at this position.
    pub position: Option<u32>,
    /// A step that computes this token loses the device.
    pub losing_token: Option<u32>,
    /// Memory for the details of a row is refused from this number of values on.
    pub refused_details: Option<usize>,
    /// Steps wait this long for the masks of grammars, of which none is slow.
    pub mask_wait: Option<Duration>,
}

impl EngineConfig {
    /// Checks the fields as far as they do not depend on the model.
    pub fn check(&self) -> Result<(), FieldError> {
        check_threads("threads", self.threads)?;
        self.check_numa_nodes()?;
        let block_size = self.block_size();
        if !BLOCK_SIZE_CHOICES.contains(&block_size) {
            return Err(FieldError::new("block_size", block_size, "16, 32, 64 or 128"));
        }
        let num_tokens = self.max_num_batched_tokens();
        if !(block_size..=MAX_NUM_BATCHED_TOKENS).contains(&num_tokens) {
            let limit = format!("an integer from block_size={block_size} to {MAX_NUM_BATCHED_TOKENS}");
            return Err(FieldError::new("max_num_batched_tokens", num_tokens, limit));
        }
        let most = self.most_sequences();
        if !(1..=most).contains(&self.max_num_seqs()) {
            let limit = format!("an integer from 1 to {most} with max_num_batched_tokens={num_tokens}");
            return Err(FieldError::new("max_num_seqs", self.max_num_seqs(), limit));
        }
        check_range("max_model_len", self.max_model_len, 1, MAX_MODEL_LEN)?;
        check_range("max_waiting", self.max_waiting, 1, MAX_WAITING)?;
        check_range("max_unfinished", self.max_unfinished, 128, MAX_UNFINISHED)?;
        check_range("max_paused", self.max_paused, 1, MAX_PAUSED)?;
        check_range("max_output_bytes", self.max_output_bytes, 1, MAX_OUTPUT_BYTES)?;
        check_range("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_NUM_SPECULATIVE_TOKENS)?;
        check_range("kv_cache_bytes", self.kv_cache_bytes, 1, MAX_KV_CACHE_BYTES)?;
        check_range("kv_cache_blocks", self.kv_cache_blocks, 1, MAX_KV_CACHE_BLOCKS)?;
        check_range("weights_cache_bytes", self.weights_cache_bytes, 0, MAX_WEIGHTS_CACHE_BYTES)?;
        check_range("max_adapters", Some(self.max_adapters), 0, MAX_ADAPTERS)?;
        check_range("max_adapter_rank", self.max_adapter_rank, 1, MAX_ADAPTER_RANK)?;
        check_range("adapter_cache_bytes", self.adapter_cache_bytes, 1, MAX_ADAPTER_CACHE_BYTES)?;
        check_range("max_cpu_adapters", self.max_cpu_adapters, self.max_adapters, MAX_CPU_ADAPTERS)?;
        check_range("max_cpu_adapter_bytes", self.max_cpu_adapter_bytes, 1, MAX_CPU_ADAPTER_BYTES)?;
        check_ratio("kv_cache_ratio", self.kv_cache_ratio)?;
        check_ratio("memory_ratio", self.memory_ratio)?;
        if let Some(ttl) = self.prefix_cache_ttl
            && (ttl.is_zero() || ttl.as_secs_f64() > MAX_PREFIX_CACHE_TTL)
        {
            let limit = format!("above 0 and at most {MAX_PREFIX_CACHE_TTL} seconds");
            return Err(FieldError::new("prefix_cache_ttl", ttl.as_secs_f64(), limit));
        }
        self.check_host_cache()
    }

    /// Whether a request has the same tokens and logprobs in every batch.
    pub(crate) fn deterministic(&self) -> bool {
        self.deterministic.unwrap_or(true)
    }

    /// The nodes differ, and each has the same number of threads.
    fn check_numa_nodes(&self) -> Result<(), FieldError> {
        let Some(nodes) = &self.numa_nodes else { return Ok(()) };
        let refused = |limit| Err(FieldError::new("numa_nodes", format!("{nodes:?}"), limit));
        let num_nodes = nodes.len();
        if !(1..=MAX_NUMA_NODES).contains(&num_nodes) {
            return refused(format!("1 to {MAX_NUMA_NODES} nodes"));
        }
        if let Some((_, node)) = nodes.iter().enumerate().find(|(index, node)| nodes[..*index].contains(node))
        {
            return refused(format!("different nodes; {node} occurs twice"));
        }
        check_thread_multiple("threads", self.threads, num_nodes)
    }

    /// The number of nodes between which the threads are divided.
    pub(crate) fn num_numa_nodes(&self) -> usize {
        self.numa_nodes.as_ref().map_or(1, |nodes| nodes.len().max(1))
    }

    /// A host tier must have a use, and swapping must have a host tier.
    fn check_host_cache(&self) -> Result<(), FieldError> {
        check_range("host_cache_bytes", self.host_cache_bytes, 0, MAX_HOST_CACHE_BYTES)?;
        check_range("host_cache_blocks", self.host_cache_blocks, 0, MAX_HOST_CACHE_BLOCKS)?;
        let blocks = self.host_cache_blocks.map(|blocks| ("host_cache_blocks", blocks as u64));
        let bytes = self.host_cache_bytes.map(|bytes| ("host_cache_bytes", bytes));
        let Some((field, size)) = blocks.or(bytes) else { return Ok(()) };
        let is_swapping = self.preemption_mode == PreemptionMode::Swap;
        let limit = match size {
            0 if is_swapping => "above 0 if preemption_mode is swap",
            1.. if !is_swapping && self.prefix_cache_ttl.is_none() => {
                "0 if prefix_cache is False and preemption_mode is not swap"
            }
            _ => return Ok(()),
        };
        Err(FieldError::new(field, size, limit))
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size.unwrap_or(DEFAULT_BLOCK_SIZE)
    }

    pub(crate) fn max_num_batched_tokens(&self) -> usize {
        self.max_num_batched_tokens.unwrap_or(DEFAULT_MAX_NUM_BATCHED_TOKENS)
    }

    pub(crate) fn max_num_seqs(&self) -> usize {
        self.max_num_seqs.unwrap_or(DEFAULT_MAX_NUM_SEQS.min(self.most_sequences()))
    }

    /// Every running sequence advances in every step, so a step has at least one token for each.
    fn most_sequences(&self) -> usize {
        self.max_num_batched_tokens().min(MAX_NUM_SEQS)
    }

    pub(crate) fn max_waiting(&self) -> usize {
        self.max_waiting.unwrap_or(usize::MAX)
    }

    pub(crate) fn max_unfinished(&self) -> usize {
        self.max_unfinished.unwrap_or(DEFAULT_MAX_UNFINISHED)
    }

    pub(crate) fn max_output_bytes(&self) -> usize {
        self.max_output_bytes.unwrap_or(DEFAULT_MAX_OUTPUT_BYTES)
    }

    pub(crate) fn max_paused(&self) -> usize {
        self.max_paused.unwrap_or(DEFAULT_MAX_PAUSED)
    }

    pub(crate) fn max_adapter_rank(&self) -> usize {
        self.max_adapter_rank.unwrap_or(DEFAULT_MAX_ADAPTER_RANK)
    }

    pub(crate) fn max_cpu_adapters(&self) -> usize {
        self.max_cpu_adapters.unwrap_or(self.max_adapters)
    }

    pub(crate) fn memory_ratio(&self) -> f64 {
        self.memory_ratio.unwrap_or(DEFAULT_MEMORY_RATIO)
    }
}

/// Checks that a value is from `least` to `most`, if it is set.
fn check_range<T: Copy + Display + PartialOrd>(
    field: &'static str,
    value: Option<T>,
    least: T,
    most: T,
) -> Result<(), FieldError> {
    match value {
        Some(value) if !(least..=most).contains(&value) => {
            Err(FieldError::new(field, value, format!("an integer from {least} to {most}")))
        }
        _ => Ok(()),
    }
}

pub(crate) fn check_threads(field: &'static str, threads: Option<usize>) -> Result<(), FieldError> {
    check_range(field, threads, 1, MAX_THREADS)
}

/// Each node has the same number of threads.
pub(crate) fn check_thread_multiple(
    field: &'static str,
    threads: Option<usize>,
    num_nodes: usize,
) -> Result<(), FieldError> {
    match threads {
        Some(threads) if !threads.is_multiple_of(num_nodes) => {
            let limit = format!("a multiple of {num_nodes}, the number of numa_nodes");
            Err(FieldError::new(field, threads, limit))
        }
        _ => Ok(()),
    }
}

pub(crate) fn check_ratio(field: &'static str, ratio: Option<f64>) -> Result<(), FieldError> {
    match ratio {
        // The positive form excludes NaN.
        Some(ratio) if !(ratio > 0.0 && ratio <= 1.0) => {
            Err(FieldError::new(field, ratio, "a number above 0 and at most 1"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Panics unless `change` makes the default configuration invalid with this message.
    #[track_caller]
    fn check(change: impl FnOnce(&mut EngineConfig), message: &str) {
        let mut config = EngineConfig::default();
        assert!(config.check().is_ok());
        change(&mut config);
        assert_eq!(config.check().expect_err("invalid").to_string(), message);
    }

    #[test]
    fn field_out_of_range_error_names_field_value_and_limit() {
        check(|c| c.block_size = Some(8), "block_size=8 is not allowed: it must be 16, 32, 64 or 128");
        check(|c| c.threads = Some(0), "threads=0 is not allowed: it must be an integer from 1 to 1024");
        check(
            |c| c.max_num_seqs = Some(513),
            "max_num_seqs=513 is not allowed: it must be an integer from 1 to 512 with max_num_batched_tokens=512",
        );
        check(|c| c.numa_nodes = Some(vec![]), "numa_nodes=[] is not allowed: it must be 1 to 16 nodes");
        check(
            |c| c.numa_nodes = Some(vec![1, 0, 1]),
            "numa_nodes=[1, 0, 1] is not allowed: it must be different nodes; 1 occurs twice",
        );
        check(
            |c| (c.threads, c.numa_nodes) = (Some(3), Some(vec![0, 1])),
            "threads=3 is not allowed: it must be a multiple of 2, the number of numa_nodes",
        );
        for ratio in [0.0, -0.5, 1.001, f64::NAN, f64::INFINITY] {
            let message =
                format!("memory_ratio={ratio} is not allowed: it must be a number above 0 and at most 1");
            check(|c| c.memory_ratio = Some(ratio), &message);
        }
        for num_tokens in [0, 33] {
            let message = format!(
                "num_speculative_tokens={num_tokens} is not allowed: it must be an integer from 1 to 32"
            );
            check(|c| c.num_speculative_tokens = Some(num_tokens), &message);
        }
        for (ttl, value) in [(Duration::ZERO, "0"), (Duration::from_secs(10_000_000_000), "10000000000")] {
            let message = format!(
                "prefix_cache_ttl={value} is not allowed: it must be above 0 and at most 1000000000 seconds"
            );
            check(|c| c.prefix_cache_ttl = Some(ttl), &message);
        }
        check(
            |c| (c.preemption_mode, c.host_cache_bytes) = (PreemptionMode::Swap, Some(0)),
            "host_cache_bytes=0 is not allowed: it must be above 0 if preemption_mode is swap",
        );
        for blocks in [0, 1 << 31] {
            let message = format!(
                "kv_cache_blocks={blocks} is not allowed: it must be an integer from 1 to 2147483647"
            );
            check(|c| c.kv_cache_blocks = Some(blocks), &message);
        }
        check(
            |c| c.kv_cache_ratio = Some(1.5),
            "kv_cache_ratio=1.5 is not allowed: it must be a number above 0 and at most 1",
        );
        check(
            |c| (c.preemption_mode, c.host_cache_blocks) = (PreemptionMode::Swap, Some(0)),
            "host_cache_blocks=0 is not allowed: it must be above 0 if preemption_mode is swap",
        );
        check(
            |c| c.host_cache_blocks = Some(1),
            "host_cache_blocks=1 is not allowed: it must be 0 if prefix_cache is False and preemption_mode is not swap",
        );
        check(
            |c| c.host_cache_bytes = Some(1 << 30),
            "host_cache_bytes=1073741824 is not allowed: it must be 0 if prefix_cache is False and preemption_mode is \
             not swap",
        );
    }
}
