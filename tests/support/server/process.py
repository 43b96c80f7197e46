"""`penstock serve` as a process."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from support.api.engines import start_python, wait_until
from support.server.serving import Served

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator


class Process(Served):
    """A server in a process of its own. A thread reads its log: a full pipe would block it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        super().__init__(None, port)
        self.process = process
        self._log: list[bytes] = []
        self._reader = threading.Thread(target=lambda: self._log.extend(process.stderr or ()))
        self._reader.start()

    def end(self) -> int:
        """Wait for the end of the process; returns its exit status."""
        assert b"Traceback" not in self.log(), self.log()
        return self.process.wait()

    def log(self) -> bytes:
        """Wait for the end of the process; returns its log since it listens."""
        self._reader.join()
        return b"".join(self._log)

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self._reader.join()
        self.process.communicate()


def is_healthy(server: Process) -> bool:
    """Whether the model is loaded."""
    return server.ask("/health")[0] == 200


@contextmanager
def started(
    *arguments: object,
    is_ready: Callable[[Process], bool] = is_healthy,
    is_fast: bool = True,
    setup: str = "",
) -> Iterator[Process]:
    """`penstock serve` with a model that is loaded, with or without the extra `fast`; first, `setup` runs."""
    code = "" if is_fast else "import sys; sys.modules |= dict.fromkeys(['httptools', 'uvloop']); "
    code += f"{setup}\nfrom penstock.cli import main; main()"
    process = start_python(code, "serve", *arguments, "--port", 0, "--threads", 1)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, b"")
        address = next(found for line in lines if (found := re.search(rb"listening on .*:(\d*)", line)))
    except BaseException:
        process.kill()
        process.communicate()
        raise
    server = Process(process, int(address[1] or 0))
    try:
        wait_until(lambda: is_ready(server))
        yield server
    finally:
        server.close()
