//! How the memory is divided, before any of it is taken: weights and workspace come first, the KV cache and its host tier
//! get of the rest what they may. Arithmetic alone; the sizes are the backend's and the models' own.

use penstock_device::{Backend, CacheSpec, StepInputs, StepSpec};
use penstock_engine::PreemptionMode;
use penstock_models::{ModelConfig, Workspace, weight_bytes};
use penstock_types::{Dtype, KvDtype};

use crate::Options;
use crate::options::Sizes;

/// A guest's share of what is left after weights and workspace: one part in so many.
const GUEST_SHARE: u64 = 4;
/// Blocks are counted in 32 bits.
const MOST_BLOCKS: usize = i32::MAX as usize;
/// So many rows have their logits at once, where there are not more sequences: enough to read the head's weights seldom.
const LOGITS_ROWS: usize = 32;

/// Everything that decides how many bytes go where.
#[derive(Clone, Debug)]
pub(crate) struct Demand {
    pub dtype: Dtype,
    /// `None` follows `dtype`.
    pub kv_dtype: Option<KvDtype>,
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
    pub fn new(options: &Options, sizes: &Sizes, dtype: Dtype, max_model_len: usize) -> Self {
        Self {
            dtype,
            kv_dtype: options.kv_cache_dtype,
            max_model_len,
            max_num_seqs: sizes.max_num_seqs,
            max_num_batched_tokens: sizes.max_num_batched_tokens,
            block_size: sizes.block_size,
            kv_share: match (options.kv_cache_bytes, options.memory_ratio) {
                (Some(bytes), _) => KvShare::Bytes(bytes),
                (None, Some(_)) => KvShare::All,
                (None, None) => KvShare::Guest,
            },
            host_share: match (options.host_cache_bytes, options.preemption_mode) {
                (None, PreemptionMode::Swap) => HostShare::Mirror,
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
            logits_rows: self.max_num_batched_tokens.min(LOGITS_ROWS).max(self.max_num_seqs),
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
            dtype: self.kv_dtype.unwrap_or(self.dtype.into()),
        }
    }

    /// Bytes of the smallest KV cache that holds the longest sequence.
    pub fn fewest_bytes<B: Backend>(&self, backend: &B, config: &ModelConfig) -> u64 {
        backend.cache_bytes(&self.cache(config), self.fewest_blocks())
    }

    /// Bytes of the smallest host tier.
    pub fn fewest_host_bytes<B: Backend>(&self, backend: &B, config: &ModelConfig) -> u64 {
        backend.cache_bytes(&self.cache(config), 1)
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
    let weights = weight_bytes(backend, config, demand.dtype);
    let workspace = Workspace::bytes(backend, config, &step);
    let inputs = StepInputs::bytes(&step);
    let needed = workspace.saturating_add(inputs);
    let left = limit.checked_sub(weights.saturating_add(needed));
    let Some(mut left) = left else { return Err(Shortage::Model { weights, workspace: needed, limit }) };

    // What the arena rounds up is nobody's wish: it costs blocks only where there is nothing else to take it from.
    let blocks_in = |bytes: u64, left: u64| {
        let most = (bytes / backend.block_bytes(&cache)).min(MOST_BLOCKS as u64);
        let fits = |blocks| backend.cache_bytes(&cache, blocks as usize) <= left;
        largest(0, most, fits).map_or(0, |blocks| blocks as usize)
    };
    let mut host_blocks = 0;
    let mut shares = 1;
    match demand.host_share {
        HostShare::Mirror => shares = 2,
        HostShare::Bytes(asked) if asked > left => return Err(Shortage::HostCache { asked, left }),
        HostShare::Bytes(bytes) => {
            host_blocks = blocks_in(bytes, left);
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
    let blocks = blocks_in(bytes, left / shares).min(demand.most_blocks());
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
pub(crate) fn largest(from: u64, to: u64, mut fits: impl FnMut(u64) -> bool) -> Option<u64> {
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
    use penstock_device::cpu::Cpu;
    use serde_json::json;

    use super::*;

    const MIB: u64 = 1 << 20;
    /// Keys and values of 16 tokens in 2 layers of 4 heads of 64, in float32.
    const BLOCK: u64 = 16 * 2 * 2 * 4 * 64 * 4;

    pub(crate) fn config() -> ModelConfig {
        ModelConfig::from_json(&json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
            "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 8192,
        }))
        .expect("a good configuration")
    }

    pub(crate) fn demand() -> Demand {
        Demand {
            dtype: Dtype::F32,
            kv_dtype: None,
            max_model_len: 4096,
            max_num_seqs: 16,
            max_num_batched_tokens: 128,
            block_size: 16,
            kv_share: KvShare::Guest,
            host_share: HostShare::Bytes(0),
            has_prefix_cache: false,
        }
    }

    fn divided(demand: &Demand, limit: u64) -> Result<Division, Shortage> {
        divide(&Cpu::new(1).expect("a thread"), &config(), demand, limit)
    }

    /// What weights, workspace and inputs leave of `limit`.
    fn left(limit: u64) -> u64 {
        let Division { weights, workspace, inputs, .. } = divided(&demand(), limit).expect("it fits");
        limit - weights - workspace - inputs
    }

    #[test]
    fn the_cache_takes_a_quarter_or_all_or_what_it_is_told_of_what_is_left() {
        let limit = 200 * MIB;
        let blocks = |kv_share, host_share| {
            let Division { cache, kv_cache, host_cache, .. } =
                divided(&Demand { kv_share, host_share, ..demand() }, limit).expect("it fits");
            assert_eq!([kv_cache, host_cache], [cache.blocks, cache.host_blocks].map(|n| n as u64 * BLOCK));
            [cache.blocks as u64, cache.host_blocks as u64]
        };
        let (none, left) = (HostShare::Bytes(0), left(limit));
        assert_eq!(blocks(KvShare::Guest, none), [left / 4 / BLOCK, 0]);
        assert_eq!(blocks(KvShare::All, none), [left / BLOCK, 0]);
        assert_eq!(blocks(KvShare::Bytes(300 * BLOCK + 1), none), [300, 0]);
        assert_eq!(blocks(KvShare::All, HostShare::Mirror), [left / 2 / BLOCK; 2]);
        assert_eq!(blocks(KvShare::Guest, HostShare::Mirror), [left / 4 / BLOCK; 2]);
        let rest = (left - 700 * BLOCK) / BLOCK;
        assert_eq!(blocks(KvShare::All, HostShare::Bytes(701 * BLOCK - 1)), [rest, 700]);
    }

    #[test]
    fn whatever_the_limit_no_more_is_taken_and_blocks_that_were_asked_for_are_had() {
        let cpu = Cpu::new(1).expect("a thread");
        let mut state = 1_u64;
        let mut below = |end: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 32) % end
        };
        let (mut divided, mut refused) = (0, 0);
        for layers in 1..=3 {
            for (hidden, kv_heads) in [(32, 1), (32, 2), (88, 2)] {
                let config = ModelConfig::from_json(&json!({
                    "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": 48,
                    "num_attention_heads": 2, "num_key_value_heads": kv_heads, "num_hidden_layers": layers,
                    "vocab_size": 50, "max_position_embeddings": 64,
                }))
                .expect("a good configuration");
                for kv_dtype in KvDtype::ALL.iter().copied().map(Some) {
                    let small = Demand { kv_dtype, max_model_len: 1 + below(64) as usize, ..demand() };
                    let block = cpu.block_bytes(&small.cache(&config));
                    let step = small.step(&config);
                    let taken = weight_bytes(&cpu, &config, small.dtype)
                        + Workspace::bytes(&cpu, &config, &step)
                        + StepInputs::bytes(&step);
                    for _ in 0..200 {
                        let rest = below(16 * block);
                        let bytes = below(rest + 2);
                        let kv_share =
                            [KvShare::Bytes(bytes), KvShare::All, KvShare::Guest][below(3) as usize];
                        let host_bytes = HostShare::Bytes(below(rest + 2));
                        let host_share =
                            [HostShare::Mirror, host_bytes, HostShare::Bytes(0)][below(3) as usize];
                        let demand = Demand { kv_share, host_share, ..small.clone() };
                        let limit = taken + rest;
                        let Ok(division) = divide(&cpu, &config, &demand, limit) else {
                            refused += 1;
                            continue;
                        };
                        divided += 1;
                        let used = division.arena() + division.inputs;
                        assert!(used <= limit, "{used} > {limit} for {demand:?} with blocks of {block}");
                    }
                    let room = taken + (1 << 20);
                    let blocks = small.fewest_blocks() as u64 + below(10);
                    let kv_share = KvShare::Bytes(blocks * block + below(block));
                    let host_share = HostShare::Bytes(3 * block + below(block));
                    let asked = Demand { kv_share, host_share, ..small };
                    let cache = divide(&cpu, &config, &asked, room).expect("room").cache;
                    assert_eq!((cache.blocks as u64, cache.host_blocks), (blocks, 3));
                }
            }
        }
        assert!(divided > 1000 && refused > 1000, "{divided} divided, {refused} refused");
    }

    #[test]
    fn no_more_is_taken_than_the_sequences_can_use() {
        let useful = 16 * 4096 / 16;
        let plenty = Demand { kv_share: KvShare::All, ..demand() };
        assert_eq!(divided(&plenty, u64::MAX / 2).expect("it fits").cache.blocks, useful);
        let cached = Demand { has_prefix_cache: true, ..plenty };
        assert_eq!(divided(&cached, u64::MAX / 2).expect("it fits").cache.blocks, 2 * useful);
    }

    #[test]
    fn the_smallest_limit_that_suffices_is_used_to_the_last_block() {
        let tight = Demand { kv_share: KvShare::All, ..demand() };
        let enough = largest(0, 400 * MIB, |spared| divided(&tight, 400 * MIB - spared).is_ok());
        let smallest = 400 * MIB - enough.expect("400 MiB are plenty");
        let division = divided(&tight, smallest).expect("it fits");
        assert_eq!((division.cache.blocks, division.arena() + division.inputs), (4096 / 16, smallest));
        let needed = 4096 / 16 * BLOCK;
        let shortage = Shortage::Sequence { max_model_len: 4096, needed, has: needed - 1 };
        assert_eq!(divided(&tight, smallest - 1), Err(shortage));
        assert!(matches!(divided(&tight, MIB), Err(Shortage::Model { limit: MIB, .. })));
    }

    #[test]
    fn what_is_asked_for_beyond_what_is_left_is_refused() {
        let limit = 400 * MIB;
        let (left, asked) = (left(limit), left(limit) + 1);
        let host_share = HostShare::Bytes(asked);
        let shortage = Shortage::HostCache { asked, left };
        assert_eq!(divided(&Demand { host_share, ..demand() }, limit), Err(shortage));
        for (kv_share, host_share, with_host) in [
            (asked, HostShare::Bytes(0), ""),
            (left / 2 + 1, HostShare::Mirror, "and as much for the host tier "),
        ] {
            let shortage = Shortage::KvCache { asked: kv_share, with_host, left };
            let kv_share = KvShare::Bytes(kv_share);
            assert_eq!(divided(&Demand { kv_share, host_share, ..demand() }, limit), Err(shortage));
        }
    }

    #[test]
    fn the_largest_that_fits_is_found_at_every_edge() {
        for edge in 3..=20 {
            assert_eq!(largest(3, 20, |value| value <= edge), Some(edge));
        }
        assert_eq!(largest(3, 20, |_| false), None);
        assert_eq!(largest(4, 3, |_| true), None);
        assert_eq!(largest(0, u64::MAX, |_| true), Some(u64::MAX));
    }
}
