"""The last output of the measuring plan: what the figures decide, beside the predictions."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from plan_rows import Figure, number, pattern_of, prediction_of, tables

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The most lines, and the most characters of a line.
LINES, WIDTH = 60, 165
#: A figure, of which two are in a line: its name, the median, the spread, the prediction and the ratio.
CELL = "{:46} {:>12} {:>5} {:>7} {:>5}"
#: Shorter words of names.
WORDS = {
    "bfloat16": "bf16",
    "_warpgroup": "_wg",
    "all multiprocessors": "all SMs",
    "second-level cache": "L2",
    "no dependent launch": "plain",
    "launched after the wait": "late",
    "launched at the start": "early",
    "algorithms that differ from one chain": "differing algorithms",
}
#: Of more figures with one prediction, the worst is in the summary.
MOST = 3


@dataclass(frozen=True)
class Compared:
    """A figure beside its prediction."""

    figure: Figure
    value: float
    predicted: float
    before: float | None
    bound: str

    @classmethod
    def of(cls, figure: Figure) -> Compared | None:
        """None, if there is no figure, or no prediction for the card."""
        prediction = prediction_of(figure)
        if figure.value is None or prediction is None or prediction.value is None:
            return None
        return cls(figure, figure.value, prediction.value, prediction.before, prediction.bound)

    def is_true(self, rule: str, tolerance: float) -> bool:
        """Whether the figure follows a rule of `predictions.toml`."""
        allowed = tolerance * abs(self.predicted)
        if rule == "zero":
            return self.value == 0
        if rule == "met" and self.bound == "least":
            return self.value >= self.predicted - allowed
        if rule == "met":
            return self.value <= self.predicted + allowed
        return abs(self.value - self.predicted) <= allowed

    @property
    def distance(self) -> float:
        """The distance of a figure to the wrong side of its prediction, or from it."""
        distance = (self.value - self.predicted) / (abs(self.predicted) or 1)
        return {"most": distance, "least": -distance}.get(self.bound, abs(distance))

    def cell(self, count: int) -> str:
        """The figure, which may be the worst of several."""
        name = self.figure.key
        for word, short in WORDS.items():
            name = name.replace(word, short)
        ends = sorted(self.figure.samples)
        spread = (ends[-1] - ends[0]) / 2 / abs(self.value) if self.value else 0
        name = f"{name[: 46 - len(f' ({count})')]} ({count})" if count > 1 else name[:46]
        return CELL.format(
            name,
            f"{number(self.value)} {self.figure.unit}".strip()[:12],
            f"{min(spread, 9.99):.0%}" if spread else "",
            number(self.predicted)[:7],
            f"{self.value / self.predicted:.2f}"[:5] if self.predicted else "",
        )


def cells(figures: Iterable[Figure]) -> list[str]:
    """The figures with predictions, those that say that nothing differs left out."""
    groups: dict[str, list[Compared]] = {}
    for figure in figures:
        found = Compared.of(figure)
        if found is not None and (found.predicted or found.value):
            groups.setdefault(pattern_of(figure), []).append(found)
    shown: list[str] = []
    for group in sorted(groups.values(), key=lambda group: group[0].predicted == 0):
        if len(group) > MOST:
            shown.append(max(group, key=lambda found: found.distance).cell(len(group)))
        else:
            shown += [found.cell(1) for found in group]
    return shown


def judge(decision: dict[str, Any], figures: Iterable[Figure]) -> str:
    """The line of a decision."""
    rows = [figure for figure in figures if fnmatchcase(figure.key, decision["rows"])]
    compared = [found for figure in rows if (found := Compared.of(figure))]
    verdicts = [found.is_true(decision["rule"], decision.get("tolerance", 0.0)) for found in compared]
    question = decision["question"]
    if not verdicts:
        known = "no prediction for this card" if any(row.samples for row in rows) else "not measured"
        return f"OPEN {question}: {next((row.note for row in rows if row.note), known)}"
    count = f"{sum(verdicts)} of {len(verdicts)}"
    answer, then = ("YES ", decision["yes"]) if all(verdicts) else ("NO  ", decision["no"])
    return f"{answer} {question} ({count}): {then}"


def summary(head: list[str], outcomes: dict[str, str], figures: list[Figure], lines: int = LINES) -> str:
    """The sections that ran, the decisions, and as many figures with predictions as there are lines for."""
    complete = [name for name, outcome in outcomes.items() if outcome == "complete"]
    text = [*head, f"complete: {', '.join(complete) or 'nothing'}"]
    text += [f"NOT COMPLETE: {name}: {outcome}" for name, outcome in outcomes.items() if name not in complete]
    text += [judge(decision, figures) for decision in tables()["decision"]]
    found = cells(figures)
    text.append(" | ".join([CELL.format("figure (worst of)", "median", "+-", "predict", "ratio")] * 2))
    room = 2 * (lines - len(text) - 1)
    shown = found[:room]
    half = (len(shown) + 1) // 2
    text += [" | ".join(filter(None, pair)) for pair in zip_longest(shown[:half], shown[half:])]
    rest = f"{len(figures)} figures in plan.jsonl"
    if len(found) > room:
        rest += f", {len(found) - room} more of them with predictions"
    if missing := [figure for figure in figures if figure.value is None]:
        rest += f", {len(missing)} skipped or failed, such as {missing[0].key}: {missing[0].note}"
    return "\n".join(line[:WIDTH] for line in [*text, rest])
