"""Checksums of files: of the hub, of S3, and those in URLs."""

from __future__ import annotations

import base64
import hashlib
import os
import zlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Checksum", "Hasher", "hash_file", "of_base64", "start_hasher"]

_HASH_CHUNK = 1 << 20


class Checksum(NamedTuple):
    """The expected digest of a file, in hexadecimal digits."""

    algorithm: str
    digest: str


class Hasher(Protocol):
    """Computes a digest."""

    def update(self, data: bytes, /) -> None:
        """Add data."""

    def hexdigest(self) -> str:
        """The digest of all data."""


class _Crc:
    """A CRC: a function of the data and the CRC so far."""

    def __init__(self, function: Callable[[bytes, int], int], digits: int) -> None:
        self._function, self._digits, self._value = function, digits, 0

    def update(self, data: bytes, /) -> None:
        """Add data."""
        self._value = self._function(data, self._value)

    def hexdigest(self) -> str:
        """The CRC of all data."""
        return f"{self._value:0{self._digits}x}"


def start_hasher(checksum: Checksum, size: int) -> Hasher | None:
    """A new hasher of a file of this size; None if this Python has no such function."""
    match checksum.algorithm:
        case "sha256" | "sha1" | "md5":
            return hashlib.new(checksum.algorithm, usedforsecurity=False)
        case "git-sha1":  # of a blob: its header, then the content
            return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        case "crc32":
            return _Crc(zlib.crc32, 8)
        case "crc32c" | "crc64nvme" as name:
            try:
                from awscrt import checksums  # type: ignore[import-not-found,unused-ignore]
            except ImportError:
                return None
            return _Crc(getattr(checksums, name), 8 if name == "crc32c" else 16)
        case _:
            return None


def of_base64(algorithm: str, text: str) -> Checksum | None:
    """The checksum of a digest in Base64; None if it is not one, such as a checksum of checksums."""
    try:
        return Checksum(algorithm, base64.b64decode(text, validate=True).hex())
    except ValueError:
        return None


def hash_file(hasher: Hasher, file: int, start: int, stop: int) -> None:
    """Add the bytes of this range of a file to a digest."""
    while start < stop and (data := os.pread(file, min(_HASH_CHUNK, stop - start), start)):
        hasher.update(data)
        start += len(data)
