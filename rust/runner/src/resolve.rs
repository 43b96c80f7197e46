//! The resolved configuration: the requested one, completed with the model's and the device's properties.

use std::fmt::Display;
use std::sync::Arc;

use penstock_device::{Backend, DeviceError, Memory, StepInputs};
use penstock_engine::Limits;
use penstock_models::{ModelConfig, RopeScaling, WeightFormats};
use penstock_types::config_limits::MAX_MODEL_LEN;
use penstock_types::{Dtype, EngineConfig, FieldError};

use crate::adapters::adapter_spec;
use crate::budget::{MemoryBudget, display_bytes};
use crate::memory::{CacheSize, KvCacheSize, MemoryPlan, MemoryRequest, largest_fitting};
use crate::suggestions::{SETTINGS, suggestions};
use crate::{LaunchConfig, LaunchError};

/// Events that a consumer may leave unread before its sequence pauses.
const QUEUE_CAPACITY: usize = 128;

/// The configuration in effect.
#[derive(Debug)]
pub(crate) struct ResolvedConfig {
    pub dtype: Dtype,
    /// The most bytes that the engine may take.
    pub memory_limit: u64,
    pub memory_request: MemoryRequest,
    pub memory_plan: MemoryPlan,
    /// The limits of the engine. The warm-up decides whether the host tier keeps prefixes.
    pub limits: Limits,
}

impl ResolvedConfig {
    /// Resolves a valid configuration for a model of type `dtype` on a backend with `available` bytes of memory.
    pub fn new<B: Backend>(
        backend: &B,
        model: &ModelConfig,
        config: &LaunchConfig,
        dtype: Dtype,
        weights: &Arc<WeightFormats>,
        available: u64,
    ) -> Result<Self, LaunchError> {
        let options = &config.options;
        let budget = MemoryBudget::new(config, available)?;
        let longest = longest_sequence(model);
        if let Some(max_model_len) = options.max_model_len.filter(|len| *len > longest) {
            let limit = format!("at most {longest}, the maximum of the model{}", scaling_text(model));
            return Err(FieldError::new("max_model_len", max_model_len, limit).into());
        }
        let adapters = adapter_spec::<B::AdapterLayout>(options, model);
        let request_of = |max_model_len| MemoryRequest::new(options, dtype, weights, adapters, max_model_len);
        check_host_cache(backend, model, options, &request_of(longest))?;
        let max_model_len = options
            .max_model_len
            .unwrap_or_else(|| longest_fitting(backend, model, &request_of(longest), budget.limit));
        let memory_request = request_of(max_model_len);
        let memory_plan = MemoryPlan::new(backend, model, &memory_request, budget.limit)
            .map_err(|error| out_of_memory(&error, &suggestions(backend, model, &memory_request, budget)))?;
        if options.max_model_len.is_none() && max_model_len < longest {
            let advice = match memory_request.kv_cache {
                KvCacheSize::Requested(CacheSize::Blocks(_)) => "; raise kv_cache_blocks to get more",
                KvCacheSize::Ratio(_) if options.kv_cache_ratio.is_some() => {
                    "; raise kv_cache_ratio to get more"
                }
                KvCacheSize::Ratio(_) => ", which has all memory that remains",
                KvCacheSize::DefaultFraction if memory_plan.has_own_host_cache => {
                    ", which has all memory that remains"
                }
                KvCacheSize::Requested(CacheSize::Bytes(_)) | KvCacheSize::DefaultFraction => {
                    "; raise kv_cache_bytes to get more"
                }
            };
            log::warn!("max_model_len reduced from {longest} to {max_model_len} to fit the KV cache{advice}");
        }
        let limits = limits(&memory_plan, options, model.rope.shared_len());
        Ok(Self { dtype, memory_limit: budget.limit, memory_request, memory_plan, limits })
    }
}

/// Checks that a host tier has room for at least one block.
fn check_host_cache<B: Memory>(
    backend: &B,
    model: &ModelConfig,
    options: &EngineConfig,
    request: &MemoryRequest,
) -> Result<(), FieldError> {
    let block = request.least_host_bytes(backend, model);
    match options.host_cache_bytes {
        Some(bytes @ 1..) if bytes < block => {
            let limit = format!("at least {block}, the size of one block");
            Err(FieldError::new("host_cache_bytes", bytes, limit))
        }
        _ => Ok(()),
    }
}

/// The largest `max_model_len` up to that of `request` that fits. If none fits because of the size of the KV cache, the
/// largest that the memory could hold with another size; then the suggestions are made for that length.
fn longest_fitting<B: Backend>(
    backend: &B,
    model: &ModelConfig,
    request: &MemoryRequest,
    limit: u64,
) -> usize {
    let largest = |request: MemoryRequest| {
        largest_fitting(1, request.max_model_len as u64, |len| {
            let request = MemoryRequest { max_model_len: len as usize, ..request.clone() };
            MemoryPlan::new(backend, model, &request, limit).is_ok()
        })
    };
    largest(request.clone())
        .or_else(|| largest(MemoryRequest { kv_cache: KvCacheSize::ALL, ..request.clone() }))
        .map_or(request.max_model_len.min(request.block_size), |len| len as usize)
}

