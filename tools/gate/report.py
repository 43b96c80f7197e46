"""Where the time of the last run went: its steps, the folders and files of tests, and the slowest tests."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from steps import REPORTS, STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Lines of each list of files and tests.
LONGEST = 30


def cases(path: Path) -> Iterator[tuple[str, str, float]]:
    """The file, the name and the seconds of each test in a JUnit report of pytest or nextest."""
    for case in ET.parse(path).iter("testcase"):  # noqa: S314 - our own report
        yield case.get("classname", ""), case.get("name", ""), float(case.get("time", 0))


def lines() -> Iterator[str]:
    """The report."""
    if not STEPS.exists():
        yield "no run is recorded: `make test` records one"
        return
    content = json.loads(STEPS.read_text())
    yield f"{'step':24} {'start':>7} {'minutes':>8} {'cpu min':>8} {'cores':>6}"
    total = cpu = 0.0
    for step in content["steps"]:
        total, cpu = total + step["seconds"], cpu + step["cpu_seconds"]
        busy = step["cpu_seconds"] / max(step["seconds"], 0.001)
        yield (
            f"{step['name']:24} {step['started'] / 60:7.1f} {step['seconds'] / 60:8.2f} "
            f"{step['cpu_seconds'] / 60:8.2f} {busy:6.2f}{'  FAILED' if step['status'] else ''}"
        )
    share = cpu / max(total, 0.001)
    yield f"{'all':24} {'':7} {total / 60:8.2f} {cpu / 60:8.2f} {share:6.2f} of {content['cores']}"
    for path in sorted(REPORTS.glob("*.xml")):
        yield from of_tests(path)
    for path in sorted(REPORTS.glob("*.txt")):
        yield from of_cargo(path)


def of_cargo(path: Path) -> Iterator[str]:
    """The part of the report for the output of cargo test, which has times of whole binaries."""
    yield f"\n{path.stem + ': binary':56} {'tests':>6} {'seconds':>8}"
    pattern = r"Running (.*) \(.*\)|test result: .* (\d+) passed.* finished in ([\d.]+)s"
    binary = ""
    for name, passed, seconds in re.findall(pattern, path.read_text()):
        binary = name or binary
        if passed:
            yield f"{binary:56} {passed:>6} {float(seconds):8.1f}"


def of_tests(path: Path) -> Iterator[str]:
    """The part of the report for a JUnit report."""
    found = list(cases(path))
    files: dict[str, list[float]] = defaultdict(list)
    areas: dict[str, list[float]] = defaultdict(list)
    for file, _, seconds in found:
        files[file].append(seconds)
        areas[".".join(file.split(".")[:2])].append(seconds)
    for title, groups in (("area", areas), ("file", files)):
        yield f"\n{path.stem + ': ' + title:56} {'tests':>6} {'seconds':>8}"
        for name, times in sorted(groups.items(), key=lambda item: -sum(item[1]))[:LONGEST]:
            yield f"{name:56} {len(times):6} {sum(times):8.1f}"
    yield f"\n{path.stem + ': slowest tests':100} {'seconds':>8}"
    for file, name, seconds in sorted(found, key=lambda case: -case[2])[:LONGEST]:
        yield f"{(file + ' ' + name)[:100]:100} {seconds:8.1f}"
