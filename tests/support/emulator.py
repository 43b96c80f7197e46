"""Scenarios of the emulated CUDA driver, each in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from emu import build

if TYPE_CHECKING:
    from pathlib import Path

PLANTS = build.HERE / "plants"


@functools.cache
def plants(*, checked: bool) -> Path:
    """The library of the emulator's own kernels."""
    return build.build_library("plants", sorted(PLANTS.glob("*.cu")), instrumented=checked)


@functools.cache
def driver() -> Path:
    """The emulated libcuda.so.1."""
    return build.build_driver()


@dataclass(frozen=True)
class Outcome:
    """The end of a scenario."""

    result: Any
    error: list[Any] | None  # the call of the driver that has failed, and the code
    findings: list[str]


def start(
    scenario: str, *arguments: str, checked: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a scenario to its end, with plain or with checked kernels."""
    command = [sys.executable, "-X", "faulthandler", "-m", "emu.scenarios", scenario, *arguments]
    settings = {
        "EMU": "1",
        "EMU_LIBRARY": str(driver()),
        "EMU_KERNELS": str(plants(checked=checked)),
        "PYTHONPATH": str(build.HERE.parent),
        "PATH": os.environ["PATH"],
    }
    return subprocess.run(
        command, env=settings | environment, capture_output=True, text=True, timeout=60, check=False
    )


def run(scenario: str, *arguments: str, checked: bool = False, **environment: str) -> Outcome:
    """The outcome of a scenario that does not crash."""
    done = start(scenario, *arguments, checked=checked, **environment)
    assert done.returncode == 0, done.stderr
    return Outcome(**json.loads(done.stdout))
