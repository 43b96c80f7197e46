"""Rewrites wheels: archives with a list of the hashes of their files. Zopfli compresses them."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import zopfli.zlib


class Compressor:
    """Deflate as `zipfile` calls it, by Zopfli."""

    def __init__(self, *_: object) -> None:
        self._parts: list[bytes] = []

    def compress(self, data: bytes) -> bytes:
        """Take a part of a file."""
        self._parts.append(data)
        return b""

    def flush(self) -> bytes:
        """The compressed file, without the two bytes before it and the checksum of zlib's format."""
        return zopfli.zlib.compress(b"".join(self._parts), numiterations=5)[2:-4]


#: The list of the files of a wheel, in its folder of metadata.
RECORD = ".dist-info/RECORD"


def rewrite(
    wheel: Path,
    copy: Path,
    edit: Callable[[str, bytes], tuple[str, bytes]],
    added: Mapping[str, bytes] | None = None,
) -> None:
    """Write a copy of a wheel, which can replace it. `edit` returns the new name and content of each file.

    The hashes of all files, those of `added` included, are written to the list of the files.
    """
    part = copy.with_suffix(".part")
    with (
        mock.patch.object(zipfile, "_get_compressor", Compressor),  # `zipfile` has no other way
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        rows: list[str] = []

        def write(like: zipfile.ZipInfo, name: str, content: bytes) -> None:
            info = zipfile.ZipInfo(name, like.date_time)
            info.external_attr, info.compress_type = like.external_attr, zipfile.ZIP_DEFLATED
            new.writestr(info, content)

        [record] = [item for item in old.infolist() if item.filename.endswith(RECORD)]
        files = [(item, edit(item.filename, old.read(item))) for item in old.infolist()]
        files += [(record, file) for file in (added or {}).items()]
        for item, (name, content) in files:
            if not name.endswith(RECORD):
                write(item, name, content)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                rows.append(f"{name},sha256={digest},{len(content)}\n")
        name, _ = edit(record.filename, b"")
        write(record, name, "".join([*rows, f"{name},,\n"]).encode())
    part.replace(copy)
