"""`/metrics`: the numbers of the engines and of the server for Prometheus, made when they are scraped.

A thread reads and formats them, one scrape at a time: the time for it grows with the models and routes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

import penstock
from penstock.server.families import Families
from penstock.server.probes import state_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from penstock.server.http import Exchange
    from penstock.server.state import Model, State

__all__ = ["metrics"]

#: The fields of `penstock.Stats` that are current values; the other numbers are totals.
_GAUGES = frozenset(
    {
        "running",
        "waiting",
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

_OPENMETRICS = "application/openmetrics-text"
_process = ProcessCollector(registry=None)


async def metrics(state: State, exchange: Exchange) -> None:
    """The metrics, in the format that the client accepts."""
    accepted = exchange.request_headers.get("accept", "")
    is_openmetrics = any(kind.partition(";")[0].strip() == _OPENMETRICS for kind in accepted.split(","))
    text = await state.metrics_threads.run(_text, _Collector(state), is_openmetrics=is_openmetrics)
    kind = openmetrics.CONTENT_TYPE_LATEST if is_openmetrics else CONTENT_TYPE_PLAIN_0_0_4
    await exchange.send_bytes(text, kind)


def _text(collector: _Collector, *, is_openmetrics: bool) -> bytes:
    if not is_openmetrics:
        return generate_latest(collector)
    # Otherwise the colons in the names of samples become underscores.
    return openmetrics.generate_latest(collector, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call,no-any-return]


class _Collector(Collector):
    """Reads all numbers of a server once; made on the event loop, used in a thread."""

    def __init__(self, state: State) -> None:
        self._state = state
        models = state.selected(None)
        #: Of the models that were open once.
        self._measures = {model: model.measures for model in models if model.max_model_len is not None}

    def collect(self) -> Iterable[Metric]:
        """The metric families."""
        families = Families()
        for model in self._state.selected(None):
            labels = {"model_name": model.name, "engine": "0"}
            status = state_of(model, self._state)["status"]
            for name in _STATES:
                text = "1 for the current state of the engine, as in /health."
                families.gauge(
                    "penstock:engine_state", text, {**labels, "state": name}, float(name == status)
                )
            measures = self._measures.get(model)
            if measures is None:
                continue
            stats = model.engine.stats()
            _add_own(families, labels, stats)
            _add_vllm(families, labels, stats, model, is_asleep=status == "asleep")
            for name, measure in vars(measures).items():
                families.histogram(f"vllm:{name}", _TEXTS[name], labels, measure)
            if self._state.settings.legacy_metrics:
                _add_legacy(families, labels, stats)
        self._add_http(families)
        yield from families.by_name.values()
        yield from _process.collect()

    def _add_http(self, families: Families) -> None:
        http = self._state.http
        text = "Bytes of the bodies of unfinished HTTP requests, and of their values."
        families.gauge("http_body_bytes", text, {}, self._state.num_body_bytes)
        text = "HTTP requests rejected because the bodies of all requests were too large."
        families.counter("http_bodies_rejected", text, {}, self._state.num_rejected_bodies)
        # The event loop adds items meanwhile.
        for (handler, method, status), count in list(http.requests.items()):
            labels = {"handler": handler, "method": method, "status": status}
            families.counter("http_requests", "HTTP requests that have ended.", labels, count)
        for (handler, method), duration in list(http.durations.items()):
            labels = {"handler": handler, "method": method}
            text = "Seconds from the headers of an HTTP request to the end of its response."
            families.histogram("http_request_duration_seconds", text, labels, duration)


def _add_own(families: Families, labels: dict[str, str], stats: penstock.Stats) -> None:
    """All fields of `penstock.Stats`, under their names."""
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
    families: Families, labels: dict[str, str], stats: penstock.Stats, model: Model, *, is_asleep: bool
) -> None:
    """The metrics of vLLM of which the engine has the value."""
    gauges: list[tuple[str, float]] = [
        ("num_requests_running", stats.running),
        ("num_requests_waiting", stats.waiting),
        ("kv_cache_usage_perc", stats.blocks_used / max(stats.blocks_total, 1)),
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
    found = {**labels, **_adapter_labels(model)}
    families.gauge("vllm:lora_requests_info", _TEXTS["lora_requests_info"], found, time.time())
    families.gauge(
        "vllm:cache_config_info", _TEXTS["cache_config_info"], {**labels, **_cache_config(stats, model)}, 1
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


def _adapter_labels(model: Model) -> dict[str, str]:
    """The adapters in use, in the order of their names."""
    adapters = model.adapters.values()
    return {
        "max_lora": str(model.engine.info.max_adapters),
        "running_lora_adapters": ",".join(adapter.name for adapter in adapters if adapter.running),
        "waiting_lora_adapters": ",".join(adapter.name for adapter in adapters if adapter.waiting),
    }


def _cache_config(stats: penstock.Stats, model: Model) -> dict[str, str]:
    info = model.engine.info
    return {
        "block_size": str(info.block_size),
        "cache_dtype": info.kv_cache_dtype,
        "enable_prefix_caching": str(model.engine.config.prefix_cache),
        "num_cpu_blocks": str(stats.host_blocks_total),
        "num_gpu_blocks": str(info.num_blocks),
    }


def _add_legacy(families: Families, labels: dict[str, str], stats: penstock.Stats) -> None:
    """Names that vLLM had before and that some tools read."""
    gauges = {
        "gpu_cache_usage_perc": stats.blocks_used / max(stats.blocks_total, 1),
        "cpu_cache_usage_perc": stats.host_blocks_used / max(stats.host_blocks_total, 1),
        "gpu_prefix_cache_hit_rate": stats.prefix_hit_rate,
    }
    for name, value in gauges.items():
        families.gauge(f"vllm:{name}", _TEXTS[name], labels, value)
    name = "time_per_output_token_seconds"
    families.histogram(f"vllm:{name}", _TEXTS[name], labels, stats.inter_token_latency)


_TEXTS: dict[str, str] = {
    "num_requests_running": "Sequences that hold a slot.",
    "num_requests_waiting": "Sequences that wait for a slot or for blocks.",
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
    "e2e_request_latency_seconds": "Seconds from a request's arrival to its end.",
    "request_queue_time_seconds": "Seconds from a request's arrival to its first step.",
    "request_inference_time_seconds": "Seconds from a request's first step to its end.",
    "request_prefill_time_seconds": "Seconds from a request's first step to its first token.",
    "request_decode_time_seconds": "Seconds from a request's first token to its end.",
    "request_time_per_output_token_seconds": "Mean seconds per token after the first of a request with n=1.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request, of all choices.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of a request that were computed.",
    "request_params_max_tokens": "max_tokens of a request.",
    "request_params_n": "n of a request.",
    "gpu_cache_usage_perc": "Former name of kv_cache_usage_perc.",
    "cpu_cache_usage_perc": "Part of the host tier that is in use; 1 is all of it.",
    "gpu_prefix_cache_hit_rate": "Part of the prompt tokens that the prefix cache had, since the start.",
    "time_per_output_token_seconds": "Former name of inter_token_latency_seconds.",
}
