"""Processes of engines, which outlive a crash of the runtime."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["EngineProcess", "end_rest", "start_time_of"]

#: Fields of `/proc/PID/stat` after the name.
_STATE, _SESSION, _START_TIME = 0, 3, 19


def _stat(pid: int) -> list[str] | None:
    with suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()
        )
    return None


def start_time_of(pid: int) -> int | None:
    """The time at which a process started; nothing if it has ended."""
    fields = _stat(pid)
    if fields is None or fields[_STATE] in "ZX":
        return None
    return int(fields[_START_TIME])


def end_rest(pid: int, start_time: int) -> None:
    """End the group of an engine that has ended itself. Its id is not used again while it has processes."""
    if pid <= 0 or start_time_of(pid) is not None:
        return
    for name in (path.name for path in Path("/proc").iterdir()):
        fields = _stat(int(name)) if name.isdecimal() else None
        if fields is None or fields[_STATE] in "ZX" or int(fields[_SESSION]) != pid:
            continue
        if int(fields[_START_TIME]) >= start_time:  # not of a session before the system started again
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            return


class EngineProcess:
    """A process and its group, started by this runtime or by one before it."""

    def __init__(self, pid: int, start_time: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.start_time = start_time
        self._child = child

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> EngineProcess:
        """Start a process. Its log goes to that of the runtime."""
        child = subprocess.Popen(  # noqa: S603 - the command is the operator's, its flags are checked
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
        return cls(child.pid, start_time_of(child.pid) or 0, child)

    @classmethod
    def adopt(cls, pid: int, start_time: int) -> EngineProcess | None:
        """The process of an earlier runtime, if it is the same one and alive."""
        return cls(pid, start_time) if pid > 0 and start_time_of(pid) == start_time else None

    def is_alive(self) -> bool:
        """Whether it runs; the system removes a child that has ended."""
        if self._child is not None:
            return self._child.poll() is None
        return start_time_of(self.pid) == self.start_time

    @property
    def status(self) -> int | None:
        """The exit status of a child that has ended, or the negative number of the signal that ended it."""
        return None if self._child is None else self._child.poll()

    def wait(self) -> None:
        """Wait for the end of a child that was killed, so that the system removes it."""
        if self._child is not None:
            self._child.wait()

    def signal(self, *, force: bool) -> None:
        """Ask the process to end, or end its group."""
        if not force and not self.is_alive():
            return
        number = signal.SIGKILL if force else signal.SIGTERM
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)  # it leads its group
