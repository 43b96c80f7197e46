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
                let small = MemoryRequest { kv_dtype, max_model_len: 1 + below(64) as usize, ..request() };
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
                    let host_cache =
                        [HostCacheSize::SameAsDevice, host_bytes, HostCacheSize::Bytes(0)][below(3) as usize];
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
