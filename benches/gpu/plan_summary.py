"""The last output of the measuring plan: what the figures decide, beside the predictions."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from plan_rows import Figure, number, prediction_of, tables

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The most lines, and the most characters of a line.
LINES, WIDTH = 60, 160
COLUMNS = "{:66} {:>14} {:>18} {:>9} {:>6} {:>8}"


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
    def line(self) -> str:
        """The figure, its spread, the prediction, the ratio, and the figure of older kernels."""
        ends = sorted(self.figure.samples)
        return COLUMNS.format(
            self.figure.key[:66],
            f"{number(self.value)} {self.figure.unit}",
            f"{number(ends[0])}..{number(ends[-1])}" if ends[0] != ends[-1] else "",
            number(self.predicted),
            f"{self.value / self.predicted:.2f}" if self.predicted else "",
            number(self.before) if self.before is not None else "",
        ).rstrip()


def judge(decision: dict[str, Any], figures: Iterable[Figure]) -> str:
    """The line of a decision."""
    rows = [figure for figure in figures if fnmatchcase(figure.key, decision["rows"])]
    compared = [found for figure in rows if (found := Compared.of(figure))]
    verdicts = [found.is_true(decision["rule"], decision.get("tolerance", 0.0)) for found in compared]
    question = decision["question"]
    if not verdicts:
        return f"OPEN {question}: {next((row.note for row in rows if row.note), 'not measured')}"
    count = f"{sum(verdicts)} of {len(verdicts)}"
    answer, then = ("YES ", decision["yes"]) if all(verdicts) else ("NO  ", decision["no"])
    return f"{answer} {question} ({count}): {then}"


def summary(head: list[str], outcomes: dict[str, str], figures: list[Figure], lines: int = LINES) -> str:
    """What has run, the decisions, and as many figures with predictions as there are lines for."""
    complete = [name for name, outcome in outcomes.items() if outcome == "complete"]
    text = [*head, f"complete: {', '.join(complete) or 'nothing'}"]
    text += [f"NOT COMPLETE: {name}: {outcome}" for name, outcome in outcomes.items() if name not in complete]
    text += [judge(decision, figures) for decision in tables()["decision"]]
    # That there is no difference is in the decisions.
    compared = [
        found
        for figure in figures
        if (found := Compared.of(figure)) and (found.predicted != 0 or found.value != 0)
    ]
    compared.sort(key=lambda found: found.predicted == 0)
    text.append(COLUMNS.format("figure", "median", "spread", "predicted", "ratio", "before"))
    room = lines - len(text) - 1
    text += [found.line for found in compared[:room]]
    rest = f"{len(figures)} figures in plan.jsonl"
    if len(compared) > room:
        rest += f", {len(compared) - room} more of them with predictions"
    if missing := [figure for figure in figures if figure.value is None]:
        rest += f", {len(missing)} skipped or failed, such as {missing[0].key}: {missing[0].note}"
    return "\n".join(line[:WIDTH] for line in [*text, rest])
