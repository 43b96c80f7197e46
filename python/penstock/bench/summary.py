"""The numbers of a load point, by the names of `vllm bench serve`."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from penstock.bench.settings import GOALS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.bench.client import Record
    from penstock.bench.run import Measurement
    from penstock.bench.settings import BenchSettings

__all__ = ["LATENCIES", "gaps", "percentile", "summarize"]

#: The latencies by vLLM's names, and their titles.
LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
#: With more, the numbers are those of the load generator.
_MAX_CPU = 0.85
_MAX_LAG_MS = 20
#: The use of the CPU in a shorter time is that of the start.
_MIN_SECONDS = 1.0


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of ordered numbers, interpolated linearly as numpy does; NaN if there are none."""
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * percent / 100
    index = int(position)
    after = ordered[min(index + 1, len(ordered) - 1)]
    return ordered[index] + (after - ordered[index]) * (position - index)


def gaps(records: Iterable[Record]) -> list[float]:
    """The times between two events of a stream."""
    return [after - before for record in records for before, after in pairwise(record.times)]


def summarize(measurement: Measurement, settings: BenchSettings) -> dict[str, Any]:
    """The numbers of a load point. Times of latencies are in milliseconds."""
    done = [record for record in measurement.records if record.error is None]
    failed = [record for record in measurement.records if record.error is not None]
    seconds, load = measurement.seconds, measurement.load
    tokens_in = sum(record.input_tokens or 0 for record in done)
    tokens_out = sum(record.tokens for record in done)
    rates = {
        "request_throughput": len(done),
        "request_goodput": sum(_is_good(record, settings.goodput) for record in done),
        "output_throughput": tokens_out,
        "total_token_throughput": tokens_in + tokens_out,
    }
    if not settings.goodput:
        del rates["request_goodput"]
    found: dict[str, Any] = {
        "max_concurrency": load.concurrency,
        "request_rate": None if load.concurrency is not None else _finite(load.request_rate),
        "duration": seconds,
        "completed": len(done),
        "failed": len(failed),
        "unfinished": measurement.in_flight,
        "errors": dict(Counter(str(record.error) for record in failed)),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "output_events": sum(len(record.times) for record in done),
        "max_concurrent_requests": measurement.peak_in_flight,
        **{name: count / seconds if seconds > 0 else 0.0 for name, count in rates.items()},
    }
    values = {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done],
        "itl": gaps(done),
        "e2el": [record.e2el for record in done],
    }
    for name, numbers in values.items():
        found |= _latency(name, numbers, settings.metric_percentiles)
    found["client"] = _client(measurement)
    found["warnings"] = _warnings(found, done, failed, settings)
    return found


def _latency(name: str, seconds: Iterable[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, standard deviation and percentiles in milliseconds; `None` without a value."""
    ordered = sorted(value * 1e3 for value in seconds if not math.isnan(value))
    mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
    variance = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered) if ordered else math.nan
    found = {f"mean_{name}_ms": mean, f"std_{name}_ms": math.sqrt(variance)}
    found |= {f"median_{name}_ms": percentile(ordered, 50)}
    found |= {f"p{percent:g}_{name}_ms": percentile(ordered, percent) for percent in percentiles}
    return {key: _finite(value) for key, value in found.items()}


def _finite(value: float) -> float | None:
    """The value as JSON can have it."""
    return value if math.isfinite(value) else None


def _is_good(record: Record, goals: Mapping[str, float]) -> bool:
    """Whether a request has text and meets all goals. One of one token has no time per output token."""
    values = {name: getattr(record, name) * 1e3 for name in GOALS if name in goals}
    return bool(record.times) and not any(values[name] > limit for name, limit in goals.items())


def _client(measurement: Measurement) -> dict[str, float]:
    """The use of the load generator: CPU seconds per second, and its delays in milliseconds."""
    late = sorted(record.sent - record.scheduled for record in measurement.records)
    lags = sorted(measurement.watch.lags)
    return {
        "cpu": measurement.watch.cpu,
        "p99_lag_ms": percentile(lags or [0.0], 99) * 1e3,
        "p99_late_start_ms": percentile(late or [0.0], 99) * 1e3,
    }


def _warnings(
    found: dict[str, Any], done: list[Record], failed: list[Record], settings: BenchSettings
) -> list[str]:
    """Facts that make the numbers doubtful."""
    warnings = _load_warnings(found, done)
    for kind in dict.fromkeys(record.error for record in failed):
        message = next(record.message for record in failed if record.error == kind)
        warnings.append(f"{found['errors'][kind]} x {kind}: {message}")
    repeated = sum(record.is_repeated for record in done)
    if repeated:
        warnings.append(
            f"{repeated} of {len(done)} requests have the prompt of an earlier one: "
            "the server's prefix cache may answer them"
        )
    if (settings.extra_body or {}).get("n", 1) != 1:
        warnings.append("n is not 1: the inter-token latency and the time per output token mix the choices")
    without = sum(record.output_tokens is None for record in done)
    if without:
        warnings.append(f"{without} responses have no usage: their events count as tokens")
    short = sum(record.tokens != record.max_tokens for record in done) if settings.ignore_eos else 0
    if short:
        warnings.append(f"{short} responses do not have max_tokens tokens, despite ignore_eos")
    tokens, events = found["total_output_tokens"], found["output_events"]
    if abs(tokens - events) > tokens // 100:
        warnings.append(
            f"{tokens} tokens came in {events} events with text; the inter-token latency "
            "is the time between events"
        )
    return warnings


def _load_warnings(found: dict[str, Any], done: list[Record]) -> list[str]:
    """Facts that make the load another one than the settings say."""
    warnings = []
    client, peak = found["client"], found["max_concurrent_requests"]
    if peak < (found["max_concurrency"] or 0):
        warnings.append(f"at most {peak} requests were in flight: a higher number of prompts is necessary")
    if found["request_rate"] is not None and client["p99_late_start_ms"] > _MAX_LAG_MS:
        warnings.append(
            "the load generator cannot start requests at this rate: "
            f"they are late by {client['p99_late_start_ms']:.0f} ms (p99)"
        )
    if client["cpu"] > _MAX_CPU and done and found["duration"] >= _MIN_SECONDS:
        warnings.append(f"the load generator is the bottleneck: it used {client['cpu']:.0%} of a core")
    elif client["p99_lag_ms"] > _MAX_LAG_MS:
        warnings.append(
            f"the load generator waits for the CPU: its times are late by {client['p99_lag_ms']:.0f} ms (p99)"
        )
    return warnings
