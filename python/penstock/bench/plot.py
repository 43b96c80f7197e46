"""Plots of a benchmark: a PNG or SVG file, and one for the terminal."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from penstock.bench.report import load_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from penstock.bench.settings import BenchSettings

    Points = Sequence[dict[str, Any]]

__all__ = ["terminal_plot", "write_plot"]

_PLOTTED = {"ttft": "time to first token", "itl": "inter-token latency", "e2el": "end-to-end latency"}
#: A logarithmic axis has no 0, the gap of events that came together.
_LEAST = 0.1
_SHADES = "█▓▒░"
_BAR_WIDTH = 48


def write_plot(
    file: str,
    title: str,
    points: Points,
    distributions: Sequence[Mapping[str, Sequence[float]]],
    settings: BenchSettings,
) -> None:
    """Write a file with the latencies over the load, and the distributions of each load point.

    `distributions` has the latencies of each point by name, in milliseconds.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    has_curve = len(points) > 1
    figure = Figure(figsize=(12, 8 if has_curve else 4.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2 if has_curve else 1, 3, squeeze=False)
    if has_curve:
        _plot_throughput(axes[0][0], points)
        for ax, name in zip(axes[0][1:], _PLOTTED, strict=False):
            _plot_percentiles(ax, name, points, settings)
    for (name, label), ax in zip(_PLOTTED.items(), axes[-1], strict=True):
        for point, values in zip(points, distributions, strict=True):
            _plot_distribution(ax, values[name], load_name(point))
        ax.set(xlabel=f"{label}, ms", ylabel="share of values", ylim=(0, 1.02), xscale="log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.tick_params(axis="x", labelrotation=45)
        ax.grid(alpha=0.3)
    handles, labels = axes[-1][-1].get_legend_handles_labels()
    figure.legend(
        handles, labels, title=_load_label(points), loc="outside lower center", ncols=max(len(labels), 1)
    )
    figure.savefig(file, dpi=100)


def _plot_throughput(ax: Axes, points: Points) -> None:
    labels = [load_name(point) for point in points]
    ax.plot(labels, [point["output_throughput"] for point in points], marker="o")
    ax.set(xlabel=_load_label(points), ylabel="output tokens per second", ylim=(0, None))
    ax.grid(alpha=0.3)


def _plot_percentiles(ax: Axes, name: str, points: Points, settings: BenchSettings) -> None:
    labels = [load_name(point) for point in points]
    for percent in settings.metric_percentiles:
        ax.plot(
            labels, [point[f"p{percent:g}_{name}_ms"] for point in points], marker="o", label=f"p{percent:g}"
        )
    ax.set(xlabel=_load_label(points), ylabel=f"{_PLOTTED[name]}, ms", ylim=(0, None))
    ax.grid(alpha=0.3)
    ax.legend()


def _load_label(points: Points) -> str:
    return "requests per second" if points[0]["max_concurrency"] is None else "requests in flight"


def _plot_distribution(ax: Axes, values: Sequence[float], label: str) -> None:
    """The share of values up to each value."""
    if values:
        ax.ecdf([max(value, _LEAST) for value in values], label=label)


def terminal_plot(points: Points, settings: BenchSettings) -> str:
    """The latencies over the load as bars; the shades of a bar end at the percentiles."""
    percents = sorted(settings.metric_percentiles)[-len(_SHADES) :]
    names = [f"p{percent:g}" for percent in percents]
    width = max(len(load_name(point)) for point in points)
    lines = []
    for name, label in _PLOTTED.items():
        lines.append(f"{label}, ms: {', '.join(names)}")
        rows = [[point[f"{percent}_{name}_ms"] or 0.0 for percent in names] for point in points]
        largest = max(map(max, rows)) or 1.0
        for point, row in zip(points, rows, strict=True):
            ends = [round(value / largest * _BAR_WIDTH) for value in row]
            lengths = (end - start for start, end in pairwise([0, *ends]))
            bar = "".join(shade * length for shade, length in zip(_SHADES, lengths, strict=False))
            values = "  ".join(f"{value:.1f}" for value in row)
            lines.append(f"{load_name(point):>{width}} |{bar:{_BAR_WIDTH}}  {values}")
        lines.append("")
    return "\n".join(lines)
