//! What is said when a model is opened: where its memory is, and what would fit where it does not.

#![allow(clippy::unwrap_used)]

mod common;

use std::process::Command;
use std::time::Duration;

use common::{LAYERS, LONGEST, TinyModel, VOCABULARY, request, run};
use penstock_engine::Port;
use penstock_runner::{LaunchError, Options, PreemptionMode};
use penstock_types::Dtype;

/// Bytes of a block of 16 tokens in float32: keys and values of two heads of 16 in each layer.
const BLOCK: u64 = 16 * 2 * 2 * 16 * 4 * LAYERS as u64;

fn options() -> Options {
    Options { threads: Some(1), max_num_seqs: Some(4), ..Options::default() }
}

#[test]
fn the_cache_is_as_large_as_is_useful_and_twice_that_with_a_prefix_cache() {
    let model = TinyModel::write();
    let blocks = 4 * LONGEST / 16;
    let (engine, info) = model.launch(&options()).unwrap();
    assert_eq!((engine.limits().num_blocks, info.memory.kv_cache), (blocks, blocks as u64 * BLOCK));
    assert_eq!((engine.limits().host_blocks, info.host_tier, info.memory.host_cache), (0, None, 0));
    let ttl = Some(Duration::from_secs(300));
    let (engine, _) = model.launch(&Options { prefix_cache_ttl: ttl, ..options() }).unwrap();
    assert_eq!((engine.limits().num_blocks, engine.limits().prefix_cache_ttl), (2 * blocks, ttl));
}

#[test]
fn a_host_tier_is_measured_and_left_off_where_it_does_not_pay() {
    let model = TinyModel::write();
    let prefix_cache_ttl = Some(Duration::from_secs(300));
    let host_cache_bytes = Some(10 * BLOCK + 1);
    let (engine, info) = model.launch(&Options { prefix_cache_ttl, host_cache_bytes, ..options() }).unwrap();
    let tier = info.host_tier.unwrap();
    assert!(tier.save > 0.0 && tier.load > 0.0 && tier.recompute > 0.0, "{tier:?}");
    assert_eq!(tier.keeps_prefixes, tier.load < tier.recompute, "{tier:?}");
    let limits = engine.limits();
    let expected = (if tier.keeps_prefixes { 10 } else { 0 }, tier.keeps_prefixes);
    assert_eq!((limits.host_blocks, limits.host_prefixes), expected);
    assert_eq!(info.memory.host_cache, 10 * BLOCK);

    let preemption_mode = PreemptionMode::Swap;
    let less_than_a_block = Options { preemption_mode, host_cache_bytes: Some(BLOCK - 1), ..options() };
    assert_eq!(
        model.launch(&less_than_a_block).err().unwrap().to_string(),
        format!("host_cache_bytes={} is out of range: at least {BLOCK}, one block", BLOCK - 1)
    );
    let (engine, info) = model.launch(&Options { preemption_mode, ..options() }).unwrap();
    assert_eq!(engine.limits().host_blocks, engine.limits().num_blocks, "as many as the cache has");
    assert_eq!(info.memory.host_cache, info.memory.kv_cache);
    assert_eq!(engine.limits().preemption_mode, preemption_mode);
    assert!(!engine.limits().host_prefixes && !info.host_tier.unwrap().keeps_prefixes, "no prefix cache");
    let both = Options { preemption_mode, prefix_cache_ttl, ..options() };
    let (engine, info) = model.launch(&both).unwrap();
    assert_eq!(engine.limits().host_blocks, engine.limits().num_blocks, "whatever prefixes cost");
    assert_eq!(engine.limits().host_prefixes, info.host_tier.unwrap().keeps_prefixes);
}

#[test]
fn the_weights_are_counted_to_the_byte() {
    let model = TinyModel::write();
    let padded = |values: usize| (4 * values).next_multiple_of(4096) as u64;
    let layer = padded(128 * 64) + padded(64 * 64) + padded(192 * 64) + padded(64 * 96) + 2 * padded(64);
    let expected = 2 * padded(VOCABULARY * 64) + padded(64) + LAYERS as u64 * layer;
    let (_, info) = model.launch(&options()).unwrap();
    assert_eq!(info.memory.weights, expected);
    let (_, half) = model.launch(&Options { dtype: Some(Dtype::Bf16), ..options() }).unwrap();
    assert!(half.memory.weights < expected * 3 / 5 && half.memory.kv_cache == info.memory.kv_cache / 2);
}