/// Reserves the planned memory. If the system refuses it, the error states the size that it provides.
pub(crate) fn reserve<B: Backend>(
    backend: &mut B,
    model: &ModelConfig,
    request: &MemoryRequest,
    plan: &MemoryPlan,
) -> Result<StepInputs, LaunchError> {
    let reserved = backend.reserve(plan.arena());
    let inputs = reserved.and_then(|()| StepInputs::with_room(&plan.step)).map_err(|error| {
        if !matches!(error, DeviceError::OutOfMemory { .. } | DeviceError::Exhausted(_)) {
            return error.into();
        }
        let provided =
            largest_fitting(1, plan.arena() >> 20, |mebibytes| backend.reserve(mebibytes << 20).is_ok());
        let limit = provided.unwrap_or(0) << 20;
        let error = format!("{error}; the system provides {}", display_bytes(limit));
        out_of_memory(&error, &suggestions(backend, model, request, MemoryBudget { usable: limit, limit }))
    })?;
    backend.reserve_outside(plan.outside());
    Ok(inputs)
}

fn out_of_memory(error: &dyn Display, suggestions: &[String]) -> LaunchError {
    let fitting = match suggestions {
        [] => format!("no other {SETTINGS} alone would fit"),
        _ => format!("settings that fit: {}", suggestions.join(", or ")),
    };
    LaunchError::OutOfMemory(format!("{error}; {fitting}"))
}

fn limits(plan: &MemoryPlan, options: &EngineConfig, max_shared_len: usize) -> Limits {
    let MemoryPlan { step, cache, .. } = plan;
    Limits {
        max_model_len: step.positions,
        max_num_seqs: step.sequences,
        max_num_batched_tokens: step.tokens,
        max_prefill_chunk: options.max_prefill_chunk.unwrap_or(usize::MAX),
        max_waiting: options.max_waiting.unwrap_or(usize::MAX),
        max_unfinished: options.max_unfinished(),
        max_output_bytes: options.max_output_bytes(),
        max_paused: options.max_paused(),
        block_size: step.block_size,
        num_blocks: cache.blocks,
        vocabulary_size: step.vocabulary,
        queue_capacity: QUEUE_CAPACITY,
        prefix_cache_ttl: options.prefix_cache_lifetime(),
        max_shared_len,
        kv_hash_key: options.kv_events.clone().unwrap_or_default().key(),
        preemption_mode: options.preemption_mode,
        preemption_victim: options.preemption_victim,
        host_blocks: cache.host_blocks,
        host_prefixes: false,
        num_speculative_tokens: options.num_draft_tokens(),
        max_adapters: options.max_adapters,
        adapter_bytes: plan.adapter_spec.map_or(0, |adapters| adapters.bytes),
        max_registered_adapters: options.max_cpu_adapters(),
        max_registered_bytes: options.max_cpu_adapter_bytes.unwrap_or(u64::MAX),
    }
}

/// The longest sequence that the model's rope supports.
pub(crate) fn longest_sequence(model: &ModelConfig) -> usize {
    let longest = model.max_position_embeddings;
    let scaled = match model.rope.scaling() {
        RopeScaling::Default | RopeScaling::Llama3 { .. } => 0.0,
        RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => factor * longest as f64,
        RopeScaling::Yarn { factor, original, .. } => factor * *original as f64,
    };
    longest.max(scaled as usize).min(MAX_MODEL_LEN)
}

