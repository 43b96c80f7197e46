"""The metrics of engines for Prometheus, in the server and in applications without it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

import penstock
from penstock.server.families import Families
from penstock.server.probes import engine_state
from penstock.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

__all__ = ["EngineCollector", "add_engine", "add_legacy", "labels_of"]

#: The fields of `penstock.Stats` that are current values; the other numbers are totals.
_GAUGES = frozenset(
    {
        "running",
        "waiting",
        "swapped",
        "paused",
        "blocks_total",
        "blocks_used",
        "blocks_cached",
        "blocks_reserved",
        "host_blocks_total",
        "host_blocks_used",
    }
)
_STATES = ("loading", "ok", "draining", "asleep", "stuck", "stopped")


class EngineCollector(Collector):
    """The metrics of open engines, for a registry of `prometheus_client`.

    They are those of `/metrics` of the server, without those of HTTP, of the process, and of the requests
    that a server has answered. Each scrape reads the numbers once, in its own thread. `engines` is an engine,
    named `"default"`, or a mapping of names to engines. An engine that was never open has only its state.
    """

    def __init__(self, engines: penstock.Engine | Mapping[str, penstock.Engine]) -> None:
        named = engines if isinstance(engines, Mapping) else {"default": engines}
        self._names: dict[penstock.Engine, str] = {}
        for name, engine in named.items():
            self._names.setdefault(engine, name)

    def collect(self) -> Iterable[Metric]:
        """The metric families."""
        families = Families()
        for engine, name in self._names.items():
            add_engine(families, name, engine, engine_state(engine, ServerSettings.stall_timeout))
        yield from families.by_name.values()


def labels_of(name: str) -> dict[str, str]:
    """The labels of the metrics of an engine; there is one for each name."""
    return {"model_name": name, "engine": "0"}


def add_engine(families: Families, name: str, engine: penstock.Engine, state: str) -> penstock.Stats | None:
    """Add the metrics of an engine; returns its numbers, unless it was never open."""
    labels = labels_of(name)
    for other in _STATES:
        text = "1 for the current state of the engine, as in /health."
        families.gauge("penstock:engine_state", text, {**labels, "state": other}, float(other == state))
    try:
        stats = engine.stats()
    except penstock.EngineStoppedError:
        return None
    _add_own(families, labels, stats, engine)
    _add_vllm(families, labels, stats, engine, is_asleep=state == "asleep")
    return stats


def _add_own(
    families: Families, labels: dict[str, str], stats: penstock.Stats, engine: penstock.Engine
) -> None:
    """All fields of `penstock.Stats`, under their names, and the memory of the KV cache."""
    reserved = engine.info.memory.kv_cache
    used = reserved * (stats.blocks_used + stats.blocks_cached) // max(stats.blocks_total, 1)
    for name, value in (("kv_cache_reserved_bytes", reserved), ("kv_cache_used_bytes", used)):
        families.gauge(f"penstock:{name}", _TEXTS[name], labels, value)
    for field, value in stats.to_dict().items():
        name, text = f"penstock:{field}", getattr(penstock.Stats, field).__doc__
        if isinstance(value, dict):
            unit = "" if field == "tokens_per_step" else "_seconds"
            families.histogram(name + unit, text, labels, getattr(stats, field))
        elif field in _GAUGES:
            families.gauge(name, text, labels, value)
        elif isinstance(value, int):  # the rate is left to queries
            families.counter(name, text, labels, value)


def _add_vllm(
    families: Families,
    labels: dict[str, str],
    stats: penstock.Stats,
    engine: penstock.Engine,
    *,
    is_asleep: bool,
) -> None:
    """The metrics of vLLM of which the engine has the value."""
    gauges: list[tuple[str, float]] = [
        ("num_requests_running", stats.running),
        ("num_requests_waiting", stats.waiting),
        ("num_requests_swapped", stats.swapped),
        ("kv_cache_usage_perc", stats.blocks_used / max(stats.blocks_total, 1)),
        ("cpu_prefix_cache_hit_rate", stats.prefix_host_hit_tokens / max(stats.prefix_query_tokens, 1)),
    ]
    for name, value in gauges:
        families.gauge(f"vllm:{name}", _TEXTS[name], labels, value)
    for reason, value in (("capacity", stats.waiting), ("deferred", 0)):
        name = "num_requests_waiting_by_reason"
        families.gauge(f"vllm:{name}", _TEXTS[name], {**labels, "reason": reason}, value)
    for name, is_current in (
        ("awake", not is_asleep),
        ("weights_offloaded", False),
        ("discard_all", is_asleep),
    ):
        found = {**labels, "sleep_state": name}
        families.gauge("vllm:engine_sleep_state", _TEXTS["engine_sleep_state"], found, float(is_current))
    found = {**labels, **_adapter_labels(engine)}
    families.gauge("vllm:lora_requests_info", _TEXTS["lora_requests_info"], found, time.time())
    families.gauge(
        "vllm:cache_config_info", _TEXTS["cache_config_info"], {**labels, **_cache_config(stats, engine)}, 1
    )

    computed, hit = stats.prompt_tokens, stats.prefix_hit_tokens
    counters = [
        ("prompt_tokens", {}, computed + hit),
        ("prompt_tokens_by_source", {"source": "local_compute"}, computed),
        ("prompt_tokens_by_source", {"source": "local_cache_hit"}, hit),
        ("prompt_tokens_cached", {}, hit),
        ("generation_tokens", {}, stats.generation_tokens),
        ("request_success", {"finished_reason": "stop"}, stats.finished_stop),
        ("request_success", {"finished_reason": "length"}, stats.finished_length),
        (
            "request_success",
            {"finished_reason": "abort"},
            stats.finished_cancelled + stats.finished_interrupted + stats.finished_unread,
        ),
        ("request_success", {"finished_reason": "error"}, stats.finished_failed),
        ("num_preemptions", {}, stats.preemptions),
        ("prefix_cache_queries", {}, stats.prefix_query_tokens),
        ("prefix_cache_hits", {}, hit),
        ("spec_decode_num_draft_tokens", {}, stats.drafted_tokens),
        ("spec_decode_num_accepted_tokens", {}, stats.accepted_tokens),
        ("admission_rejections", {"reason": "capacity"}, stats.requests_rejected),
    ]
    for name, more, value in counters:
        families.counter(f"vllm:{name}", _TEXTS[name], {**labels, **more}, value)

    histograms = {
        "time_to_first_token_seconds": stats.time_to_first_token,
        "inter_token_latency_seconds": stats.inter_token_latency,
        "request_queue_time_seconds": stats.queue_time,
        "iteration_tokens_total": stats.tokens_per_step,
    }
    for name, histogram in histograms.items():
        families.histogram(f"vllm:{name}", _TEXTS[name], labels, histogram)


def _adapter_labels(engine: penstock.Engine) -> dict[str, str]:
    """The adapters in use, in the order of their names."""
    adapters = engine.adapters.values()
    return {
        "max_lora": str(engine.info.max_adapters),
        "running_lora_adapters": ",".join(adapter.name for adapter in adapters if adapter.running),
        "waiting_lora_adapters": ",".join(adapter.name for adapter in adapters if adapter.waiting),
    }


def _cache_config(stats: penstock.Stats, engine: penstock.Engine) -> dict[str, str]:
    info, config = engine.info, engine.config
    return {
        "block_size": str(info.block_size),
        "cache_dtype": info.kv_cache_dtype,
        "calculate_kv_scales": str(info.kv_cache_dtype in ("int8", "uint4")),
        "cpu_offload_gb": "0",  # weights are not offloaded
        "enable_prefix_caching": str(config.prefix_cache),
        "gpu_memory_utilization": str(info.memory_ratio),
        "is_attention_free": "False",
        "num_cpu_blocks": str(stats.host_blocks_total),
        "num_gpu_blocks": str(info.num_blocks),
        "num_gpu_blocks_override": str(config.kv_cache_blocks),
        "sliding_window": "None",  # the cache has all tokens, also for layers with a window
        "swap_space_bytes": str(info.memory.host_cache),
    }


def add_legacy(families: Families, name: str, stats: penstock.Stats) -> None:
    """Names that vLLM had before and that some tools read."""
    labels = labels_of(name)
    gauges = {
        "gpu_cache_usage_perc": stats.blocks_used / max(stats.blocks_total, 1),
        "cpu_cache_usage_perc": stats.host_blocks_used / max(stats.host_blocks_total, 1),
        "gpu_prefix_cache_hit_rate": stats.prefix_hit_rate,
    }
    for former, value in gauges.items():
        families.gauge(f"vllm:{former}", _TEXTS[former], labels, value)
    former = "time_per_output_token_seconds"
    families.histogram(f"vllm:{former}", _TEXTS[former], labels, stats.inter_token_latency)


_TEXTS: dict[str, str] = {
    "kv_cache_reserved_bytes": "Memory reserved for the KV cache.",
    "kv_cache_used_bytes": "The part of it that holds tokens of running sequences or cached prefixes.",
    "num_requests_running": "Sequences that hold a slot.",
    "num_requests_waiting": "Sequences that wait for a slot or for blocks.",
    "num_requests_swapped": "Sequences that wait with their blocks in the host tier.",
    "cpu_prefix_cache_hit_rate": "Part of the prompt tokens that the host tier had, since the start.",
    "num_requests_waiting_by_reason": "Waiting sequences by the reason for which they wait.",
    "kv_cache_usage_perc": "Part of the KV cache that running sequences use; 1 is all of it.",
    "engine_sleep_state": "1 for the state of sleep; discard_all: the model's memory is freed.",
    "lora_requests_info": "The time; the labels have the adapters of running and of waiting requests.",
    "cache_config_info": "Configuration of the KV cache; its blocks are counted as those of a GPU.",
    "prompt_tokens": "Prompt tokens computed or taken from the prefix cache.",
    "prompt_tokens_by_source": "Prompt tokens by their source.",
    "prompt_tokens_cached": "Prompt tokens taken from the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "request_success": "Requests that have ended, by reason; each of the n choices counts.",
    "num_preemptions": "Running sequences that were preempted.",
    "prefix_cache_queries": "Prompt tokens of requests that may use the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that the prefix cache had.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "admission_rejections": "Requests refused because the engine was overloaded.",
    "time_to_first_token_seconds": "Seconds from a request's arrival to its first token.",
    "inter_token_latency_seconds": "Seconds from a token of a request to the next.",
    "iteration_tokens_total": "Tokens computed by a step.",
    "request_queue_time_seconds": "Seconds from a request's arrival to its first step.",
    "gpu_cache_usage_perc": "Former name of kv_cache_usage_perc.",
    "cpu_cache_usage_perc": "Part of the host tier that is in use; 1 is all of it.",
    "gpu_prefix_cache_hit_rate": "Part of the prompt tokens that the prefix cache had, since the start.",
    "time_per_output_token_seconds": "Former name of inter_token_latency_seconds.",
}
