"""The figures of the measuring plan, and the predictions that they are compared with."""

from __future__ import annotations

import json
import os
import statistics
import time
import tomllib
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from rows import Row, Rows

PREDICTIONS = Path(__file__).parent / "predictions.toml"
#: Whether the device is that of the tests.
IS_EMULATED = os.environ.get("EMU") == "1"


@dataclass(frozen=True)
class Figure:
    """A figure of a section: the median of its samples. Without samples, the note has the reason."""

    section: str
    name: str
    unit: str = ""
    samples: list[float] = field(default_factory=list)
    note: str = ""
    details: Any = None
    device: str = ""

    @property
    def key(self) -> str:
        """The name for patterns."""
        return f"{self.section}: {self.name}"

    @property
    def value(self) -> float | None:
        """The median."""
        return statistics.median(self.samples) if self.samples else None


@dataclass(frozen=True)
class Prediction:
    """The prediction for a figure."""

    value: float | None  # none for this card
    before: float | None
    bound: str


@cache
def tables() -> dict[str, Any]:
    """The content of the file of predictions."""
    return tomllib.loads(PREDICTIONS.read_text())


def prediction_of(figure: Figure) -> Prediction | None:
    """The prediction of a figure, for its card."""
    card = "h200" if "H200" in figure.device else "h100"
    for entry in tables()["figure"]:
        if fnmatchcase(figure.key, entry["rows"]):
            return Prediction(
                entry.get(card, entry.get("predicted")), entry.get("before"), entry.get("bound", "")
            )
    return None


def pattern_of(figure: Figure) -> str:
    """The pattern of a figure's prediction."""
    return next((e["rows"] for e in tables()["figure"] if fnmatchcase(figure.key, e["rows"])), "")


def number(value: float) -> str:
    """A number with 3 to 4 digits, or all digits of a large one."""
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"  # noqa: PLR2004


def shown(figure: Figure) -> str:
    """A figure with its spread, and what was predicted."""
    if figure.value is None:
        return f"{figure.name}: {figure.note}"
    ends = sorted(figure.samples)
    spread = f" ({number(ends[0])} to {number(ends[-1])})" if ends[0] != ends[-1] else ""
    parts = [f"{figure.name}: {number(figure.value)} {figure.unit}".rstrip() + spread]
    prediction = prediction_of(figure)
    if prediction is not None and prediction.value is not None:
        ratio = f", {figure.value / prediction.value:.2f} x" if prediction.value else ""
        parts.append(f"predicted {number(prediction.value)}{ratio}")
    if prediction is not None and prediction.before is not None:
        parts.append(f"before {number(prediction.before)}")
    return "; ".join([*parts, *([figure.note] if figure.note else [])])


class Figures(Rows):
    """The file that all sections append their figures to: a line for each, written at once."""

    def __init__(self, path: Path, section: str, device: str = "") -> None:
        super().__init__(path)
        self.path, self.section, self.device = path, section, device
        #: Of the figures of this process, by name.
        self.medians: dict[str, float] = {}

    def figure(
        self, name: str, samples: list[float], unit: str, note: str = "", details: object = None
    ) -> None:
        """Append a figure."""
        self._append(Figure(self.section, name, unit, samples, note, details, self.device))

    def _append(self, figure: Figure) -> None:
        prediction = prediction_of(figure)
        line = asdict(figure) | {"median": figure.value, "time": time.time()}
        line["predicted"] = prediction.value if prediction else None
        # A process that was ended may have left the beginning of a line.
        is_cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            file.write("\n" * is_cut + json.dumps(line) + "\n")
        if figure.value is not None:
            self.medians[figure.name] = figure.value
        print(f"  {shown(figure)}", flush=True)

    def skipped(self, name: str, reason: str) -> None:
        """Append the reason why there is no figure."""
        self.figure(name, [], "", f"skipped: {reason}")

    def add(self, row: Row) -> None:
        """Append a measurement: tokens per second, or microseconds. Its name may begin with a section."""
        section, _, name = row.name.rpartition(": ")
        unit, samples = "us", [1e6 * seconds for seconds in row.seconds]
        if row.tokens:
            unit, samples = "tok/s", [row.tokens / seconds for seconds in row.seconds]
        self._append(Figure(section or self.section, name, unit, samples, device=self.device))


def read(path: Path) -> list[Figure]:
    """The figures of a file. A line that is not complete, of a process that was ended, is left out."""
    names = Figure.__dataclass_fields__.keys()
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        found.append(Figure(**{name: values[name] for name in names}))
    return found