/// The share of the rope scaling in the longest sequence, for errors.
fn scaling_text(model: &ModelConfig) -> String {
    match model.rope.scaling() {
        RopeScaling::Default | RopeScaling::Llama3 { .. } => String::new(),
        RopeScaling::Linear { factor }
        | RopeScaling::Dynamic { factor }
        | RopeScaling::Yarn { factor, .. } => {
            format!(" with its rope scaling of factor={factor}")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use penstock_engine::PreemptionMode;
    use penstock_types::{Auto, Named};
    use serde_json::json;

    use super::*;
    use crate::backend::DefaultBackend;
    use crate::memory::tests::{backend, large_model};

    /// A model with blocks smaller than a page.
    fn small_model() -> ModelConfig {
        ModelConfig::from_json(&json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
            "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 50,
            "max_position_embeddings": 512,
        }))
        .expect("a valid configuration")
    }

    fn plain(dtype: Dtype) -> Arc<WeightFormats> {
        Arc::new(WeightFormats::uniform(dtype.into()))
    }

    /// Resolves a configuration for a machine with `available` bytes.
    fn resolve(
        backend: &DefaultBackend,
        config: &EngineConfig,
        available: u64,
    ) -> Result<ResolvedConfig, LaunchError> {
        config.check()?;
        let dtype = config.dtype.0.unwrap_or(Dtype::F32);
        let config = config.clone().into();
        ResolvedConfig::new(backend, &small_model(), &config, dtype, &plain(dtype), available)
    }

    /// The configuration with a suggestion applied.
    fn with(config: &EngineConfig, suggestion: &str) -> EngineConfig {
        let (field, value) = suggestion.split_once('=').expect("a field and a value");
        let value = value.split_once(" (").map_or(value, |(value, _)| value);
        let mut changed = config.clone();
        match field {
            "kv_cache_bytes" => changed.kv_cache_bytes = value.parse().ok(),
            "kv_cache_blocks" => changed.kv_cache_blocks = value.parse().ok(),
            "host_cache_bytes" => changed.host_cache_bytes = value.parse().ok(),
            "host_cache_blocks" => changed.host_cache_blocks = value.parse().ok(),
            "max_model_len" => changed.max_model_len = value.parse().ok(),
            "adapter_cache_bytes" => changed.adapter_cache_bytes = value.parse().ok(),
            "dtype" => changed.dtype = Auto(Dtype::from_name(value)),
            "memory_ratio" => changed.memory_ratio = value.parse().ok(),
            other => panic!("{other} is not suggested"),
        }
        changed
    }

    #[test]
    fn every_suggested_setting_fits() {
        let backend = backend();
        let config = EngineConfig {
            threads: Some(1),
            max_num_seqs: Some(8),
            max_num_batched_tokens: Some(32),
            max_model_len: Some(512),
            ..EngineConfig::default()
        };
        let mut suggested = BTreeSet::new();
        let sizes = |kv_cache_bytes, host_cache_bytes, memory_ratio| EngineConfig {
            kv_cache_bytes,
            host_cache_bytes,
            memory_ratio,
            ..config.clone()
        };
        for config in [
            sizes(None, None, None),
            sizes(None, None, Some(0.5)),
            sizes(Some(100_000), None, None),
            sizes(Some(1 << 40), None, None),
            sizes(None, Some(1 << 40), None),
            sizes(Some(150_000), Some(80_000), Some(0.5)),
            EngineConfig { kv_cache_blocks: Some(40), ..config.clone() },
            EngineConfig { max_adapters: 2, kv_cache_bytes: Some(150_000), ..config.clone() },
            EngineConfig { kv_cache_ratio: Some(0.3), host_cache_blocks: Some(9), ..config.clone() },
            EngineConfig { kv_cache_blocks: Some(10), host_cache_blocks: Some(1 << 20), ..config.clone() },
            EngineConfig { kv_cache_blocks: Some(1 << 20), ..config.clone() },
        ] {
            for available in (100_000..1_500_000).step_by(1_117) {
                let Err(error) = resolve(&backend, &config, available) else { continue };
                let error = error.to_string();
                let Some((_, suggestions)) = error.split_once("; settings that fit: ") else {
                    assert!(error.ends_with(" alone would fit"), "{error}");
                    continue;
                };
                for suggestion in suggestions.split(", or ") {
                    if let Err(error) = resolve(&backend, &with(&config, suggestion), available) {
                        panic!("{suggestion}, suggested for {config:?} with {available} bytes: {error}");
                    }
                    suggested.insert(suggestion.split('=').next().expect("a field").to_owned());
                }
            }
        }
        assert_eq!(
            suggested.into_iter().collect::<Vec<_>>(),
            [
                "adapter_cache_bytes",
                "dtype",
                "host_cache_blocks",
                "host_cache_bytes",
                "kv_cache_blocks",
                "kv_cache_bytes",
                "max_model_len",
                "memory_ratio"
            ]
        );
    }

    #[test]
    fn refused_reservation_error_states_the_size_that_fits() {
        let (mut backend, model) = (backend(), large_model());
        // More than any address space.
        let config = EngineConfig {
            threads: Some(1),
            preemption_mode: PreemptionMode::Swap,
            prefix_cache: false,
            block_size: Some(128),
            host_cache_bytes: Some(1 << 49),
            kv_cache_bytes: Some(128 << 20),
            max_model_len: Some(4096),
            ..EngineConfig::default()
        };
        let mut reserved = |config: &EngineConfig| {
            let resolved = ResolvedConfig::new(
                &backend,
                &model,
                &config.clone().into(),
                Dtype::F32,
                &plain(Dtype::F32),
                1 << 50,
            )?;
            reserve(&mut backend, &model, &resolved.memory_request, &resolved.memory_plan)
        };
        let error = reserved(&config).expect_err("too large").to_string();
        assert!(error.starts_with("the model with its KV cache needs 562"), "{error}");
        let (_, provided) = error.split_once("; the system provides ").expect("a size");
        let gibibytes: f64 = provided.split_once(" GiB; ").expect("gibibytes").0.parse().expect("a number");
        // Less by the weights, the workspace and the rounding of the size in the message.
        let host_cache_bytes = Some(((gibibytes - 1.0) * (1 << 30) as f64) as u64);
        assert!(reserved(&EngineConfig { host_cache_bytes, ..config }).is_ok(), "{error}");
    }
}
