//! How the memory is divided, before any of it is taken: weights and workspace come first, the KV cache and its host tier
//! get of the rest what they may. Arithmetic alone; the sizes are the backend's and the models' own.

use penstock_device::{Backend, CacheSpec, Element, KvElement, StepInputs, StepSpec};
use penstock_engine::OnExhaustion;
use penstock_models::{ModelConfig, Workspace, weight_bytes};

use crate::Options;
use crate::options::Sizes;

/// A guest's share of what is left after weights and workspace: one part in so many.
const GUEST_SHARE: u64 = 4;
/// Blocks are counted in 32 bits.
const MOST_BLOCKS: usize = i32::MAX as usize;

/// Everything that decides how many bytes go where.
#[derive(Clone, Debug)]
pub(crate) struct Demand {
    pub element: Element,
    /// `None` follows `element`.
    pub kv_element: Option<KvElement>,
    pub max_model_len: usize,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub block_size: usize,
    pub kv_share: KvShare,
    pub host_share: HostShare,
    /// Blocks are worth keeping beyond those of the sequences that run.
    pub has_prefix_cache: bool,
}

/// How much the KV cache takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvShare {
    Bytes(u64),
    /// Whatever is left.
    All,
    /// A guest's share of it.
    Guest,
}

/// How much the host tier takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostShare {
    Bytes(u64),
    /// As much as the KV cache.
    Mirror,
}

impl Demand {
    pub fn new(options: &Options, sizes: &Sizes, element: Element, max_model_len: usize) -> Self {
        Self {
            element,
            kv_element: options.kv_cache_dtype,
            max_model_len,
            max_num_seqs: sizes.max_num_seqs,
            max_num_batched_tokens: sizes.max_num_batched_tokens,
            block_size: sizes.block_size,
            kv_share: match (options.kv_cache_bytes, options.memory_ratio) {
                (Some(bytes), _) => KvShare::Bytes(bytes),
                (None, Some(_)) => KvShare::All,
                (None, None) => KvShare::Guest,
            },
            host_share: match (options.host_cache_bytes, options.on_exhaustion) {
                (None, OnExhaustion::Swap) => HostShare::Mirror,
                (bytes, _) => HostShare::Bytes(bytes.unwrap_or(0)),
            },
            has_prefix_cache: options.prefix_cache_ttl.is_some(),
        }
    }

    /// Blocks that the longest sequence needs.
    fn fewest_blocks(&self) -> usize {
        self.max_model_len.div_ceil(self.block_size)
    }

    /// More blocks than this would never be used.
    fn most_blocks(&self) -> usize {
        let running = self.max_num_seqs.saturating_mul(self.fewest_blocks());
        running.saturating_mul(if self.has_prefix_cache { 2 } else { 1 }).min(MOST_BLOCKS)
    }

    /// The largest step that can come.
    pub fn step(&self, config: &ModelConfig) -> StepSpec {
        StepSpec {
            tokens: self.max_num_batched_tokens,
            sequences: self.max_num_seqs,
            positions: self.max_model_len,
            block_size: self.block_size,
            heads: config.heads,
            vocabulary: config.vocabulary_size,
        }
    }

    /// The cache, without blocks.
    pub fn cache(&self, config: &ModelConfig) -> CacheSpec {
        CacheSpec {
            layers: config.num_layers(),
            blocks: 0,
            host_blocks: 0,
            block_size: self.block_size,
            heads: config.heads,
            element: self.kv_element.unwrap_or(self.element.into()),
        }
    }

    /// Bytes of the smallest KV cache that holds the longest sequence.
    pub fn fewest_bytes<B: Backend>(&self, backend: &B, config: &ModelConfig) -> u64 {
        backend.cache_bytes(&self.cache(config), self.fewest_blocks())
    }
}

/// What goes where. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    pub step: StepSpec,
    pub cache: CacheSpec,
    pub weights: u64,
    pub workspace: u64,
    pub inputs: u64,
    pub kv_cache: u64,
    pub host_cache: u64,
}

impl Division {
    /// Bytes of the arena.
    pub fn arena(&self) -> u64 {
        self.weights + self.workspace + self.kv_cache + self.host_cache
    }
}

/// Why a demand cannot be met.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Shortage {
    #[error(
        "weights ({weights} bytes) and workspace ({workspace} bytes) exceed the {limit} bytes that may be used"
    )]
    Model { weights: u64, workspace: u64, limit: u64 },
    #[error("host_cache_bytes={asked} exceeds the {left} bytes that are left after weights and workspace")]
    HostCache { asked: u64, left: u64 },
    #[error(
        "kv_cache_bytes={asked} {with_host}exceeds the {left} bytes that are left after weights and workspace"
    )]
    KvCache { asked: u64, with_host: &'static str, left: u64 },
    #[error(
        "a sequence of max_model_len={max_model_len} tokens needs a KV cache of {needed} bytes and it has {has}"
    )]
    Sequence { max_model_len: usize, needed: u64, has: u64 },
}

/// Divides `limit` bytes.
pub(crate) fn divide<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    demand: &Demand,
    limit: u64,
) -> Result<Division, Shortage> {
    let (step, mut cache) = (demand.step(config), demand.cache(config));
    let weights = weight_bytes(backend, config, demand.element);
    let workspace = Workspace::bytes(backend, config, &step);
    let inputs = StepInputs::bytes(&step);
    let needed = workspace.saturating_add(inputs);
    let left = limit.checked_sub(weights.saturating_add(needed));
    let Some(mut left) = left else { return Err(Shortage::Model { weights, workspace: needed, limit }) };

    let blocks_in = |bytes: u64| {
        let blocks = usize::try_from(bytes / backend.block_bytes(&cache)).unwrap_or(usize::MAX);
        // Rounding may cost one.
        blocks.min(MOST_BLOCKS) - usize::from(backend.cache_bytes(&cache, blocks.min(MOST_BLOCKS)) > bytes)
    };
    let mut host_blocks = 0;
    let mut shares = 1;
    match demand.host_share {
        HostShare::Mirror => shares = 2,
        HostShare::Bytes(asked) if asked > left => return Err(Shortage::HostCache { asked, left }),
        HostShare::Bytes(bytes) => {
            host_blocks = blocks_in(bytes);
            left -= backend.cache_bytes(&cache, host_blocks);
        }
    }
    let bytes = match demand.kv_share {
        KvShare::Bytes(asked) if asked > left / shares => {
            let with_host = if shares == 1 { "" } else { "and as much for the host tier " };
            return Err(Shortage::KvCache { asked, with_host, left });
        }
        KvShare::Bytes(bytes) => bytes,
        KvShare::All => left / shares,
        KvShare::Guest => left / GUEST_SHARE,
    };
    let blocks = blocks_in(bytes).min(demand.most_blocks());
    if blocks < demand.fewest_blocks() {
        let (max_model_len, needed) = (demand.max_model_len, demand.fewest_bytes(backend, config));
        return Err(Shortage::Sequence { max_model_len, needed, has: bytes });
    }
    if shares == 2 {
        host_blocks = blocks;
    }
    let (kv_cache, host_cache) =
        (backend.cache_bytes(&cache, blocks), backend.cache_bytes(&cache, host_blocks));
    (cache.blocks, cache.host_blocks) = (blocks, host_blocks);
    Ok(Division { step, cache, weights, workspace, inputs, kv_cache, host_cache })
}

/// The largest number of `from..=to` that fits; if one does not, none above it does.
pub(crate) fn largest(from: u64, to: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
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
