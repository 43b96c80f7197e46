"""Names of engines' metrics and their common names, which AIBrix's runtime defined.

A common name has several sources, because engines rename their metrics: the first one that is there is used.
The names are those of families, so that of a counter has no `_total`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PREFIX", "rules_of"]

#: Of the common names.
PREFIX = "aibrix:"

_Rules = dict[str, tuple[str, ...]]

#: vLLM had `gpu_cache_usage_perc` before `kv_cache_usage_perc`, and `time_per_output_token_seconds` before
#: `inter_token_latency_seconds`. Readers of either common name get a value.
_LATENCIES: _Rules = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "time_per_output_token_seconds": (
        "time_per_output_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
    ),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
}
_TOKENS: _Rules = {
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
}
_VLLM: _Rules = {
    **_LATENCIES,
    **_TOKENS,
    "queue_size": ("num_requests_waiting",),
    "gpu_cache_usage_perc": ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "request_success": ("request_success",),
}
_SGLANG: _Rules = {
    **_LATENCIES,
    **_TOKENS,
    "queue_size": ("num_queue_reqs",),
    "generation_throughput": ("gen_throughput",),
    "cache_hit_rate": ("cache_hit_rate",),
    "token_usage": ("token_usage",),
}
_TRTLLM: _Rules = {
    **_LATENCIES,
    "request_success": ("request_success",),
    "kv_cache_usage_perc": ("kv_cache_utilization",),
    "kv_cache_hit_rate": ("kv_cache_hit_rate",),
}
#: The rules of each engine, and the prefixes of its names.
_ENGINES: dict[str, tuple[_Rules, tuple[str, ...]]] = {
    "penstock": (_VLLM, ("vllm:",)),
    "sglang": (_SGLANG, ("sglang:",)),
    "trtllm": (_TRTLLM, ("trtllm_", "")),
    "vllm": (_VLLM, ("vllm:",)),
}


def rules_of(engine: str) -> Mapping[str, Sequence[str]]:
    """The sources of each common name; none for an engine without rules."""
    rules, prefixes = _ENGINES.get(engine, ({}, ()))
    return {
        f"{PREFIX}{name}": [f"{prefix}{source}" for source in sources for prefix in prefixes]
        for name, sources in rules.items()
    }
