"""Steps of the gate: targets of the Makefile, one after the other, with their times."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "target" / "reports"
STEPS = REPORTS / "steps.json"


@dataclass(frozen=True)
class Step:
    """A target of the Makefile with values of its variables."""

    target: str
    variables: tuple[str, ...] = ()
    seconds: float | None = None  # the limit, if it has one
    beside: str | None = None  # a target that runs at the same time; its output comes at its end

    @property
    def name(self) -> str:
        """The target, the report that it writes if it is not the usual one, and the target beside it."""
        reports = [value for value in self.variables if value.startswith("REPORT=")]
        return " ".join([self.target, *reports, *(["and", self.beside] if self.beside else [])])

    @property
    def command(self) -> str:
        """The commands that repeat the step."""
        commands = [["make", self.target, *self.variables], *([["make", self.beside]] if self.beside else [])]
        return " & ".join(map(shlex.join, commands))


@dataclass(frozen=True)
class Ended:
    """A step that has ended: its name, start, length, processor time and exit status."""

    name: str
    started: float  # seconds since the start of the run
    seconds: float
    cpu_seconds: float
    status: int


def cpu_seconds() -> float:
    """The processor time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_step(step: Step, begin: float) -> Ended:
    """Run a target of the Makefile; its output is that of this process."""
    started, used = time.monotonic(), cpu_seconds()
    minutes = (started - begin) / 60
    print(f"\n==== {time.strftime('%H:%M:%S')} +{minutes:.1f} min: {step.name}", flush=True)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(make, step.beside, stdout=PIPE, stderr=STDOUT) if step.beside else None
        status = make(step.target, *step.variables).returncode
        if other is not None:
            print(f"---- {step.beside}\n{other.result().stdout.decode(errors='replace')}", flush=True)
            status = status or other.result().returncode
    ended = time.monotonic()
    return Ended(step.name, started - begin, ended - started, cpu_seconds() - used, status)


def make(target: str, *variables: str, **streams: int) -> subprocess.CompletedProcess[bytes]:
    """Run a target of the Makefile to its end."""
    command = ["make", "--no-print-directory", target, *variables]
    return subprocess.run(command, cwd=ROOT, check=False, **streams)  # type: ignore[call-overload, no-any-return]


def run(steps: Iterable[Step]) -> None:
    """Run steps until one fails, and end the process if one does."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    for report in [*REPORTS.glob("*.xml"), *REPORTS.glob("*.txt")]:
        report.unlink()
    begin = time.monotonic()
    ended: list[Ended] = []
    for step in steps:
        end = run_step(step, begin)
        ended.append(end)
        content = {"cores": os.cpu_count(), "steps": [asdict(each) for each in ended]}
        STEPS.write_text(json.dumps(content, indent=1))
        if end.status:
            sys.exit(f"{end.name} has failed; it is repeated by: {step.command}")
        if step.seconds is not None and end.seconds > step.seconds:
            print(f"{end.name} took {end.seconds:.0f} s, more than {step.seconds:.0f} s", flush=True)
