//! The memory plan: weights and workspace first, then the KV cache and its host tier. Only arithmetic; the backend and the
//! models define the sizes.

use penstock_device::{Backend, CacheSpec, StepInputs, StepSpec};
use penstock_engine::PreemptionMode;
use penstock_models::{ModelConfig, Workspace, weight_bytes};
use penstock_types::{Dtype, KvDtype};

use crate::EngineConfig;
use crate::budget::display_bytes;

/// The KV cache takes one part in four of the remaining memory by default, because other programs run on the machine.
const DEFAULT_FRACTION: u64 = 4;
/// Block ids are 32-bit integers.
const MAX_BLOCKS: usize = i32::MAX as usize;
/// The number of rows whose logits are computed at once, unless there are more sequences: enough to read the weights of the
/// output head rarely.
const LOGITS_ROWS: usize = 32;

/// The settings that determine the memory plan.
#[derive(Clone, Debug)]
pub(crate) struct MemoryRequest {
    pub dtype: Dtype,
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
}

/// The size of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvCacheSize {
    Bytes(u64),
    /// All remaining memory.
    All,
    /// A fraction of the remaining memory.
    DefaultFraction,
}

/// The size of the host tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostCacheSize {
    Bytes(u64),
    /// The size of the KV cache.
    SameAsDevice,
}

impl MemoryRequest {
    pub fn new(config: &EngineConfig, dtype: Dtype, max_model_len: usize) -> Self {
        Self {
            dtype,
            kv_dtype: config.kv_cache_dtype,
            max_model_len,
            max_num_seqs: config.max_num_seqs(),
            max_num_batched_tokens: config.max_num_batched_tokens(),
            block_size: config.block_size(),
            kv_cache: match (config.kv_cache_bytes, config.memory_ratio) {
                (Some(bytes), _) => KvCacheSize::Bytes(bytes),
                (None, Some(_)) => KvCacheSize::All,
                (None, None) => KvCacheSize::DefaultFraction,
            },
            host_cache: match (config.host_cache_bytes, config.preemption_mode) {
                (None, PreemptionMode::Swap) => HostCacheSize::SameAsDevice,
                (bytes, _) => HostCacheSize::Bytes(bytes.unwrap_or(0)),
            },
            has_prefix_cache: config.prefix_cache_ttl.is_some(),
        }
    }

    /// Blocks of the longest sequence.
    fn least_blocks(&self) -> usize {
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
    pub fn least_kv_bytes<B: Backend>(&self, backend: &B, model: &ModelConfig) -> u64 {
        backend.cache_bytes(&self.empty_cache(model), self.least_blocks())
    }

    /// Bytes of the smallest host tier: one block.
    pub fn least_host_bytes<B: Backend>(&self, backend: &B, model: &ModelConfig) -> u64 {
        backend.cache_bytes(&self.empty_cache(model), 1)
    }
}

/// The use of the memory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryPlan {
    pub step: StepSpec,
    pub cache: CacheSpec,
    pub weights: u64,
    pub workspace: u64,
    pub inputs: u64,
    pub kv_cache: u64,
    pub host_cache: u64,
}

