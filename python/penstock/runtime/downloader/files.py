"""`RemoteFile`: what a source says about a file of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runtime.downloader.checksums import Checksum

__all__ = ["RemoteFile"]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model."""

    #: The path below the model's directory.
    name: str
    #: None if the server does not send it.
    size: int | None
    #: Another content has another version; empty if the server sends none.
    version: str
    checksum: Checksum | None = None
    #: For the source: a name, or the ETag of a file of a web server.
    key: str = ""
