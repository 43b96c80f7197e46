"""A file that is downloaded in parts, and the record on disk of how far each part is.

The data goes to `KEY.part`. `KEY.state` begins with a line about the file; at offset 4096 is the number of
complete bytes of each part, as 64-bit integers. A number is written after its data, so the record is true at
any moment at which the process can be killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.runtime.downloader.checksums import hash_file

if TYPE_CHECKING:
    from penstock.runtime.downloader.checksums import Hasher
    from penstock.runtime.downloader.files import RemoteFile
    from penstock.runtime.downloader.target import Target

__all__ = ["PartialFile"]

#: Smaller files are not resumed.
MIN_RESUMED = 1 << 20
MIN_PART_SIZE = 1 << 16
_OFFSET = 4096
_COUNT = struct.Struct("<Q")


def _key_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:40]


def _remove(folder: int, key: str) -> None:
    for name in (f"{key}.state", f"{key}.part"):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


class PartialFile:
    """A file in the folder of the state. Its parts are `[index * part_size, (index + 1) * part_size)`."""

    def __init__(self, folder: int, file: RemoteFile, part_size: int | None) -> None:
        """`part_size` None is for a single part; that of an earlier download of the file is kept."""
        self._folder = folder
        self._name = _key_of(file.name)
        self.size = file.size
        #: The maximum size of a part.
        self.part_size = part_size or file.size or 0
        self._state = -1
        self._data = -1
        #: Whether a part can be continued, and how far it is recorded.
        self.is_resumable = file.size is not None and file.size >= MIN_RESUMED and file.version != ""
        identity = hashlib.sha256(f"{file.name}\0{file.version}".encode()).hexdigest()
        facts: dict[str, object] = {"identity": identity, "size": file.size}
        done = self._resumed(facts) if self.is_resumable else None
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if done is None else 0)
        if done is None:
            self.close()
            _remove(folder, self._name)
        self._data = os.open(f"{self._name}.part", flags, 0o644, dir_fd=folder)
        #: The complete bytes of each part.
        self.done = done or [0] * self.num_parts
        if self.is_resumable and done is None:
            os.ftruncate(self._data, file.size or 0)
            self._create_state({**facts, "part_size": self.part_size})

    @staticmethod
    def allocated_bytes(folder: int, file: RemoteFile) -> int:
        """The bytes on disk of an earlier download of this file."""
        try:
            facts = os.stat(f"{_key_of(file.name)}.part", dir_fd=folder, follow_symlinks=False)
        except OSError:
            return 0
        return facts.st_blocks * 512

    @property
    def num_parts(self) -> int:
        """At least one."""
        return max(1, -(-(self.size or 0) // self.part_size)) if self.part_size else 1

    def bounds(self, part: int) -> tuple[int, int | None]:
        """The first offset of a part and the offset after it; None if the size is unknown."""
        start = part * self.part_size
        return start, None if self.size is None else min(start + self.part_size, self.size)

    def is_done(self, part: int) -> bool:
        """Whether a part is complete."""
        start, stop = self.bounds(part)
        return stop is not None and start + self.done[part] == stop

    def write(self, part: int, data: bytes) -> None:
        """Add data to a part."""
        offset = self.bounds(part)[0] + self.done[part]
        view = memoryview(data)
        while view:
            written = os.pwrite(self._data, view, offset)
            view, offset = view[written:], offset + written
        self.done[part] += len(data)
        if self._state >= 0:
            os.pwrite(self._state, _COUNT.pack(self.done[part]), _OFFSET + _COUNT.size * part)

    def hash_range(self, hasher: Hasher, start: int, stop: int) -> None:
        """Add the bytes of this range to a digest."""
        hash_file(hasher, self._data, start, stop)

    def publish(self, target: Target, file: RemoteFile) -> None:
        """Give the complete file its name, after its content is on the disk."""
        size = sum(self.done)
        if self.size is None:
            os.ftruncate(self._data, size)
        os.fsync(self._data)
        self.close()
        target.publish(f"{self._name}.part", file.name)
        target.record(file, size)
        _remove(self._folder, self._name)

    def discard(self) -> None:
        """Remove the file and its record."""
        self.close()
        _remove(self._folder, self._name)

    @staticmethod
    def remove(folder: int, file: RemoteFile) -> None:
        """Remove what an earlier download left of this file."""
        _remove(folder, _key_of(file.name))

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self._data, self._state):
            if descriptor >= 0:
                os.close(descriptor)
        self._data = self._state = -1

    def _create_state(self, facts: dict[str, object]) -> None:
        new = f"{self._name}.new"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        self._state = os.open(new, flags, 0o644, dir_fd=self._folder)
        os.pwrite(self._state, json.dumps(facts).encode() + b"\n", 0)
        os.ftruncate(self._state, _OFFSET + _COUNT.size * self.num_parts)
        os.rename(new, f"{self._name}.state", src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def _resumed(self, facts: dict[str, object]) -> list[int] | None:
        """The complete bytes of the parts of an earlier download of the same version."""
        flags = os.O_RDWR | os.O_NOFOLLOW
        try:
            self._state = os.open(f"{self._name}.state", flags, dir_fd=self._folder)
            size = os.stat(f"{self._name}.part", dir_fd=self._folder, follow_symlinks=False).st_size
            known = json.loads(os.pread(self._state, _OFFSET, 0).partition(b"\n")[0])
            part_size = known.pop("part_size")
            if known != facts or size != self.size or part_size < MIN_PART_SIZE:
                return None
            self.part_size = part_size
            counts = os.pread(self._state, _COUNT.size * self.num_parts, _OFFSET)
            done = [count for (count,) in _COUNT.iter_unpack(counts)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
            return None
        limits = (self.bounds(part) for part in range(self.num_parts))
        is_valid = all(
            count <= (stop or 0) - start for count, (start, stop) in zip(done, limits, strict=False)
        )
        return done if is_valid and len(done) == self.num_parts else None
