"""The progress of a download, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Phase", "Progress"]

#: `waiting` is for another process that downloads to the same directory.
Phase = Literal["waiting", "listing", "downloading", "done"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A snapshot of a download."""

    phase: Phase = "waiting"
    #: Of all files of the model that are selected; 0 until they are listed.
    total_files: int = 0
    total_bytes: int = 0
    #: Complete and verified files, also those of earlier downloads.
    done_files: int = 0
    #: Bytes on disk, also those of earlier downloads.
    done_bytes: int = 0
    #: Bytes received by this download.
    fetched_bytes: int = 0
