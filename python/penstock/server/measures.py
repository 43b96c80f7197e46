"""Numbers that the server counts for `/metrics`: ended requests of each model, and HTTP requests."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import penstock

__all__ = ["DISCONNECTED", "PROBES", "Distribution", "HttpMeasures", "RequestMeasures"]

#: vLLM's, with finer ones for small models.
_SECONDS = (
    *(0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_HTTP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
#: Routes of probes and scrapes, which are not counted and logged only for debugging.
PROBES = frozenset({"/health", "/metrics", "/ping", "/version"})
#: The status of a request if the client closed the connection before the response.
DISCONNECTED = 499


class Distribution:
    """A histogram with the properties of `penstock.Histogram`."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.sum += value


def _lengths(limit: int) -> list[float]:
    """1, 2, 5, 10 and so on, up to the limit."""
    series = (factor * 10.0**exponent for exponent in range(20) for factor in (1, 2, 5))
    return [bound for bound in series if bound <= limit]


class RequestMeasures:
    """Distributions of the requests of one model that have ended with a result, under the names of vLLM."""

    def __init__(self, max_model_len: int) -> None:
        lengths = _lengths(max_model_len)
        self.e2e_request_latency_seconds = Distribution(_SECONDS)
        self.request_inference_time_seconds = Distribution(_SECONDS)
        self.request_prefill_time_seconds = Distribution(_SECONDS)
        self.request_decode_time_seconds = Distribution(_SECONDS)
        self.request_time_per_output_token_seconds = Distribution(_TOKEN_SECONDS)
        self.request_prompt_tokens = Distribution(lengths)
        self.request_generation_tokens = Distribution(lengths)
        self.request_prefill_kv_computed_tokens = Distribution(lengths)
        self.request_params_max_tokens = Distribution(lengths)
        self.request_params_n = Distribution(_CHOICES)

    def add(self, ended: penstock.Result | penstock.Request, params: penstock.SamplingParams) -> None:
        """Count a request that has ended."""
        usage, timings = ended.usage, ended.timings
        self.e2e_request_latency_seconds.add(timings.total)
        self.request_inference_time_seconds.add(timings.total - timings.queued)
        if timings.first_token is not None:
            self.request_prefill_time_seconds.add(timings.first_token - timings.queued)
            decode = timings.total - timings.first_token
            self.request_decode_time_seconds.add(decode)
            if params.n == 1 and usage.completion_tokens > 1:
                self.request_time_per_output_token_seconds.add(decode / (usage.completion_tokens - 1))
        self.request_prompt_tokens.add(usage.prompt_tokens)
        self.request_generation_tokens.add(usage.completion_tokens)
        self.request_prefill_kv_computed_tokens.add(usage.prompt_tokens - usage.cached_tokens)
        if params.max_tokens is not None:
            self.request_params_max_tokens.add(params.max_tokens)
        self.request_params_n.add(params.n)


class HttpMeasures:
    """Counts and durations of HTTP requests. All labels are of closed sets."""

    def __init__(self) -> None:
        #: By handler, method and class of status.
        self.requests: Counter[tuple[str, str, str]] = Counter()
        #: By handler and method.
        self.durations: dict[tuple[str, str], Distribution] = {}

    def add(self, path: str | None, method: str, status: int | None, seconds: float) -> None:
        """Count a request that has ended; `path` is that of its route, if there is one."""
        if path in PROBES:
            return
        handler = path or "none"
        method = method if method in _METHODS else "other"
        self.requests[handler, method, f"{(status or DISCONNECTED) // 100}xx"] += 1
        duration = self.durations.get((handler, method))
        if duration is None:
            duration = self.durations[handler, method] = Distribution(_HTTP_SECONDS)
        duration.add(seconds)
