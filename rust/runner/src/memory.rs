//! The memory plan: weights, workspace and adapters first, then the KV cache and its host tier. Only arithmetic; the
//! backend and the models define the sizes.
//!
//! Mapped weights are in the plan, but not in the arena; with `numa_nodes` they are copied into the arena.

use penstock_device::{AdapterSpec, Allocation, Backend, CacheSpec, Memory, StepInputs, StepSpec};
use penstock_engine::PreemptionMode;
use penstock_models::{ModelConfig, WeightBytes, WeightFormats, Workspace, weight_bytes};
use penstock_types::{Dtype, EngineConfig, KvDtype};
use std::sync::Arc;

use crate::budget::{display_bytes, share};

/// A KV cache, or a host tier, takes one part in four of the remaining memory of a host by default, because other
/// programs run on it.
const DEFAULT_FRACTION: u64 = 4;
/// Block ids are 32-bit integers.
const MAX_BLOCKS: usize = i32::MAX as usize;
/// The number of rows whose logits are computed at once, unless there are more sequences: enough to read the weights of
/// the output head rarely.
const LOGITS_ROWS: usize = 32;

/// The settings that determine the memory plan.
#[derive(Clone, Debug)]
pub(crate) struct MemoryRequest {
    pub dtype: Dtype,
    pub weights: Arc<WeightFormats>,
    /// `None` is the same as `dtype`.
    pub kv_dtype: Option<KvDtype>,
    pub max_model_len: usize,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub block_size: usize,
    pub kv_cache: KvCacheSize,
    pub host_cache: HostCacheSize,
    /// Blocks beyond those of the running sequences have a use.
    pub has_prefix_cache: bool,
    /// `None` without adapters.
    pub adapters: Option<AdapterSpec>,
}

/// The size of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum KvCacheSize {
    Requested(CacheSize),
    /// A share of the remaining memory.
    Ratio(f64),
    /// A fraction of the remaining memory.
    DefaultFraction,
}

impl KvCacheSize {
    /// All remaining memory.
    pub const ALL: Self = Self::Ratio(1.0);
}

/// The size of the host tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostCacheSize {
    Requested(CacheSize),
    /// The host tier has the size of the KV cache.
    SameAsDevice,
}

/// The size of a cache, in the unit of the option that sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheSize {
    Bytes(u64),
    Blocks(usize),
}

impl CacheSize {
    /// The requested size, if one is set.
    fn requested(bytes: Option<u64>, blocks: Option<usize>) -> Option<Self> {
        blocks.map(Self::Blocks).or(bytes.map(Self::Bytes))
    }

    fn bytes<B: Memory>(self, backend: &B, cache: &CacheSpec) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Blocks(count) => backend.bytes(Allocation::Blocks { cache, count }),
        }
    }

    /// The option of the cache `name` with its value.
    pub fn option(self, name: &str) -> String {
        match self {
            Self::Bytes(bytes) => format!("{name}_bytes={bytes} ({})", display_bytes(bytes)),
            Self::Blocks(blocks) => format!("{name}_blocks={blocks}"),
        }
    }
}

impl MemoryRequest {
    pub fn new(
        options: &EngineConfig,
        dtype: Dtype,
        weights: &Arc<WeightFormats>,
        adapters: Option<AdapterSpec>,
        max_model_len: usize,
    ) -> Self {
        Self {
            dtype,
            weights: Arc::clone(weights),
            kv_dtype: options.kv_cache_dtype.0,
            max_model_len,
            max_num_seqs: options.max_num_seqs(),
            max_num_batched_tokens: options.max_num_batched_tokens(),
            block_size: options.block_size(),
            kv_cache: match CacheSize::requested(options.kv_cache_bytes, options.kv_cache_blocks) {
                Some(size) => KvCacheSize::Requested(size),
                None => match (options.kv_cache_ratio, options.memory_ratio) {
                    (Some(ratio), _) => KvCacheSize::Ratio(ratio),
                    (None, Some(_)) => KvCacheSize::ALL,
                    (None, None) => KvCacheSize::DefaultFraction,
                },
            },
            host_cache: match CacheSize::requested(options.host_cache_bytes, options.host_cache_blocks) {
                Some(size) => HostCacheSize::Requested(size),
                None if options.preemption_mode == PreemptionMode::Swap => HostCacheSize::SameAsDevice,
                None => HostCacheSize::Requested(CacheSize::Blocks(0)),
            },
            has_prefix_cache: options.prefix_cache,
            adapters,
        }
    }

    /// Blocks of the longest sequence.
    pub fn least_blocks(&self) -> usize {
        self.max_model_len.div_ceil(self.block_size)
    }

    /// The number of blocks that can be in use.
    fn most_blocks(&self) -> usize {
        let running = self.max_num_seqs.saturating_mul(self.least_blocks());
        running.saturating_mul(if self.has_prefix_cache { 2 } else { 1 }).min(MAX_BLOCKS)
    }

