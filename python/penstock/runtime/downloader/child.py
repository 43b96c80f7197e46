"""Runs a download in a child process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.runtime.downloader.options import Options
    from penstock.runtime.downloader.progress import Progress

__all__ = ["run"]


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
    raise NotImplementedError
