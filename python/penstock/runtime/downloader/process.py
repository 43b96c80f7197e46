"""Runs a download in a child process, `child.py`.

The parent writes one line of JSON to the child's standard input and keeps it open: its end cancels the
download, also when the parent is killed. The child writes lines of JSON: progress, and at the end the path or
the error.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.runtime.downloader import errors
from penstock.runtime.downloader.options import Options  # noqa: TC001 - msgspec reads it
from penstock.runtime.downloader.progress import Progress  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Order", "Report", "run"]

_MAX_LINE = 1 << 20
_END_TIMEOUT = 5.0


class Order(msgspec.Struct):
    """The line on standard input."""

    uri: str
    directory: str
    options: Options


class Report(msgspec.Struct, omit_defaults=True):
    """A line on standard output."""

    progress: Progress | None = None
    path: str | None = None
    error: str | None = None
    message: str = ""
    field: str = ""


async def run(
    uri: str,
    directory: Path,
    options: Options,
    progress: Callable[[Progress], object] | None = None,
) -> Path:
    """The same as `download(resolve(uri, options), directory)`, in a child process.

    Cancelling the task ends the child before it returns; a later call resumes. The credentials are sent
    through a pipe, not as arguments or environment variables.
    """
    import anyio
    from anyio.streams.buffered import BufferedByteReceiveStream

    # -P: modules in the current directory are not found.
    command = [sys.executable, "-P", "-m", "penstock.runtime.downloader.child"]
    process = await anyio.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, start_new_session=True
    )
    try:
        if process.stdin is None or process.stdout is None:
            raise errors.DownloadError("the child process has no pipes")
        order = Order(uri, str(directory), options)
        lines = BufferedByteReceiveStream(process.stdout)
        try:
            await process.stdin.send(msgspec.json.encode(order) + b"\n")
            while True:
                line = await lines.receive_until(b"\n", _MAX_LINE)
                report = msgspec.json.decode(line, type=Report)
                if report.path is not None:
                    return Path(report.path)
                if report.error is not None:
                    raise _error_of(report)
                if report.progress is not None and progress is not None:
                    progress(report.progress)
        except (anyio.BrokenResourceError, anyio.IncompleteRead, anyio.EndOfStream):
            raise errors.DownloadError("the process of the download was killed") from None
    finally:
        await _end(process)


async def _end(process: Any) -> None:
    """Wait for the end of a process that was asked to end."""
    import anyio

    with anyio.CancelScope(shield=True):
        await process.stdin.aclose()
        with anyio.move_on_after(_END_TIMEOUT):
            await process.wait()
        if process.returncode is None:
            process.kill()
        await process.aclose()


def _error_of(report: Report) -> errors.DownloadError:
    kind = getattr(errors, report.error or "", errors.DownloadError)
    if kind is errors.InvalidArgumentError:
        return errors.InvalidArgumentError(report.message, report.field)
    found: errors.DownloadError = kind(report.message)
    return found
