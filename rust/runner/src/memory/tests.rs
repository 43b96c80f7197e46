//! Tests of the memory plan.

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
    let config = EngineConfig { threads: Some(1), ..EngineConfig::default() }.into();
    backend::open_cpu(&config, crate::Host::default().device()).expect("a thread").0
}

impl KvCacheSize {
    pub(crate) fn bytes(bytes: u64) -> Self {
        Self::Requested(CacheSize::Bytes(bytes))
    }
}

impl HostCacheSize {
    pub(crate) fn bytes(bytes: u64) -> Self {
        Self::Requested(CacheSize::Bytes(bytes))
    }
}

pub(crate) fn request() -> MemoryRequest {
    MemoryRequest {
        dtype: Dtype::F32,
        weights: Arc::new(WeightFormats::uniform(Dtype::F32.into())),
        kv_dtype: None,
        max_model_len: 4096,
        max_num_seqs: 16,
        max_num_batched_tokens: 128,
        block_size: 16,
        kv_cache: KvCacheSize::DefaultFraction,
        host_cache: HostCacheSize::bytes(0),
        has_prefix_cache: false,
        adapters: None,
    }
}

fn plan(request: &MemoryRequest, limit: u64) -> Result<MemoryPlan, InsufficientMemory> {
    MemoryPlan::new(&backend(), &large_model(), request, limit)
}

/// The bytes of `limit` that weights, workspace and inputs leave.
fn remaining(limit: u64) -> u64 {
    let MemoryPlan { weights, workspace, inputs, .. } = plan(&request(), limit).expect("it fits");
    limit - weights.total() - workspace - inputs
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
    let (none, left) = (HostCacheSize::bytes(0), remaining(limit));
    assert_eq!(blocks(KvCacheSize::DefaultFraction, none), [left / 4 / BLOCK, 0]);
    assert_eq!(blocks(KvCacheSize::ALL, none), [left / BLOCK, 0]);
    assert_eq!(blocks(KvCacheSize::bytes(300 * BLOCK + 1), none), [300, 0]);
    assert_eq!(blocks(KvCacheSize::ALL, HostCacheSize::SameAsDevice), [left / 2 / BLOCK; 2]);
    assert_eq!(blocks(KvCacheSize::DefaultFraction, HostCacheSize::SameAsDevice), [left / 4 / BLOCK; 2]);
    let rest = (left - 700 * BLOCK) / BLOCK;
    assert_eq!(blocks(KvCacheSize::ALL, HostCacheSize::bytes(701 * BLOCK - 1)), [rest, 700]);
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
                let rank = 1 + below(9) as usize;
                let spec = AdapterSpec { adapters: 3, bytes: 4096 * below(9), rank, matrices: 4 * layers };
                let adapters = [None, Some(spec)][below(2) as usize];
                let max_model_len = 1 + below(64) as usize;
                let small = MemoryRequest { kv_dtype, max_model_len, adapters, ..request() };
                let block = cpu.block_bytes(&small.empty_cache(&model));
                let step = small.step(&model);
                let taken = weight_bytes(&cpu, &model, &small.weights).total()
                    + Workspace::bytes(&cpu, &model, &step, adapters.as_ref())
                    + adapters.map_or(0, |spec| spec.bytes)
                    + StepInputs::bytes(&step);
                for _ in 0..200 {
                    let rest = below(16 * block);
                    let bytes = below(rest + 2);
                    let kv_cache = [
                        KvCacheSize::bytes(bytes),
                        KvCacheSize::Requested(CacheSize::Blocks((bytes / block) as usize)),
                        KvCacheSize::ALL,
                        KvCacheSize::Ratio(0.7),
                        KvCacheSize::DefaultFraction,
                    ][below(5) as usize];
                    let host_bytes = HostCacheSize::bytes(below(rest + 2));
                    let host_cache =
                        [HostCacheSize::SameAsDevice, host_bytes, HostCacheSize::bytes(0)][below(3) as usize];
                    let request = MemoryRequest { kv_cache, host_cache, ..small.clone() };
                    let limit = taken + rest;
                    let Ok(plan) = MemoryPlan::new(&cpu, &model, &request, limit) else {
                        failed += 1;
                        continue;
                    };
                    planned += 1;
                    let used = plan.arena() + plan.outside() + plan.inputs;
                    assert!(used <= limit, "{used} > {limit} for {request:?} with blocks of {block}");
                }
                let limit = taken + (1 << 20);
                let blocks = small.least_blocks() as u64 + below(10);
                let kv_cache = KvCacheSize::bytes(blocks * block + below(block));
                let host_cache = HostCacheSize::bytes(3 * block + below(block));
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
    let all = MemoryRequest { kv_cache: KvCacheSize::ALL, ..request() };
    assert_eq!(plan(&all, u64::MAX / 2).expect("it fits").cache.blocks, useful);
    let cached = MemoryRequest { has_prefix_cache: true, ..all };
    assert_eq!(plan(&cached, u64::MAX / 2).expect("it fits").cache.blocks, 2 * useful);
}

