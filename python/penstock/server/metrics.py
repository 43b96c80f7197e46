"""`/metrics`: the numbers of the engines and of the server for Prometheus, made when they are scraped.

A thread reads and formats them, one scrape at a time: the time for it grows with the models and routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from penstock.server.engine_metrics import add_engine, add_legacy, labels_of
from penstock.server.families import Families
from penstock.server.probes import state_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from penstock.server.http import Exchange
    from penstock.server.state import State

__all__ = ["metrics"]

_OPENMETRICS = "application/openmetrics-text"
_process = ProcessCollector(registry=None)
#: Of the measures of requests.
_TEXTS = {
    "e2e_request_latency_seconds": "Seconds from a request's arrival to its end.",
    "request_inference_time_seconds": "Seconds from a request's first step to its end.",
    "request_prefill_time_seconds": "Seconds from a request's first step to its first token.",
    "request_decode_time_seconds": "Seconds from a request's first token to its end.",
    "request_time_per_output_token_seconds": "Mean seconds per token after the first of a request with n=1.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request, of all choices.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of a request that were computed.",
    "request_params_max_tokens": "max_tokens of a request.",
    "request_params_n": "n of a request.",
}


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
        models = state.models.selected(None)
        #: Of the models that were open once.
        self._measures = {model: model.measures for model in models if model.max_model_len is not None}

    def collect(self) -> Iterable[Metric]:
        """The metric families."""
        families = Families()
        for model in self._state.models.selected(None):
            status = state_of(model, self._state)["status"]
            stats = add_engine(families, model.name, model.engine, status)
            measures = self._measures.get(model)
            if measures is not None:
                for name, measure in vars(measures).items():
                    families.histogram(f"vllm:{name}", _TEXTS[name], labels_of(model.name), measure)
            if stats is not None and self._state.settings.legacy_metrics:
                add_legacy(families, model.name, stats)
        self._add_http(families)
        yield from families.by_name.values()
        yield from _process.collect()

    def _add_http(self, families: Families) -> None:
        http = self._state.http
        text = "Bytes of the bodies of unfinished HTTP requests, of their values and of their responses."
        families.gauge("http_body_bytes", text, {}, self._state.body_bytes.total)
        text = "HTTP requests rejected because the bodies of all requests and responses were too large."
        families.counter("http_bodies_rejected", text, {}, self._state.body_bytes.num_rejected)
        # The event loop adds items meanwhile.
        for (handler, method, status), count in list(http.requests.items()):
            labels = {"handler": handler, "method": method, "status": status}
            families.counter("http_requests", "HTTP requests that have ended.", labels, count)
        for (handler, method), duration in list(http.durations.items()):
            labels = {"handler": handler, "method": method}
            text = "Seconds from the headers of an HTTP request to the end of its response."
            families.histogram("http_request_duration_seconds", text, labels, duration)
