//! Opening a model: the memory plan, and the errors of requests that do not fit.

use std::process::Command;
use std::time::Duration;

use penstock_engine::Port;
use penstock_runner::LaunchError;
use penstock_types::{Auto, Dtype, EngineConfig, PreemptionMode};

use crate::common::{LAYERS, LONGEST, TinyModel, VOCABULARY, request, run};

/// Bytes of a block of 16 tokens in float32: keys and values of two heads of 16 in each layer.
const BLOCK: u64 = 16 * 2 * 2 * 16 * 4 * LAYERS as u64;

fn config() -> EngineConfig {
    EngineConfig { threads: Some(1), max_num_seqs: Some(4), prefix_cache: false, ..EngineConfig::default() }
}

#[test]
fn kv_cache_has_the_useful_size_twice_with_prefix_cache() {
    let model = TinyModel::write();
    let blocks = 4 * LONGEST / 16;
    let (engine, info) = model.launch(&config()).unwrap();
    assert_eq!((engine.limits().num_blocks, info.memory.kv_cache), (blocks, blocks as u64 * BLOCK));
    assert_eq!((engine.limits().host_blocks, info.host_tier, info.memory.host_cache), (0, None, 0));
    let ttl = Some(Duration::from_secs(300));
    let (engine, _) = model.launch(&EngineConfig { prefix_cache: true, ..config() }).unwrap();
    assert_eq!((engine.limits().num_blocks, engine.limits().prefix_cache_ttl), (2 * blocks, ttl));
}

#[test]
fn host_tier_is_measured_and_disabled_if_it_is_not_faster() {
    let model = TinyModel::write();
    let host_cache_bytes = Some(10 * BLOCK + 1);
    let (engine, info) =
        model.launch(&EngineConfig { prefix_cache: true, host_cache_bytes, ..config() }).unwrap();
    let tier = info.host_tier.unwrap();
    assert!(tier.save_seconds > 0.0 && tier.load_seconds > 0.0 && tier.recompute_seconds > 0.0, "{tier:?}");
    assert_eq!(tier.keeps_prefixes, tier.load_seconds < tier.recompute_seconds, "{tier:?}");
    let limits = engine.limits();
    let expected = (if tier.keeps_prefixes { 10 } else { 0 }, tier.keeps_prefixes);
    assert_eq!((limits.host_blocks, limits.host_prefixes), expected);
    assert_eq!(info.memory.host_cache, 10 * BLOCK);

    let preemption_mode = PreemptionMode::Swap;
    let less_than_a_block = EngineConfig { preemption_mode, host_cache_bytes: Some(BLOCK - 1), ..config() };
    assert_eq!(
        model.launch(&less_than_a_block).err().unwrap().to_string(),
        format!(
            "host_cache_bytes={} is not allowed: it must be at least {BLOCK}, the size of one block",
            BLOCK - 1
        )
    );
    let (engine, info) = model.launch(&EngineConfig { preemption_mode, ..config() }).unwrap();
    assert_eq!(engine.limits().host_blocks, engine.limits().num_blocks, "the size of the KV cache");
    assert_eq!(info.memory.host_cache, info.memory.kv_cache);
    assert_eq!(engine.limits().preemption_mode, preemption_mode);
    assert!(!engine.limits().host_prefixes && !info.host_tier.unwrap().keeps_prefixes, "no prefix cache");
    let both = EngineConfig { preemption_mode, prefix_cache: true, ..config() };
    let (engine, info) = model.launch(&both).unwrap();
    assert_eq!(engine.limits().host_blocks, engine.limits().num_blocks, "swapping keeps the host tier");
    assert_eq!(engine.limits().host_prefixes, info.host_tier.unwrap().keeps_prefixes);
}

#[test]
fn adapters_have_room_for_rank_16_or_one_of_the_highest_rank() {
    let model = TinyModel::write();
    let adapters = |max_adapters, max_adapter_rank, adapter_cache_bytes| {
        let config = EngineConfig { max_adapters, max_adapter_rank, adapter_cache_bytes, ..config() };
        let (engine, info) = model.launch(&config).unwrap();
        assert_eq!(engine.limits().max_adapters, max_adapters);
        (engine.limits().adapter_bytes, info.memory.adapters)
    };
    assert_eq!(adapters(0, None, None), (0, 0));
    // A rank's rows of A and columns of B, in float32.
    let rank = 4 * LAYERS as u64 * (2 * (64 + 64) + 2 * (32 + 64) + 3 * (64 + 96));
    let (one, memory) = adapters(1, Some(16), None);
    assert!((16 * rank..16 * rank + 4096).contains(&one), "{one}, {rank}");
    assert!(memory > one, "with a buffer");
    assert_eq!(adapters(3, Some(16), None).0, 3 * one);
    assert_eq!(adapters(3, Some(8), None).0, 3 * adapters(1, Some(8), None).0);
    let highest = adapters(1, Some(64), None).0;
    assert_eq!(adapters(3, Some(64), None).0, highest.max(3 * one));
    assert_eq!(adapters(8, Some(64), None).0, 8 * one);
    assert_eq!(adapters(3, Some(64), Some(5000)).0, 8192, "in pages");
}

