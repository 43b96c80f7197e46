"""A process on a pseudo-terminal, which the test types into."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

#: The terminal controls the process, so that Ctrl-C interrupts it, even if this process ignores SIGINT, as a
#: background job does.
CONTROL = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
CTRL_C = "\x03"
CTRL_D = "\x04"


class Terminal:
    """Runs Python code; standard input, output and errors are the terminal."""

    def __init__(
        self,
        code: str,
        *arguments: object,
        environment: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
    ) -> None:
        import pty  # not on Windows

        self._keyboard, screen = pty.openpty()
        self._unread = ""
        self.screen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CONTROL + code, *map(str, arguments)],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            env={**environment, "TERM": "dumb"},
            cwd=cwd,
        )
        os.close(screen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)

    def type(self, text: str) -> None:
        """Type a text."""
        os.write(self._keyboard, text.encode())

    def press_ctrl_c_after(self, text: str, is_done: Callable[[], bool]) -> None:
        """Type a text, and Ctrl-C once it is echoed, until the condition is met.

        A signal between the echo and the next wait of `input` does not interrupt it; the next one does.
        """
        self.type(text)
        self.wait_for(text)
        for _ in range(3):
            self.type(CTRL_C)
            if is_done():
                return
        raise AssertionError(f"Ctrl-C has no effect: {self.screen!r}")

    def shows(self, text: str, seconds: float = 10) -> bool:
        """Whether a text appears in time."""
        with suppress(AssertionError):
            self.wait_for(text, seconds)
            return True
        return False

    def ends(self, seconds: float = 10) -> bool:
        """Whether the process ends in time."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        return False

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Read up to the next occurrence of a text; returns what was read before it."""
        deadline = time.monotonic() + seconds
        while text not in self._unread:
            if not select.select([self._keyboard], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise AssertionError(f"{text!r} did not appear in {seconds} s: {self.screen!r}")
            try:
                read = os.read(self._keyboard, 4096).decode(errors="replace")
            except OSError as error:  # EIO: the process has ended
                raise AssertionError(f"{text!r} did not appear: {self.screen!r}") from error
            self._unread += read
            self.screen += read
        before, _, self._unread = self._unread.partition(text)
        return before

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(timeout=60)
