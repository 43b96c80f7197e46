"""Writes the table and the plot of a record.

.venv/bin/python benches/suite/report.py benches/record/MACHINE/suite.json
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import SHAPES

MODELS = {"demo": "demo", "streams": "tiny"}
WEIGHTS = {
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "q4_0": "int4",
    "int4-g128": "int4",
    "demo": "int4",
    "long": "int8",
    "streams": "f32",
}
LESS_IS_BETTER = ("ready", "rss", "cached")
UNITS = {"ready": "s", "rss": "MB", "cached": "s"}
PREFILL, LONG = 512, 8192
EXPLANATION = """\
Made by `benches/suite`. Medians of the rounds with their range; tokens per second where no unit is named.
The limit of a row is the longer of two times: Penstock's weights at the read bandwidth, and the operations
at the peak of the instruction. Both are measured before and after each turn, because they vary on a shared
machine: a share is the median of the shares in each turn. Ratios are of engines in the same round; more than
1 is better.

- `ready`: from the call that opens the model to the first token of a prompt of 16; of llama.cpp the whole
  process.
- `rss`: peak of the process after a prompt of 512 tokens and 64 decoded ones.
- `cached`: time to the first token of a prompt of 512 tokens of which 460 are in the prefix cache.
- `decode-8k`: one sequence after a prompt of 8192 tokens, with an 8-bit KV cache.
- `streams`: Penstock in one asyncio process that reads every chunk; llama.cpp a loop over one batch,
  without requests and text; llama-server with HTTP and 64 slots. Limit: float32 multiply-adds.
- All matrices of llama.cpp's files have the same type, the head too. `penstock-bf16` is
  `PENSTOCK_ISA=avx512_bf16`."""
KERNELS = """\
Shapes of the 0.5B model: those with a name alone, the others a pass over 6 layers and an eighth of the
head."""


@dataclass(frozen=True)
class Goal:
    """A goal for Penstock: a share of the limit, ratios to other engines, or a value."""

    share: float | None = None
    best: float | None = None
    llama: float | None = None
    value: float | None = None


# For CPUs with AVX-512 VNNI and BF16, and for those with AVX2 only.
AVX512 = {
    "bf16/prefill": Goal(0.88, 1.3, 1.6),
    "int8/prefill": Goal(0.83, 1.7),
    "int4/prefill": Goal(0.75, 1.5),
    "bf16/decode-1": Goal(0.96),
    "int8/decode-1": Goal(0.88),
    "int4/decode-1": Goal(0.82),
    "bf16/decode-8": Goal(0.89),
    "bf16/decode-32": Goal(0.85),
    "int8/decode-8": Goal(0.87),
    "int8/decode-32": Goal(0.82),
    "int4/decode-8": Goal(0.62),
    "int4/decode-32": Goal(0.80),
    "streams/streams-64": Goal(value=14_000),
    "streams/streams-256": Goal(value=14_000),
}
AVX2 = {
    "bf16/prefill": Goal(0.92),
    "int8/prefill": Goal(0.75, 1.6, 2.4),
    "int4/prefill": Goal(0.60, 2.2),
    "bf16/decode-1": Goal(0.94),
    "int8/decode-1": Goal(0.88, llama=1.4),
    "int4/decode-1": Goal(0.82, 1.35),
    "bf16/decode-8": Goal(0.85),
    "bf16/decode-32": Goal(0.92),
    "int8/decode-8": Goal(0.75, llama=3.0),
    "int8/decode-32": Goal(0.80, llama=2.4),
    "int4/decode-8": Goal(0.62, 2.5),
    "int4/decode-32": Goal(0.70, 2.7),
    "streams/streams-64": Goal(value=18_000),
    "streams/streams-256": Goal(value=18_000),
}
COMMON = {
    "long/decode-8k": Goal(0.80, llama=1.3),
    "demo/prefill": Goal(llama=3.5),
    "demo/decode-1": Goal(llama=1.6),
    "demo/decode-8": Goal(llama=4.0),
    "int8/ready": Goal(value=0.3),
    "int8/rss": Goal(value=560),
}


class Record:
    """The measurements of a machine."""

    def __init__(self, file: Path) -> None:
        self.data: dict[str, Any] = json.loads(file.read_text())
        self.values: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
        self._limits: dict[tuple[str, str], dict[str, list[float]]] = {}
        order = {case: place for place, case in enumerate(WEIGHTS)}
        for entry in sorted(self.data["measurements"], key=lambda entry: order[entry["case"]]):
            key = entry["case"], entry["row"]
            value = entry["value"] / 1e6 if entry["row"] == "rss" else entry["value"]
            self.values.setdefault(key, {}).setdefault(entry["engine"], {})[entry["round"]] = value
            limit = self._limit_of(*key, entry["limits"])
            if limit is not None:
                self._limits.setdefault(key, {}).setdefault(entry["engine"], []).append(limit)

    def has_dots(self) -> bool:
        """Whether the CPU multiplies pairs of bfloat16."""
        every = [entry["limits"] for entry in self.data["measurements"]]
        return any(limits["bf16"] > 1.5 * limits["f32"] for limits in every)

    def weight_bytes(self, case: str) -> float:
        """The bytes of Penstock's weights."""
        engines = self.data["engines"]
        about = engines.get(f"{case}/penstock") or engines.get(f"{case}/penstock-bf16") or {}
        return float(about.get("weight_bytes") or 0)

    def _limit_of(self, case: str, row: str, limits: dict[str, float]) -> float | None:
        """The rate at these limits of the machine: the slower of bytes and operations."""
        if row in LESS_IS_BETTER or not self.weight_bytes(case):
            return None
        shape = SHAPES[MODELS.get(case, "half-billion")]
        kind, _, number = row.partition("-")
        bytes_, tokens, outputs = self.weight_bytes(case), PREFILL, 1
        if kind != "prefill":
            tokens = outputs = 1 if number == "8k" else int(number)
        if number == "8k":
            heads = shape.kv_width // 64
            bytes_ += LONG * shape.kv_layers * 2 * (shape.kv_width + 4 * heads)
        operations = 2 * (shape.layers * tokens + shape.head * outputs)
        reading = bytes_ / limits["read"] if kind != "streams" else 0
        return tokens / max(reading, operations / limits[WEIGHTS[case]])

    def limit(self, case: str, row: str) -> float | None:
        """The median limit over all turns."""
        every = [limit for limits in self._limits.get((case, row), {}).values() for limit in limits]
        return statistics.median(every) if every else None

    def share(self, case: str, row: str, engine: str) -> float | None:
        """The median share of the limit that was measured around each turn."""
        limits = self._limits.get((case, row), {}).get(engine)
        values = self.values[case, row].get(engine)
        if not limits or not values:
            return None
        return statistics.median(value / limit for value, limit in zip(values.values(), limits, strict=True))

    def best(self, case: str, row: str, *, is_own: bool) -> str | None:
        """The best engine of a row: of Penstock's variants, or of the others."""
        engines = self.values[case, row]
        medians = {
            name: statistics.median(rounds.values())
            for name, rounds in engines.items()
            if name.startswith("penstock") == is_own
        }
        if not medians:
            return None
        select = min if row in LESS_IS_BETTER else max
        return select(medians, key=lambda name: medians[name])

    def ratio(self, case: str, row: str, one: str | None, other: str | None) -> list[float]:
        """The factor by which `one` is better than `other`, in each round with both."""
        engines = self.values[case, row]
        if one is None or other not in engines:
            return []
        pairs = [
            (engines[one][number], value)
            for number, value in engines[other].items()
            if number in engines[one]
        ]
        return [b / a if row in LESS_IS_BETTER else a / b for a, b in pairs]


