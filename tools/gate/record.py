"""Writes the seconds of tests, for the order of files and the division of rare tests into shares."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from steps import REPORTS, ROOT, STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD = ROOT / "tests" / "data" / "seconds.json"
#: The rare tests of a file whose seconds are more than this are divided by function.
DIVIDED = 60.0


def cases() -> Iterator[tuple[str, str, str | None, float]]:
    """The file, the function, the unit if it is rare, and the seconds of each test in pytest's reports."""
    for path in sorted(REPORTS.glob("python*.xml")):
        for case in ET.parse(path).iter("testcase"):  # noqa: S314 - our own report
            file = case.get("classname", "").removeprefix("tests.").replace(".", "/") + ".py"
            function = case.get("name", "").partition("[")[0]
            units = [each.get("value") for each in case.iter("property") if each.get("name") == "rare"]
            yield file, function, next(iter(units), None), float(case.get("time", 0))


def write() -> None:
    """Replace the seconds of the files and units that the reports have; keep those of others."""
    known = json.loads(RECORD.read_text())
    own: dict[str, float] = defaultdict(float)
    rare: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for file, function, unit, seconds in cases():
        if unit is None:
            own[file] += seconds
        else:
            rare[file][function] += seconds
    units = {name: seconds for name, seconds in known["rare"].items() if name.partition("::")[0] not in rare}
    for file, functions in rare.items():
        total = sum(functions.values())
        if total > DIVIDED:
            units |= {f"{file}::{function}": seconds for function, seconds in functions.items()}
        else:
            units[file] = total
    # Units that are targets have their steps.
    for step in json.loads(STEPS.read_text())["steps"]:
        if step["name"] in known["targets"]:
            known["targets"][step["name"]] = round(step["seconds"], 1)
    content = {
        "own": _rounded(known["own"] | own),
        "rare": _rounded(units),
        "targets": known["targets"],
    }
    RECORD.write_text(json.dumps(content, indent=1) + "\n")


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds with one decimal, by name."""
    return {name: round(value, 1) for name, value in sorted(seconds.items())}