    /// The largest step.
    pub fn step(&self, model: &ModelConfig) -> StepSpec {
        StepSpec {
            tokens: self.max_num_batched_tokens,
            sequences: self.max_num_seqs,
            logits_rows: self.max_num_batched_tokens.min(LOGITS_ROWS).max(self.max_num_seqs),
            positions: self.max_model_len,
            block_size: self.block_size,
            heads: model.heads,
            vocabulary: model.vocabulary_size,
        }
    }

    /// The cache without blocks.
    fn empty_cache(&self, model: &ModelConfig) -> CacheSpec {
        CacheSpec {
            layers: model.num_layers(),
            blocks: 0,
            host_blocks: 0,
            block_size: self.block_size,
            heads: model.heads,
            dtype: self.kv_dtype.unwrap_or(self.dtype.into()),
        }
    }

    /// Bytes of the smallest KV cache: that of one sequence of `max_model_len` tokens.
    pub fn least_kv_bytes<B: Memory>(&self, backend: &B, model: &ModelConfig) -> u64 {
        CacheSize::Blocks(self.least_blocks()).bytes(backend, &self.empty_cache(model))
    }

    /// Bytes of the smallest host tier: one block.
    pub fn least_host_bytes<B: Memory>(&self, backend: &B, model: &ModelConfig) -> u64 {
        CacheSize::Blocks(1).bytes(backend, &self.empty_cache(model))
    }
}

/// The use of the memory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryPlan {
    pub step: StepSpec,
    pub cache: CacheSpec,
    pub weights: WeightBytes,
    pub workspace: u64,
    /// The inputs of a step, and the buffers of the host for copies from and to the device.
    pub inputs: u64,
    pub kv_cache: u64,
    pub host_cache: u64,
    /// Whether the host tier is not in the arena.
    pub has_own_host_cache: bool,
    pub adapter_spec: Option<AdapterSpec>,
    /// The adapters' part of the workspace, and the adapters if they have memory of the device.
    pub adapters: u64,
    /// Adapters in memory of the host that the device uses.
    pub shared_adapters: u64,
    /// Adapters in memory of the host that have a copy on the device.
    pub copied_adapters: u64,
}

/// The request exceeds the memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InsufficientMemory {
    #[error(
        "weights ({}){} and workspace ({}) exceed the memory limit of {}",
        display_bytes(*.weights), adapters_text(*.adapters), display_bytes(*.workspace), display_bytes(*.limit)
    )]
    Model { weights: u64, adapters: u64, workspace: u64, limit: u64 },
    #[error(
        "{} {with_host}exceeds the {} that {users} leave, which hold {blocks} blocks",
        .requested.option(.name), display_bytes(*.remaining)
    )]
    Cache {
        name: &'static str,
        requested: CacheSize,
        with_host: &'static str,
        remaining: u64,
        users: &'static str,
        blocks: usize,
    },
    #[error(
        "buffers of the host for the device ({}){} exceed the {} of the host that are available",
        display_bytes(*.buffers), adapters_text(*.adapters), display_bytes(*.available)
    )]
    Host { buffers: u64, adapters: u64, available: u64 },
    #[error(
        "a sequence of max_model_len={max_model_len} tokens needs a KV cache of {}, but it has {}",
        display_bytes(*.needed), display_bytes(*.size)
    )]
    Sequence { max_model_len: usize, needed: u64, size: u64 },
}

/// The adapters in an error.
fn adapters_text(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        bytes => format!(", adapters ({})", display_bytes(bytes)),
    }
}