#[test]
fn smallest_sufficient_limit_is_used_completely() {
    let all = MemoryRequest { kv_cache: KvCacheSize::ALL, ..request() };
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
    let host_cache = HostCacheSize::bytes(requested);
    let cache_error = |name, requested, with_host, blocks: u64| InsufficientMemory::Cache {
        name,
        requested,
        with_host,
        remaining,
        users: "weights and workspace",
        blocks: blocks as usize,
    };
    let most = remaining / BLOCK;
    let error = cache_error("host_cache", CacheSize::Bytes(requested), "", most);
    assert_eq!(plan(&MemoryRequest { host_cache, ..request() }, limit), Err(error));
    for (requested, host_cache, with_host) in [
        (requested, HostCacheSize::bytes(0), ""),
        (remaining / 2 + 1, HostCacheSize::SameAsDevice, "with a host tier of the same size "),
    ] {
        let blocks = if with_host.is_empty() { most } else { remaining / 2 / BLOCK };
        let error = cache_error("kv_cache", CacheSize::Bytes(requested), with_host, blocks);
        let kv_cache = KvCacheSize::bytes(requested);
        assert_eq!(plan(&MemoryRequest { kv_cache, host_cache, ..request() }, limit), Err(error));
    }
}

#[test]
fn number_of_blocks_is_exact_or_an_error_with_the_most() {
    let limit = 400 * MIB;
    let most = (remaining(limit) / BLOCK) as usize;
    let with = |kv_cache, host_cache| plan(&MemoryRequest { kv_cache, host_cache, ..request() }, limit);
    let [kv, host] = [most - 7, 7];
    let kv_cache = |blocks| KvCacheSize::Requested(CacheSize::Blocks(blocks));
    let host_cache = |blocks| HostCacheSize::Requested(CacheSize::Blocks(blocks));
    let cache = with(kv_cache(kv), host_cache(host)).expect("it fits").cache;
    assert_eq!((cache.blocks, cache.host_blocks), (kv, host));
    let error = |kv, host| with(kv_cache(kv), host).expect_err("too large").to_string();
    let words = error(kv + 1, host_cache(host));
    assert!(words.starts_with(&format!("kv_cache_blocks={} exceeds the ", kv + 1)), "{words}");
    assert!(
        words.ends_with(&format!(" MiB that weights and workspace leave, which hold {kv} blocks")),
        "{words}"
    );
    let words = error(most / 2 + 1, HostCacheSize::SameAsDevice);
    assert!(words.contains(" with a host tier of the same size exceeds the "), "{words}");
    let words = error(kv, host_cache(most + 1));
    assert!(words.starts_with(&format!("host_cache_blocks={} exceeds the ", most + 1)), "{words}");
    assert!(matches!(with(kv_cache(255), host_cache(0)), Err(InsufficientMemory::Sequence { .. })));
    // More than the sequences can use.
    let few = MemoryRequest { kv_cache: kv_cache(600), max_num_seqs: 1, ..request() };
    assert_eq!(plan(&few, limit).expect("it fits").cache.blocks, 600);
}

#[test]
fn ratio_is_a_share_of_the_memory_that_is_left() {
    let limit = 400 * MIB;
    let left = remaining(limit);
    let blocks = |ratio, host_cache| {
        let kv_cache = KvCacheSize::Ratio(ratio);
        let cache = plan(&MemoryRequest { kv_cache, host_cache, ..request() }, limit).expect("it fits").cache;
        [cache.blocks as u64, cache.host_blocks as u64]
    };
    assert_eq!(blocks(0.5, HostCacheSize::bytes(0)), [left / 2 / BLOCK, 0]);
    assert_eq!(blocks(0.5, HostCacheSize::SameAsDevice), [left / 4 / BLOCK; 2]);
    let host = HostCacheSize::Requested(CacheSize::Blocks(100));
    assert_eq!(blocks(0.5, host), [(left - 100 * BLOCK) / 2 / BLOCK, 100]);
    let small = MemoryRequest { kv_cache: KvCacheSize::Ratio(0.01), ..request() };
    assert!(matches!(plan(&small, limit), Err(InsufficientMemory::Sequence { .. })));
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