/// The request exceeds the memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InsufficientMemory {
    #[error(
        "weights ({}) and workspace ({}) exceed the memory limit of {}",
        display_bytes(*.weights), display_bytes(*.workspace), display_bytes(*.limit)
    )]
    Model { weights: u64, workspace: u64, limit: u64 },
    #[error("host_cache_bytes={requested} exceeds the {remaining} bytes that weights and workspace leave")]
    HostCache { requested: u64, remaining: u64 },
    #[error(
        "kv_cache_bytes={requested} {with_host}exceeds the {remaining} bytes that weights and workspace leave"
    )]
    KvCache { requested: u64, with_host: &'static str, remaining: u64 },
    #[error(
        "a sequence of max_model_len={max_model_len} tokens needs a KV cache of {needed} bytes, but it has {size}"
    )]
    Sequence { max_model_len: usize, needed: u64, size: u64 },
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
        let weights = weight_bytes(backend, model, request.dtype);
        let workspace = Workspace::bytes(backend, model, &step);
        let inputs = StepInputs::bytes(&step);
        let needed = workspace.saturating_add(inputs);
        let Some(mut remaining) = limit.checked_sub(weights.saturating_add(needed)) else {
            return Err(InsufficientMemory::Model { weights, workspace: needed, limit });
        };

        // The rounding of the arena reduces the number of blocks only if there is no other memory for it.
        let blocks_in = |bytes: u64, remaining: u64| {
            let most = (bytes / backend.block_bytes(&cache)).min(MAX_BLOCKS as u64);
            let fits = |blocks| backend.cache_bytes(&cache, blocks as usize) <= remaining;
            largest_fitting(0, most, fits).map_or(0, |blocks| blocks as usize)
        };
        let mut host_blocks = 0;
        let mut num_caches = 1;
        match request.host_cache {
            HostCacheSize::SameAsDevice => num_caches = 2,
            HostCacheSize::Bytes(requested) if requested > remaining => {
                return Err(InsufficientMemory::HostCache { requested, remaining });
            }
            HostCacheSize::Bytes(bytes) => {
                host_blocks = blocks_in(bytes, remaining);
                remaining -= backend.cache_bytes(&cache, host_blocks);
            }
        }
        let bytes = match request.kv_cache {
            KvCacheSize::Bytes(requested) if requested > remaining / num_caches => {
                let with_host = if num_caches == 1 { "" } else { "with a host tier of the same size " };
                return Err(InsufficientMemory::KvCache { requested, with_host, remaining });
            }
            KvCacheSize::Bytes(bytes) => bytes,
            KvCacheSize::All => remaining / num_caches,
            KvCacheSize::DefaultFraction => remaining / DEFAULT_FRACTION,
        };
        let blocks = blocks_in(bytes, remaining / num_caches).min(request.most_blocks());
        if blocks < request.least_blocks() {
            let (max_model_len, needed) = (request.max_model_len, request.least_kv_bytes(backend, model));
            return Err(InsufficientMemory::Sequence { max_model_len, needed, size: bytes });
        }
        if num_caches == 2 {
            host_blocks = blocks;
        }
        let (kv_cache, host_cache) =
            (backend.cache_bytes(&cache, blocks), backend.cache_bytes(&cache, host_blocks));
        (cache.blocks, cache.host_blocks) = (blocks, host_blocks);
        Ok(Self { step, cache, weights, workspace, inputs, kv_cache, host_cache })
    }

    /// Bytes of the arena.
    pub fn arena(&self) -> u64 {
        self.weights + self.workspace + self.kv_cache + self.host_cache
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
pub(crate) mod tests {
    use serde_json::json;

    use super::*;
    use crate::backend::{self, DefaultBackend};

    const MIB: u64 = 1 << 20;
    /// Keys and values of 16 tokens in 2 layers of 4 heads of 64, in float32.
    const BLOCK: u64 = 16 * 2 * 2 * 4 * 64 * 4;

    pub(crate) fn large_model() -> ModelConfig {
        ModelConfig::from_json(&json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
            "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 8192,
        }))
        .expect("a valid configuration")
    }

    pub(crate) fn backend() -> DefaultBackend {
        let config = EngineConfig { threads: Some(1), ..EngineConfig::default() };
        backend::open(&config).expect("a thread").0
    }

    pub(crate) fn request() -> MemoryRequest {
        MemoryRequest {
            dtype: Dtype::F32,
            kv_dtype: None,
            max_model_len: 4096,
            max_num_seqs: 16,
            max_num_batched_tokens: 128,
            block_size: 16,
            kv_cache: KvCacheSize::DefaultFraction,
            host_cache: HostCacheSize::Bytes(0),
            has_prefix_cache: false,
        }
    }

    fn plan(request: &MemoryRequest, limit: u64) -> Result<MemoryPlan, InsufficientMemory> {
        MemoryPlan::new(&backend(), &large_model(), request, limit)
    }

    /// The bytes of `limit` that weights, workspace and inputs leave.
    fn remaining(limit: u64) -> u64 {
        let MemoryPlan { weights, workspace, inputs, .. } = plan(&request(), limit).expect("it fits");
        limit - weights - workspace - inputs
    }

    #[test]
    fn kv_cache_takes_a_quarter_all_or_the_requested_bytes() {
        let limit = 200 * MIB;
        let blocks = |kv_cache, host_cache| {
            let MemoryPlan { cache, kv_cache, host_cache, .. } =
                plan(&MemoryRequest { kv_cache, host_cache, ..request() }, limit).expect("it fits");
            assert_eq!([kv_cache, host_cache], [cache.blocks, cache.host_blocks].map(|n| n as u64 * BLOCK));
            [cache.blocks as u64, cache.host_blocks as u64]
        };
        let (none, left) = (HostCacheSize::Bytes(0), remaining(limit));
        assert_eq!(blocks(KvCacheSize::DefaultFraction, none), [left / 4 / BLOCK, 0]);
        assert_eq!(blocks(KvCacheSize::All, none), [left / BLOCK, 0]);
        assert_eq!(blocks(KvCacheSize::Bytes(300 * BLOCK + 1), none), [300, 0]);
        assert_eq!(blocks(KvCacheSize::All, HostCacheSize::SameAsDevice), [left / 2 / BLOCK; 2]);
        assert_eq!(blocks(KvCacheSize::DefaultFraction, HostCacheSize::SameAsDevice), [left / 4 / BLOCK; 2]);
        let rest = (left - 700 * BLOCK) / BLOCK;
        assert_eq!(blocks(KvCacheSize::All, HostCacheSize::Bytes(701 * BLOCK - 1)), [rest, 700]);
    }

    #[test]
    fn plan_never_exceeds_the_limit_and_has_the_requested_blocks() {
        let cpu = backend();
        let mut state = 1_u64;
        let mut below = |end: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 32) % end
        };
        let (mut planned, mut failed) = (0, 0);
        for layers in 1..=3 {
            for (hidden, kv_heads) in [(32, 1), (32, 2), (88, 2)] {
                let model = ModelConfig::from_json(&json!({
                    "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": 48,
                    "num_attention_heads": 2, "num_key_value_heads": kv_heads, "num_hidden_layers": layers,
                    "vocab_size": 50, "max_position_embeddings": 64,
                }))
                .expect("a valid configuration");
                for kv_dtype in KvDtype::ALL.iter().copied().map(Some) {
                    let small =
                        MemoryRequest { kv_dtype, max_model_len: 1 + below(64) as usize, ..request() };
                    let block = cpu.block_bytes(&small.empty_cache(&model));
                    let step = small.step(&model);
                    let taken = weight_bytes(&cpu, &model, small.dtype)
                        + Workspace::bytes(&cpu, &model, &step)
                        + StepInputs::bytes(&step);
                    for _ in 0..200 {
                        let rest = below(16 * block);
                        let bytes = below(rest + 2);
                        let kv_cache =
                            [KvCacheSize::Bytes(bytes), KvCacheSize::All, KvCacheSize::DefaultFraction]
                                [below(3) as usize];
                        let host_bytes = HostCacheSize::Bytes(below(rest + 2));
                        let host_cache = [HostCacheSize::SameAsDevice, host_bytes, HostCacheSize::Bytes(0)]
                            [below(3) as usize];
                        let request = MemoryRequest { kv_cache, host_cache, ..small.clone() };
                        let limit = taken + rest;
                        let Ok(plan) = MemoryPlan::new(&cpu, &model, &request, limit) else {
                            failed += 1;
                            continue;
                        };
                        planned += 1;
                        let used = plan.arena() + plan.inputs;
                        assert!(used <= limit, "{used} > {limit} for {request:?} with blocks of {block}");
                    }
                    let limit = taken + (1 << 20);
                    let blocks = small.least_blocks() as u64 + below(10);
                    let kv_cache = KvCacheSize::Bytes(blocks * block + below(block));
                    let host_cache = HostCacheSize::Bytes(3 * block + below(block));
                    let request = MemoryRequest { kv_cache, host_cache, ..small };
                    let cache = MemoryPlan::new(&cpu, &model, &request, limit).expect("it fits").cache;
                    assert_eq!((cache.blocks as u64, cache.host_blocks), (blocks, 3));
                }
            }
        }
        assert!(planned > 1000 && failed > 1000, "{planned} planned, {failed} failed");
    }

    #[test]
    fn kv_cache_is_not_larger_than_the_sequences_can_use() {
        let useful = 16 * 4096 / 16;
        let all = MemoryRequest { kv_cache: KvCacheSize::All, ..request() };
        assert_eq!(plan(&all, u64::MAX / 2).expect("it fits").cache.blocks, useful);
        let cached = MemoryRequest { has_prefix_cache: true, ..all };
        assert_eq!(plan(&cached, u64::MAX / 2).expect("it fits").cache.blocks, 2 * useful);
    }

    #[test]
    fn smallest_sufficient_limit_is_used_completely() {
        let all = MemoryRequest { kv_cache: KvCacheSize::All, ..request() };
        let spared = largest_fitting(0, 400 * MIB, |spared| plan(&all, 400 * MIB - spared).is_ok());
        let smallest = 400 * MIB - spared.expect("400 MiB are sufficient");
        let fitting = plan(&all, smallest).expect("it fits");
        assert_eq!((fitting.cache.blocks, fitting.arena() + fitting.inputs), (4096 / 16, smallest));
        let needed = 4096 / 16 * BLOCK;
        let error = InsufficientMemory::Sequence { max_model_len: 4096, needed, size: needed - 1 };
        assert_eq!(plan(&all, smallest - 1), Err(error));
        assert!(matches!(plan(&all, MIB), Err(InsufficientMemory::Model { limit: MIB, .. })));
    }

    #[test]
    fn requested_bytes_beyond_the_remaining_memory_are_an_error() {
        let limit = 400 * MIB;
        let (remaining, requested) = (remaining(limit), remaining(limit) + 1);
        let host_cache = HostCacheSize::Bytes(requested);
        let error = InsufficientMemory::HostCache { requested, remaining };
        assert_eq!(plan(&MemoryRequest { host_cache, ..request() }, limit), Err(error));
        for (requested, host_cache, with_host) in [
            (requested, HostCacheSize::Bytes(0), ""),
            (remaining / 2 + 1, HostCacheSize::SameAsDevice, "with a host tier of the same size "),
        ] {
            let error = InsufficientMemory::KvCache { requested, with_host, remaining };
            let kv_cache = KvCacheSize::Bytes(requested);
            assert_eq!(plan(&MemoryRequest { kv_cache, host_cache, ..request() }, limit), Err(error));
        }
    }

    #[test]
    fn largest_fitting_number_is_found_at_every_limit() {
        for edge in 3..=20 {
            assert_eq!(largest_fitting(3, 20, |value| value <= edge), Some(edge));
        }
        assert_eq!(largest_fitting(3, 20, |_| false), None);
        assert_eq!(largest_fitting(4, 3, |_| true), None);
        assert_eq!(largest_fitting(0, u64::MAX, |_| true), Some(u64::MAX));
    }
}
