"""Steps of the gate: targets of the Makefile, one after the other, with their times."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "target" / "reports"
STEPS = REPORTS / "steps.json"

#: All steps, in the order of a run.
ALL = (
    "lint-format",
    "lint-rust",
    "build",
    "lint-python",
    "test-rust",
    "test-engine",
    "test-loom",
    "test-rust-doc",
    "test-python-all",
)


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


def run_step(name: str, begin: float) -> Ended:
    """Run a target of the Makefile; its output is that of this process."""
    started, used = time.monotonic(), cpu_seconds()
    minutes = (started - begin) / 60
    print(f"\n==== {time.strftime('%H:%M:%S')} +{minutes:.1f} min: {name}", flush=True)
    done = subprocess.run(["make", "--no-print-directory", name], cwd=ROOT, check=False)  # noqa: S603, S607
    ended = time.monotonic()
    return Ended(name, started - begin, ended - started, cpu_seconds() - used, done.returncode)


def run(names: Iterable[str]) -> None:
    """Run steps until one fails."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    ended: list[Ended] = []
    for name in names:
        ended.append(run_step(name, begin))
        content = {"cores": os.cpu_count(), "steps": [asdict(step) for step in ended]}
        STEPS.write_text(json.dumps(content, indent=1))
        if ended[-1].status:
            sys.exit(f"step {name} has failed: `make {name}` repeats it")