impl MemoryPlan {
    /// Plans a request within `limit` bytes.
    pub fn new<B: Backend>(
        backend: &B,
        model: &ModelConfig,
        request: &MemoryRequest,
        limit: u64,
    ) -> Result<Self, InsufficientMemory> {
        let (step, mut cache) = (request.step(model), request.empty_cache(model));
        let weights = weight_bytes(backend, model, &request.weights);
        let workspace = Workspace::bytes(backend, model, &step, None);
        let adapter_spec = request.adapters;
        let adapters = adapter_spec
            .as_ref()
            .map_or(0, |adapters| backend.bytes(Allocation::Adapters { adapters, step: &step }));
        let buffers = backend.host_buffer_bytes(&step, adapter_spec.as_ref());
        let inputs = StepInputs::bytes(&step).saturating_add(buffers);
        let host_memory = backend.host_memory();
        let in_host = adapter_spec.map_or(0, |adapters| adapters.bytes);
        let (shared_adapters, copied_adapters, needed) = match host_memory {
            Some(_) => (0, in_host, workspace),
            None => (in_host, 0, workspace.saturating_add(inputs)),
        };
        let new_weights = weights.arena.saturating_add(weights.mapped);
        let all_adapters = adapters.saturating_add(shared_adapters);
        let fixed = new_weights.saturating_add(needed).saturating_add(all_adapters);
        let Some(mut remaining) = limit.checked_sub(fixed) else {
            let (weights, adapters) = (new_weights, all_adapters);
            return Err(InsufficientMemory::Model { weights, adapters, workspace: needed, limit });
        };

        // The rounding of the arena reduces the number of blocks only if there is no other memory for it.
        let bytes_of = |blocks: usize| CacheSize::Blocks(blocks).bytes(backend, &cache);
        let blocks_in = |bytes: u64, remaining: u64| {
            let most = (bytes / backend.block_bytes(&cache)).min(MAX_BLOCKS as u64);
            let fits = |blocks| bytes_of(blocks as usize) <= remaining;
            largest_fitting(0, most, fits).map_or(0, |blocks| blocks as usize)
        };
        let users = "weights and workspace";
        let requested_blocks = |name, requested: CacheSize, with_host, (remaining, users), num_caches| {
            let each = remaining / num_caches;
            if requested.bytes(backend, &cache) > each {
                let blocks = blocks_in(each, each);
                let error =
                    InsufficientMemory::Cache { name, requested, with_host, remaining, users, blocks };
                return Err(error);
            }
            Ok(match requested {
                CacheSize::Bytes(bytes) => blocks_in(bytes, each),
                CacheSize::Blocks(blocks) => blocks,
            })
        };
        let mut host_blocks = 0;
        let mut num_caches = 1;
        let remaining_of_host = host_memory.map(|available| {
            let (buffers, adapters) = (inputs, copied_adapters);
            let rest = available.checked_sub(buffers.saturating_add(adapters));
            rest.ok_or(InsufficientMemory::Host { buffers, adapters, available })
        });
        match (request.host_cache, remaining_of_host.transpose()?) {
            (HostCacheSize::SameAsDevice, None) => num_caches = 2,
            (HostCacheSize::SameAsDevice, Some(available)) => {
                let part = available / DEFAULT_FRACTION;
                host_blocks = blocks_in(part, part);
            }
            (HostCacheSize::Requested(size), None) => {
                host_blocks = requested_blocks("host_cache", size, "", (remaining, users), 1)?;
                remaining -= bytes_of(host_blocks);
            }
            (HostCacheSize::Requested(size), Some(available)) => {
                let users = "other programs, engines and buffers of the host";
                host_blocks = requested_blocks("host_cache", size, "", (available, users), 1)?;
            }
        }
        let each = remaining / num_caches;
        let in_bytes = |bytes| (bytes, blocks_in(bytes, each));
        let (bytes, blocks) = match request.kv_cache {
            KvCacheSize::Requested(size) => {
                let with_host = if num_caches == 1 { "" } else { "with a host tier of the same size " };
                let blocks = requested_blocks("kv_cache", size, with_host, (remaining, users), num_caches)?;
                (size.bytes(backend, &cache), blocks)
            }
            KvCacheSize::Ratio(ratio) => in_bytes(share(each, ratio)),
            KvCacheSize::DefaultFraction if host_memory.is_some() => in_bytes(each),
            KvCacheSize::DefaultFraction => in_bytes(remaining / DEFAULT_FRACTION),
        };
        // A number of blocks is exact.
        let is_exact = matches!(request.kv_cache, KvCacheSize::Requested(CacheSize::Blocks(_)));
        let blocks = if is_exact { blocks } else { blocks.min(request.most_blocks()) };
        if blocks < request.least_blocks() {
            let (max_model_len, needed) = (request.max_model_len, request.least_kv_bytes(backend, model));
            return Err(InsufficientMemory::Sequence { max_model_len, needed, size: bytes });
        }
        if request.host_cache == HostCacheSize::SameAsDevice {
            host_blocks = if host_memory.is_some() { blocks.min(host_blocks) } else { blocks };
        }
        let (kv_cache, host_cache) = (bytes_of(blocks), bytes_of(host_blocks));
        (cache.blocks, cache.host_blocks) = (blocks, host_blocks);
        Ok(Self {
            step,
            cache,
            weights,
            workspace,
            inputs,
            kv_cache,
            host_cache,
            has_own_host_cache: host_memory.is_some(),
            adapter_spec,
            adapters,
            shared_adapters,
            copied_adapters,
        })
    }

    /// Bytes of the host beside the arena.
    pub fn outside(&self) -> u64 {
        let own = if self.has_own_host_cache { self.inputs.saturating_add(self.host_cache) } else { 0 };
        let adapters = self.shared_adapters.saturating_add(self.copied_adapters);
        self.weights.mapped.saturating_add(adapters).saturating_add(own)
    }

    /// Bytes of the arena.
    pub fn arena(&self) -> u64 {
        let host_cache = if self.has_own_host_cache { 0 } else { self.host_cache };
        self.weights.arena + self.workspace + self.kv_cache + host_cache + self.adapters
    }
}

/// The largest number from `from` to `to` that fits, if every number below a fitting one fits.
pub(crate) fn largest_fitting(from: u64, to: u64, mut fits: impl FnMut(u64) -> bool) -> Option<u64> {
    if from > to || !fits(from) {
        return None;
    }
    let (mut best, mut end) = (from, to);
    while best < end {
        let middle = best + (end - best).div_ceil(2);
        if fits(middle) { best = middle } else { end = middle - 1 }
    }
    Some(best)
}

#[cfg(test)]
pub(crate) mod tests;
