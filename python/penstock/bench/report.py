"""The tables of a benchmark, in the layout of `vllm bench serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.bench.summary import LATENCIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.bench.settings import BenchSettings

__all__ = ["curve", "load_name", "table"]

_WIDTH = 50
_LABEL = 40

_COUNTS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "unfinished": "Unfinished requests",
    "max_concurrency": "Maximum request concurrency",
    "request_rate": "Request rate configured (RPS)",
    "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total token throughput (tok/s)",
    "max_concurrent_requests": "Peak concurrent requests",
}
_CLIENT = {
    "cpu": "CPU (cores)",
    "p99_lag_ms": "P99 event-loop lag (ms)",
    "p99_late_start_ms": "P99 late start (ms)",
}


def table(point: dict[str, Any], settings: BenchSettings) -> str:
    """All numbers of a load point."""
    return "\n".join(_lines(point, settings))


def _lines(point: dict[str, Any], settings: BenchSettings) -> Iterator[str]:
    yield " Serving Benchmark Result ".center(_WIDTH, "=")
    for name, label in _COUNTS.items():
        value = point.get(name)
        if value is not None and (value or name != "unfinished"):
            yield _line(label, value)
    for name, title in LATENCIES.items():
        yield title.center(_WIDTH, "-")
        short = name.upper()
        yield _line(f"Mean {short} (ms)", point[f"mean_{name}_ms"])
        yield _line(f"Std {short} (ms)", point[f"std_{name}_ms"])
        for percent in settings.metric_percentiles:
            label = "Median" if percent == 50 else f"P{percent:g}"  # noqa: PLR2004 - the median
            yield _line(f"{label} {short} (ms)", point[f"p{percent:g}_{name}_ms"])
    yield "Load Generator".center(_WIDTH, "-")
    for name, label in _CLIENT.items():
        yield _line(label, point["client"][name])
    yield "=" * _WIDTH
    for warning in point["warnings"]:
        yield f"Warning: {warning}"


def _line(label: str, value: float | None) -> str:
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':{_LABEL}} {text:<9}".rstrip()


def load_name(point: dict[str, Any]) -> str:
    """The load of a point, short."""
    if point["max_concurrency"] is not None:
        return str(point["max_concurrency"])
    return "inf" if point["request_rate"] is None else f"{point['request_rate']:g}"


def curve(points: Sequence[dict[str, Any]], settings: BenchSettings) -> str:
    """One line for each load point."""
    columns = {"req/s": "request_throughput", "tok/s": "output_throughput"}
    if settings.goodput:
        columns["good/s"] = "request_goodput"
    percents = settings.metric_percentiles
    for name in LATENCIES:
        for percent in dict.fromkeys((*percents[:1], *percents[-1:])):
            columns[f"{name} p{percent:g}"] = f"p{percent:g}_{name}_ms"
    columns["failed"] = "failed"
    rows = [["load", *columns]]
    rows += ([load_name(point), *(_number(point[key]) for key in columns.values())] for point in points)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