#[test]
fn weight_bytes_are_exact() {
    let model = TinyModel::write();
    let padded = |values: usize| (4 * values).next_multiple_of(4096) as u64;
    let layer = padded(128 * 64) + padded(64 * 64) + padded(192 * 64) + padded(64 * 96) + 2 * padded(64);
    let expected = 2 * padded(VOCABULARY * 64) + padded(64) + LAYERS as u64 * layer;
    let (_, info) = model.launch(&config()).unwrap();
    assert_eq!(info.memory.weights, expected);
    let (_, half) = model.launch(&EngineConfig { dtype: Auto(Some(Dtype::Bf16)), ..config() }).unwrap();
    assert!(half.memory.weights < expected * 3 / 5 && half.memory.kv_cache == info.memory.kv_cache / 2);
}

#[test]
fn length_that_does_not_fit_is_an_error_default_is_reduced() {
    let model = TinyModel::write();
    let small = EngineConfig { kv_cache_bytes: Some(5 * BLOCK), ..config() };
    let error = model.launch(&EngineConfig { max_model_len: Some(LONGEST), ..small.clone() }).err().unwrap();
    assert!(matches!(error, LaunchError::OutOfMemory(_)));
    assert_eq!(
        error.to_string(),
        format!(
            "a sequence of max_model_len=256 tokens needs a KV cache of {} KiB, but it has {} KiB; \
             settings that fit: max_model_len=80, or kv_cache_bytes={} ({0} KiB)",
            (16 * BLOCK) >> 10,
            (5 * BLOCK) >> 10,
            16 * BLOCK,
        )
    );
    // The suggestion fits. A KV cache of 16 bits would be too small.
    model.launch(&EngineConfig { max_model_len: Some(80), ..small.clone() }).unwrap();
    assert_eq!(model.launch(&small).unwrap().0.limits().max_model_len, 80);

    let almost = EngineConfig { kv_cache_bytes: Some(8 * BLOCK), max_model_len: Some(LONGEST), ..config() };
    let error = model.launch(&almost).err().unwrap().to_string();
    assert!(error.contains("settings that fit: max_model_len=128, or kv_cache_bytes="), "{error}");
    assert!(error.ends_with(", or dtype=float16"), "{error}");
}

#[test]
fn size_beyond_the_memory_error_names_the_largest_that_fits() {
    let model = TinyModel::write();
    let error = |config| model.launch(&config).err().unwrap().to_string();
    let kv = error(EngineConfig { kv_cache_bytes: Some(1 << 50), ..config() });
    assert!(kv.starts_with("kv_cache_bytes=1125899906842624 (1048576.0 GiB) exceeds the "), "{kv}");
    assert!(kv.contains(" GiB that weights and workspace leave, which hold "), "{kv}");
    assert!(kv.contains("; settings that fit: kv_cache_bytes="), "{kv}");
    let host_cache_bytes = Some(1 << 50);
    let preemption_mode = PreemptionMode::Swap;
    let host = error(EngineConfig { host_cache_bytes, preemption_mode, ..config() });
    assert!(host.starts_with("host_cache_bytes=1125899906842624 (1048576.0 GiB) exceeds the "), "{host}");
    assert!(host.contains("; settings that fit: host_cache_bytes="), "{host}");
    let weights = error(EngineConfig { memory_ratio: Some(1e-9), ..config() });
    assert!(weights.starts_with("weights ("), "{weights}");
    let ratio = weights.rsplit("settings that fit: memory_ratio=").next().unwrap();
    assert!((0.01..=1.0).contains(&ratio.parse::<f64>().unwrap()), "{weights}");
}

/// Set for the process with a limited address space.
const LIMITED: &str = "PENSTOCK_TEST_LIMITED";

#[test]
fn address_space_limit_is_kept_or_opening_is_an_error() {
    if std::env::var_os(LIMITED).is_some() {
        let model = TinyModel::write();
        let all =
            EngineConfig { memory_ratio: Some(1.0), max_num_seqs: Some(4), threads: Some(1), ..config() };
        let error =
            model.launch(&EngineConfig { kv_cache_bytes: Some(1 << 30), ..all.clone() }).err().unwrap();
        let limit = "; the address space of the process is limited to 977 MiB (ulimit -v)";
        let is_named = |text: &str| text.contains("kv_cache_bytes=") && text.ends_with(limit);
        assert!(matches!(&error, LaunchError::OutOfMemory(text) if is_named(text)), "{error}");
        let (engine, info) = model.launch(&all).unwrap();
        assert!(info.memory.limit < 1 << 30, "{info:?}");
        assert_eq!(run(&engine, &Port::with_condvar(), [request(0, 16, 4)].into_iter()), 4);
        return;
    }
    let script = "ulimit -v 1000000 && exec \"$0\" --exact \"$1\"";
    let name = "launch::address_space_limit_is_kept_or_opening_is_an_error";
    let test = std::env::current_exe().unwrap();
    let output =
        Command::new("sh").args(["-c", script]).arg(test).arg(name).env(LIMITED, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