#[test]
fn a_length_that_does_not_fit_is_refused_with_what_would_and_a_default_gives_way() {
    let model = TinyModel::write();
    let small = Options { kv_cache_bytes: Some(5 * BLOCK), ..options() };
    let refusal = model.launch(&Options { max_model_len: Some(LONGEST), ..small.clone() }).err().unwrap();
    assert!(matches!(refusal, LaunchError::OutOfMemory(_)));
    assert_eq!(
        refusal.to_string(),
        format!(
            "a sequence of max_model_len=256 tokens needs a KV cache of {} bytes and it has {}; \
             what fits: max_model_len=80, or kv_cache_dtype=uint4, or kv_cache_bytes={}",
            16 * BLOCK,
            5 * BLOCK,
            16 * BLOCK
        )
    );
    // What fits, fits; and here caches of 16 and 8 bits would just be too small.
    model.launch(&Options { max_model_len: Some(80), ..small.clone() }).unwrap();
    assert_eq!(model.launch(&small).unwrap().0.limits().max_model_len, 80);

    let almost = Options { kv_cache_bytes: Some(8 * BLOCK), max_model_len: Some(LONGEST), ..options() };
    let refusal = model.launch(&almost).err().unwrap().to_string();
    assert!(refusal.contains(", or kv_cache_dtype=float16, or "), "{refusal}");
}

#[test]
fn more_than_there_is_is_refused_with_the_most_that_fits() {
    let model = TinyModel::write();
    let refusal = |options| model.launch(&options).err().unwrap().to_string();
    let kv = refusal(Options { kv_cache_bytes: Some(1 << 50), ..options() });
    assert!(kv.starts_with("kv_cache_bytes=1125899906842624 exceeds the "), "{kv}");
    let most: u64 = kv.rsplit('=').next().unwrap().parse().unwrap();
    assert!(most > 0 && kv.contains(&format!("exceeds the {most} bytes that are left")), "{kv}");
    let host_cache_bytes = Some(1 << 50);
    let preemption_mode = PreemptionMode::Swap;
    let host = refusal(Options { host_cache_bytes, preemption_mode, ..options() });
    assert!(host.starts_with("host_cache_bytes=1125899906842624 exceeds the "), "{host}");
    assert!(host.contains("what fits: host_cache_bytes="), "{host}");
    let nothing = refusal(Options { memory_ratio: Some(1e-9), ..options() });
    assert!(nothing.starts_with("weights ("), "{nothing}");
    let ratio = nothing.rsplit("what fits: memory_ratio=").next().unwrap();
    assert!((0.01..=1.0).contains(&ratio.parse::<f64>().unwrap()), "{nothing}");
}

/// Set for the process that runs with little address space.
const CRAMPED: &str = "PENSTOCK_TEST_CRAMPED";

#[test]
fn under_a_limit_of_the_address_space_a_model_fits_into_it_or_is_refused() {
    if std::env::var_os(CRAMPED).is_some() {
        let model = TinyModel::write();
        let all = Options { memory_ratio: Some(1.0), max_num_seqs: Some(4), threads: Some(1), ..options() };
        let refusal = model.launch(&Options { kv_cache_bytes: Some(1 << 30), ..all.clone() }).err().unwrap();
        assert!(matches!(&refusal, LaunchError::OutOfMemory(text) if text.contains("kv_cache_bytes=")));
        let (engine, info) = model.launch(&all).unwrap();
        assert!(info.memory.limit < 1 << 30, "{info:?}");
        assert_eq!(run(&engine, &Port::with_condvar(), [request(0, 16, 4)].into_iter()), 4);
        return;
    }
    let script = "ulimit -v 1000000 && exec \"$0\" --exact \"$1\"";
    let name = "under_a_limit_of_the_address_space_a_model_fits_into_it_or_is_refused";
    let test = std::env::current_exe().unwrap();
    let output =
        Command::new("sh").args(["-c", script]).arg(test).arg(name).env(CRAMPED, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
