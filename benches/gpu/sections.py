"""Sections of a benchmark: processes with limits of time, and the emulated device."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shapes import REPOSITORY, Shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Seconds that a process has to end after it was killed. One that the driver holds may never end.
KILLED = 10


@dataclass(frozen=True)
class Section:
    """A command with a limit of time."""

    name: str
    command: Sequence[str]
    seconds: float


def run_process(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a program with all processes that it starts, until its limit of time; the outcome."""
    # A group of its own: a profiler starts the program that it measures.
    process = subprocess.Popen(  # noqa: S603 - a section
        command, env=os.environ | (environment or {}), start_new_session=True
    )
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        end_group(process)
        try:
            process.wait(KILLED)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s, and does not end"
        return f"stopped after {seconds:.0f} s"
    except BaseException:  # such as the end of this program
        end_group(process)
        raise
    return "complete" if status == 0 else f"failed with status {status}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_sections(sections: Iterable[Section], minutes: float) -> dict[str, str]:
    """Run sections one after the other; the outcome of each."""
    deadline = time.monotonic() + 60 * minutes
    outcomes = {}
    for section in sections:
        start = time.monotonic()
        seconds = min(section.seconds, deadline - start)
        if seconds <= 0:
            outcomes[section.name] = "not started: no time was left"
            continue
        print(f"{section.name}:", flush=True)
        outcomes[section.name] = run_process(section.command, seconds)
        print(f"  {outcomes[section.name]}, {time.monotonic() - start:.0f} s", flush=True)
    return outcomes


def write_models(folder: Path, shapes: Mapping[str, Shape]) -> None:
    """Write checkpoints of random weights, each to a folder of its name."""
    start = time.perf_counter()
    for name, shape in shapes.items():
        shape.write(folder / name)
    print(f"wrote the models in {time.perf_counter() - start:.0f} s", flush=True)


@contextlib.contextmanager
def fast_folder() -> Iterator[Path]:
    """A temporary folder, in memory if there is room for the model."""
    fast = Path("/dev/shm")  # noqa: S108
    has_room = fast.is_dir() and shutil.disk_usage(fast).free > 40 << 30
    with tempfile.TemporaryDirectory(dir=fast if has_room else None) as name:
        yield Path(name)


def emulate(**settings: str) -> None:
    """Start this program again with the emulated driver."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from support.kernels import emulator

    arguments = [argument for argument in sys.argv if argument != "--emulated"]
    environment = os.environ | emulator.emulation() | settings
    os.execve(sys.executable, [sys.executable, *arguments], environment)  # noqa: S606
