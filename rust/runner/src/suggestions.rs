//! Suggestions for requests that do not fit the memory. Each is tried before it is made.
//!
//! There is one for each cause: `max_model_len` or the size of the KV cache if that is too small for a sequence, the
//! size of a cache that is too large, `dtype` if the weights are, `adapter_cache_bytes` if the adapters are,
//! `memory_ratio` if the device has more memory than the engine may take (also with the default fraction). The
//! workspace has none: the error states its size, which `max_num_seqs` and `max_num_batched_tokens` determine.

use std::sync::Arc;

use penstock_device::{AdapterLayout, AdapterSpec, Backend};
use penstock_models::{ModelConfig, adapter_bytes};
use penstock_types::Dtype;

use crate::budget::{MemoryBudget, display_bytes, share};
use crate::memory::{CacheSize, HostCacheSize, KvCacheSize, MemoryPlan, MemoryRequest, largest_fitting};

/// The settings that are tried. An error names them if no change of one alone would fit.
pub(crate) const SETTINGS: &str =
    "max_model_len, size of the KV cache or of the host tier, dtype, adapter_cache_bytes or memory_ratio";

/// The settings that would fit, each without any other change, such as `max_model_len=2048`.
pub(crate) fn suggestions<B: Backend>(
    backend: &B,
    model: &ModelConfig,
    request: &MemoryRequest,
    budget: MemoryBudget,
) -> Vec<String> {
    let fits = |request: MemoryRequest, limit| MemoryPlan::new(backend, model, &request, limit).is_ok();
    let max_model_len = || {
        let fits = |len| fits(MemoryRequest { max_model_len: len as usize, ..request.clone() }, budget.limit);
        largest_fitting(request.block_size as u64, request.max_model_len as u64, fits)
    };
    // The size of one sequence if the KV cache is smaller, else the largest.
    let kv_cache = || {
        let (least_bytes, least) = (request.least_kv_bytes(backend, model), request.least_blocks());
        let is_small = match request.kv_cache {
            KvCacheSize::Requested(CacheSize::Bytes(bytes)) => bytes < least_bytes,
            KvCacheSize::Requested(CacheSize::Blocks(blocks)) => blocks < least,
            KvCacheSize::DefaultFraction => true,
            KvCacheSize::Ratio(_) => return None,
        };
        let (bytes, blocks) = if is_small {
            (least_bytes, least)
        } else {
            let all = MemoryRequest { kv_cache: KvCacheSize::ALL, ..request.clone() };
            let plan = MemoryPlan::new(backend, model, &all, budget.limit).ok()?;
            (plan.kv_cache, plan.cache.blocks)
        };
        let size = match request.kv_cache {
            KvCacheSize::Requested(CacheSize::Blocks(_)) => CacheSize::Blocks(blocks),
            _ => CacheSize::Bytes(bytes),
        };
        let kv_cache = KvCacheSize::Requested(size);
        fits(MemoryRequest { kv_cache, ..request.clone() }, budget.limit).then_some(size)
    };
    let host_cache = || {
        let HostCacheSize::Requested(size) = request.host_cache else { return None };
        let fits = |size| {
            let host_cache = HostCacheSize::Requested(size);
            fits(MemoryRequest { host_cache, ..request.clone() }, budget.limit)
        };
        match size {
            CacheSize::Bytes(bytes) => {
                let least = request.least_host_bytes(backend, model);
                largest_fitting(least, bytes, |bytes| fits(CacheSize::Bytes(bytes))).map(CacheSize::Bytes)
            }
            CacheSize::Blocks(blocks) => {
                let fits = |blocks| fits(CacheSize::Blocks(blocks as usize));
                largest_fitting(1, blocks as u64, fits).map(|blocks| CacheSize::Blocks(blocks as usize))
            }
        }
    };
    let dtype = || {
        let fits = |dtype: &&Dtype| {
            let weights = Arc::new(request.weights.with_dtype(**dtype));
            fits(MemoryRequest { dtype: **dtype, weights, ..request.clone() }, budget.limit)
        };
        if request.weights.are_fixed() { None } else { Dtype::ALL.iter().find(fits) }
    };
    // Room for adapters of rank 1 is of little use.
    let adapter_cache_bytes = || {
        let adapters = request.adapters?;
        let least = adapter_bytes::<B::AdapterLayout>(model, 1, Dtype::F32);
        let fits = |bytes| {
            let adapters = Some(AdapterSpec { bytes: B::AdapterLayout::adapter_bytes(bytes), ..adapters });
            fits(MemoryRequest { adapters, ..request.clone() }, budget.limit)
        };
        largest_fitting(least, adapters.bytes, fits)
    };
    // The least ratio that fits, in hundredths. With a ratio the KV cache takes all remaining memory.
    let memory_ratio = || {
        let kv_cache = match request.kv_cache {
            KvCacheSize::DefaultFraction => KvCacheSize::ALL,
            size => size,
        };
        let ratio = |spared: u64| (100 - spared) as f64 / 100.0;
        let fits = |spared: u64| {
            fits(MemoryRequest { kv_cache, ..request.clone() }, share(budget.usable, ratio(spared)))
        };
        let spared = if budget.limit < budget.usable { largest_fitting(0, 99, fits) } else { None };
        spared.map(ratio)
    };
    let suggestions = [
        max_model_len().map(|len| format!("max_model_len={len}")),
        kv_cache().map(|size| size.option("kv_cache")),
        host_cache().map(|size| size.option("host_cache")),
        dtype().map(|dtype| format!("dtype={}", dtype.name())),
        adapter_cache_bytes().map(|bytes| format!("adapter_cache_bytes={bytes} ({})", display_bytes(bytes))),
        memory_ratio().map(|ratio| format!("memory_ratio={ratio:.2}")),
    ];
    suggestions.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::{backend, large_model, request};

    /// The suggestions for a request with a budget.
    fn suggested(request: &MemoryRequest, budget: MemoryBudget) -> Vec<String> {
        suggestions(&backend(), &large_model(), request, budget)
    }

    /// A budget without more memory than its limit.
    fn all_of(limit: u64) -> MemoryBudget {
        MemoryBudget { usable: limit, limit }
    }

    fn fits(request: MemoryRequest, limit: u64) -> bool {
        MemoryPlan::new(&backend(), &large_model(), &request, limit).is_ok()
    }

    #[test]
    fn cache_too_small_for_a_sequence_suggests_a_length_and_a_dtype() {
        let (all, limit) = (MemoryRequest { kv_cache: KvCacheSize::ALL, ..request() }, 20 << 20);
        let suggested = suggested(&all, all_of(limit));
        let len: usize =
            suggested[0].strip_prefix("max_model_len=").expect("a length").parse().expect("a number");
        assert!(fits(MemoryRequest { max_model_len: len, ..all.clone() }, limit));
        assert!(!fits(MemoryRequest { max_model_len: len + 1, ..all }, limit));
        assert_eq!(suggested[1..], ["dtype=float16"]);
    }

    #[test]
    fn size_of_the_kv_cache_is_that_of_a_sequence_or_the_largest() {
        let (limit, least) = (100 << 20, request().least_kv_bytes(&backend(), &large_model()));
        let size = |kv_cache| {
            let all = suggested(&MemoryRequest { kv_cache, ..request() }, all_of(limit));
            let size = all.iter().find_map(|suggestion| suggestion.strip_prefix("kv_cache_bytes="));
            let (bytes, size) = size.expect("a size").split_once(' ').expect("bytes, and the size");
            (bytes.parse::<u64>().expect("a number"), size.to_owned())
        };
        assert_eq!(size(KvCacheSize::bytes(least - 1)).0, least);
        let (bytes, text) = size(KvCacheSize::bytes(1 << 40));
        let with = |bytes| MemoryRequest { kv_cache: KvCacheSize::bytes(bytes), ..request() };
        assert!(fits(with(bytes), limit) && !fits(with(bytes + (1 << 20)), limit), "{bytes}");
        assert_eq!(text, format!("({})", display_bytes(bytes)));
    }

    #[test]
    fn least_memory_ratio_is_suggested_if_there_is_more_memory() {
        let ratio = |kv_cache, usable, limit| {
            let all = suggested(&MemoryRequest { kv_cache, ..request() }, MemoryBudget { usable, limit });
            let ratio = all.iter().find_map(|suggestion| suggestion.strip_prefix("memory_ratio="))?;
            let ratio: f64 = ratio.parse().expect("a number");
            let fits = |ratio| {
                let is_default = kv_cache == KvCacheSize::DefaultFraction;
                let kv_cache = if is_default { KvCacheSize::ALL } else { kv_cache };
                fits(MemoryRequest { kv_cache, ..request() }, share(usable, ratio))
            };
            assert!(fits(ratio) && !fits(ratio - 0.01), "{ratio}");
            Some(ratio)
        };
        let (little, much) = (20 << 20, 100 << 20);
        for kv_cache in [KvCacheSize::ALL, KvCacheSize::DefaultFraction, KvCacheSize::bytes(17 << 20)] {
            assert!(ratio(kv_cache, much, little).is_some(), "{kv_cache:?}");
            assert_eq!(ratio(kv_cache, little, little), None, "there is no more memory");
        }
        assert_eq!(ratio(KvCacheSize::ALL, little, little / 2), None, "all memory is not sufficient");
    }

    #[test]
    fn nothing_is_suggested_if_nothing_fits() {
        assert_eq!(suggested(&request(), all_of(1 << 20)), [""; 0]);
        let many_tokens = MemoryRequest { max_num_batched_tokens: 1 << 16, ..request() };
        assert_eq!(suggested(&many_tokens, all_of(100 << 20)), [""; 0], "the workspace is too large");
    }
}
