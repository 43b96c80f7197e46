"""Downloads the files of a source to a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from pathlib import Path

    from penstock.runtime.downloader.progress import Progress
    from penstock.runtime.downloader.sources import Source

__all__ = ["download"]


def download(
    source: Source,
    directory: Path,
    *,
    cancelled: threading.Event | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> Path:
    """Download the model to `directory`, which is created; returns its absolute path.

    `progress` is called in this thread, a few times per second. After `cancelled` is set, the call raises
    `DownloadCancelledError` within about a second. Raises a `DownloadError` otherwise; a later call resumes.
    """
    raise NotImplementedError
