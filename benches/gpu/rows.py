"""Measurements, and the limits that they are compared with."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


#: Times from here on are in seconds.
LONG = 0.05


@dataclass(frozen=True)
class Row:
    """A measurement: samples of the time of an operation, and the least work that it has to do."""

    name: str
    seconds: list[float]
    #: Tokens of the operation; without, the row is a time.
    tokens: float = 0
    bytes: float = 0
    flops: float = 0
    #: Bytes and operations follow each other; they are at the same time otherwise.
    serial: bool = False
    goal: str = ""

    @property
    def median(self) -> float:
        """The median of the times."""
        return statistics.median(self.seconds)

    def limit(self, limits: dict[str, float]) -> float | None:
        """The least time, with the device's bytes and operations per second."""
        if not limits or not (self.bytes or self.flops):
            return None
        times = self.bytes / limits["bandwidth"], self.flops / limits["flops"]
        return sum(times) if self.serial else max(times)


class Rows:
    """The file that a section appends its rows to, so that those of a section without time are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, row: Row) -> None:
        """Append a row."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(f"  {row.name}: {shown(row, row.median)}", flush=True)

    def read(self) -> list[Row]:
        """All rows."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [Row(**json.loads(line)) for line in lines]


def shown(row: Row, seconds: float) -> str:
    """A time of a row in its unit."""
    if row.tokens:
        return f"{row.tokens / seconds:.1f} tok/s"
    return f"{seconds:.2f} s" if seconds >= LONG else f"{1e6 * seconds:.1f} us"


def costs(rows: list[Row], varying: list[Row]) -> list[str]:
    """The cost of deterministic=True: times of rows in comparison with those of the same work without it."""
    without = {row.name.rpartition(": ")[2]: row.median for row in varying}
    named = ((row, row.name.rpartition(": ")[2]) for row in rows)
    return [
        f"- deterministic=True, {name}: {row.median / without[name] - 1:+.1%} (goal: at most +5 %)"
        for row, name in named
        if name in without and row.tokens
    ]


def table(rows: list[Row], limits: dict[str, float], torch: dict[str, Row]) -> str:
    """The rows as a table of Markdown."""
    lines = [
        "| measurement | median | lowest to highest | limit | share | torch | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        # The highest rate has the shortest time.
        ends = sorted(row.seconds, reverse=bool(row.tokens))
        limit, other = row.limit(limits), torch.get(row.name)
        cells = [
            row.name,
            shown(row, row.median),
            f"{shown(row, ends[0])} to {shown(row, ends[-1])}" if len(row.seconds) > 1 else "",
            shown(row, limit) if limit else "",
            f"{limit / row.median:.0%}" if limit else "",
            shown(row, other.median) if other else "",
            row.goal,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