def number(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004


def spread(values: list[float], unit: str = "") -> str:
    """Median and range."""
    if not values:
        return "-"
    text = number(statistics.median(values)) + unit
    return text if len(values) == 1 else f"{text} ({number(min(values))} to {number(max(values))})"


def goals_table(record: Record) -> list[str]:
    """The goals, and how far they are reached."""
    heads = (
        "row | goal | limit | Penstock | of the limit | best other engine | ratio | to llama.cpp | reached"
    )
    lines = [f"| {heads} |", "|---" * 9 + "|"]
    goals = (AVX512 if record.has_dots() else AVX2) | COMMON
    for row, goal in goals.items():
        key = tuple(row.split("/"))
        own = record.best(*key, is_own=True) if key in record.values else None
        if own is None:
            continue
        values = record.values[key][own]
        median = statistics.median(values.values())
        limit, share = record.limit(*key), record.share(*key, own)
        other = record.best(*key, is_own=False)
        ratios, llama = record.ratio(*key, own, other), record.ratio(*key, own, "llama.cpp")
        checks, texts = [], []
        if goal.share and share:
            texts.append(f"{goal.share:.0%}")
            checks.append(share >= goal.share)
        if goal.best:
            texts.append(f"{goal.best} x best")
            checks.append(bool(ratios) and statistics.median(ratios) >= goal.best)
        if goal.llama:
            texts.append(f"{goal.llama} x llama.cpp")
            checks.append(bool(llama) and statistics.median(llama) >= goal.llama)
        if goal.value:
            is_less = key[1] in LESS_IS_BETTER
            texts.append(f"{'<=' if is_less else '>='} {number(goal.value)}")
            checks.append(median <= goal.value if is_less else median >= goal.value)
        cells = [
            row,
            ", ".join(texts),
            number(limit) if limit else "-",
            f"{spread(list(values.values()))}{'' if own == 'penstock' else ' (' + own + ')'}",
            f"{share:.0%}" if share else "-",
            f"{other}: {spread(list(record.values[key][other].values()))}" if other else "-",
            spread(ratios),
            spread(llama),
            "yes" if all(checks) else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def rows_table(record: Record, case: str) -> list[str]:
    """All results of a case: a line per row, a column per engine."""
    keys = [key for key in record.values if key[0] == case]
    engines = list(dict.fromkeys(engine for key in keys for engine in record.values[key]))
    lines = [f"| row | limit | {' | '.join(engines)} |", "|---" * (len(engines) + 2) + "|"]
    for key in keys:
        limit = record.limit(*key)
        cells = [
            f"{key[1]}{', ' + UNITS[key[1]] if key[1] in UNITS else ''}",
            number(limit) if limit else "-",
        ]
        for engine in engines:
            values = list(record.values[key].get(engine, {}).values())
            share = record.share(*key, engine)
            cells.append(spread(values) + (f", {share:.0%}" if share else ""))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def limits_table(record: Record) -> list[str]:
    """The limits of the machine at the start of the run."""
    lines = [
        "| threads | read, GB/s | f32, GFLOP/s | bf16 | int8, GOP/s | int4 |",
        "|---|---|---|---|---|---|",
    ]
    for limits in record.data.get("limits", []):
        rates = [limits[key] / 1e9 for key in ("read", "f32", "bf16", "int8", "int4")]
        lines.append(f"| {limits['threads']} | {' | '.join(number(rate) for rate in rates)} |")
    return lines


def kernels_table(record: Record) -> list[str]:
    """The kernels: a line per matrix and format."""
    lines = ["| kernel | 1 token | 8 | 32 | 512 |", "|---|---|---|---|---|"]
    rows: dict[str, list[str]] = {}
    for entry in record.data["kernels"]:
        name, tokens, _ = entry["kernel"].removeprefix("matmul ").rsplit(" ", 2)
        rate = f"{entry['gb_s']:.1f} GB/s" if tokens == "1" else f"{number(entry['gop_s'])} GOP/s"
        rows.setdefault(name, []).append(f"{rate}, {entry['share']:.0%}")
    return lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]


def write_table(record: Record, file: Path) -> None:
    """Write the Markdown file."""
    data = record.data
    dates = [entry["date"] for entry in data["measurements"]]
    versions = ", ".join(f"{engine} {version}" for engine, version in sorted(data["versions"].items()))
    cases = list(dict.fromkeys(case for case, _ in record.values))
    machine = f"{data['cpu']}, {data['threads']} threads, {min(dates)} to {max(dates)} UTC. {versions}."
    parts = ["# Results of the benchmark suite", machine, EXPLANATION]
    parts += ["## Goals", "\n".join(goals_table(record))]
    parts += ["## Limits of the machine", "\n".join(limits_table(record))]
    for case in cases:
        parts += [f"## {case}: all rows", "\n".join(rows_table(record, case))]
    if data["kernels"]:
        isa = f"Instruction set: {data['kernels'][0]['isa']}."
        parts += ["## Kernels, with their share of the limit", KERNELS, isa, "\n".join(kernels_table(record))]
    file.write_text("\n\n".join(parts) + "\n")


def plot(record: Record, file: Path) -> None:
    """Bars: every engine as a share of the limit."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "penstock"
    import matplotlib.pyplot as plt

    cases = [case for case in ("bf16", "int8", "int4") if any(key[0] == case for key in record.values)]
    figure, axes = plt.subplots(
        1, max(1, len(cases)), figsize=(5 * len(cases), 6), squeeze=False, sharex=True
    )
    every = list(dict.fromkeys(engine for engines in record.values.values() for engine in engines))
    colors = dict(zip(every, plt.get_cmap("tab10").colors, strict=False))
    for axis, case in zip(axes[0], cases, strict=True):
        rows = [key for key in record.values if key[0] == case and record.limit(*key)]
        engines = list(dict.fromkeys(engine for key in rows for engine in record.values[key]))
        height = 0.8 / max(1, len(engines))
        for index, engine in enumerate(engines):
            places = [place for place, key in enumerate(rows) if engine in record.values[key]]
            shares = [100 * (record.share(*rows[place], engine) or 0) for place in places]
            offsets = [place + (index - (len(engines) - 1) / 2) * height for place in places]
            axis.barh(offsets, shares, height, label=engine, color=colors[engine])
        axis.set_yticks(range(len(rows)), [row for _, row in rows])
        axis.invert_yaxis()
        axis.set_xlabel("% of the limit")
        axis.set_title(case)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Write both."""
    source = Path(sys.argv[1])
    record = Record(source)
    write_table(record, source.with_suffix(".md"))
    try:
        plot(record, source.with_suffix(".svg"))
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
    print(source.with_suffix(".md"))


if __name__ == "__main__":
    main()
