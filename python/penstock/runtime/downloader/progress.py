"""The progress of a download, in numbers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from penstock.runtime.downloader.errors import TooLargeError

__all__ = ["Counts", "Phase", "Progress"]

#: `waiting` is for another download to the same directory.
Phase = Literal["listing", "waiting", "downloading", "done"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A snapshot of a download."""

    phase: Phase = "listing"
    #: Of all files of the model that are selected; 0 until they are listed.
    total_files: int = 0
    total_bytes: int = 0
    #: Complete and verified files, also those of earlier downloads.
    done_files: int = 0
    #: Bytes on disk, also those of earlier downloads.
    done_bytes: int = 0
    #: Bytes received by this download.
    fetched_bytes: int = 0


class Counts:
    """The numbers of a download, which several threads change."""

    def __init__(self, total_files: int, total_bytes: int, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._total_files, self._total_bytes = total_files, total_bytes
        self._done_files = self._done_bytes = self._fetched_bytes = 0

    def add_fetched(self, size: int) -> None:
        """Bytes have arrived. Raises `TooLargeError`: not all sizes are known before."""
        with self._lock:
            self._done_bytes += size
            self._fetched_bytes += size
            if self._done_bytes > self._max_bytes:
                raise TooLargeError(f"the model has more than {self._max_bytes} bytes (DOWNLOADER_MAX_BYTES)")

    def add_found(self, size: int) -> None:
        """Bytes of an earlier download are used; a negative number of bytes is dropped."""
        with self._lock:
            self._done_bytes += size

    def add_file(self) -> None:
        """A file is complete."""
        with self._lock:
            self._done_files += 1

    def progress(self, phase: Phase) -> Progress:
        """The numbers now."""
        with self._lock:
            return Progress(
                phase=phase,
                total_files=self._total_files,
                total_bytes=self._total_bytes,
                done_files=self._done_files,
                done_bytes=self._done_bytes,
                fetched_bytes=self._fetched_bytes,
            )
