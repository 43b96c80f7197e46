"""The download of one file: its parts, its checksum, its publication.

Several threads call `fetch`, each for a part of its own; the other methods have one caller at a time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.runtime.downloader.checksums import start_hasher
from penstock.runtime.downloader.errors import DownloadCancelledError, IntegrityError
from penstock.runtime.downloader.parts import PartialFile
from penstock.runtime.downloader.retries import FileChangedError, TemporaryError

if TYPE_CHECKING:
    from penstock.runtime.downloader.checksums import Checksum, Hasher
    from penstock.runtime.downloader.files import RemoteFile
    from penstock.runtime.downloader.progress import Counts
    from penstock.runtime.downloader.sources import Source
    from penstock.runtime.downloader.target import Target
    from penstock.runtime.downloader.transport import Session

__all__ = ["Job"]

MAX_RESTARTS = 3
MAX_BUFFER = 256 << 10
MAX_PARTS = 10_000
#: Of an attempt, after which the number of failures begins again.
MIN_PROGRESS = 64 << 10


class Job:
    """The download of one file."""

    def __init__(
        self, source: Source, file: RemoteFile, target: Target, session: Session, counts: Counts
    ) -> None:
        self._source, self._file, self._target = source, file, target
        self._session, self._counts = session, counts
        options = source.options
        queue = options.max_io_queue * options.io_chunksize // options.num_threads
        self._buffer_size = max(1 << 14, min(MAX_BUFFER, options.io_chunksize, queue))
        self._partial: PartialFile | None = None
        self._checksum: Checksum | None = None
        self._hasher: Hasher | None = None
        #: The bytes of which `_hasher` is the digest, from the beginning of the file.
        self._hashed = 0
        self._hash_lock = threading.Lock()
        self._num_restarts = 0
        self._ignores_ranges = False
        #: Parts that no thread has begun, and the number of threads that work on the file.
        self.pending: list[int] = []
        self.num_running = 0
        #: The error of a thread after which all threads leave the file, and it begins again.
        self.changed: FileChangedError | None = None

    @property
    def num_parts(self) -> int:
        """The number of parts of a new download; one if no version shows that they fit together."""
        options, size = self._source.options, self._file.size
        if size is None or size < options.part_threshold or not self._file.version or self._ignores_ranges:
            return 1
        return -(-size // self._part_size)

    @property
    def _part_size(self) -> int:
        return max(self._source.options.part_chunksize, -(-(self._file.size or 0) // MAX_PARTS))

    def needed_bytes(self, *, is_fresh: bool) -> int:
        """The bytes on disk that the file still takes; 0 for a file that is here if its checksum matches."""
        if not is_fresh and self._target.may_be_current(self._file):
            return 0
        size = self._file.size or 0
        return max(0, size - PartialFile.allocated_bytes(self._target.state, self._file))

    def begin(self, *, is_fresh: bool) -> list[int]:
        """Open the file; returns the parts that are incomplete. `is_fresh` ignores what is here."""
        if is_fresh and not self._num_restarts:
            PartialFile.remove(self._target.state, self._file)
        may_be_here = not is_fresh and self._target.may_be_current(self._file)
        needs_checksum = self.num_parts > 1 or PartialFile.allocated_bytes(self._target.state, self._file) > 0
        if needs_checksum or may_be_here or self._num_restarts:
            self._file = self._source.refresh(self._session, self._file)
        self._check_stopped()
        self._checksum = self._file.checksum
        if may_be_here and self._is_here():
            self._counts.add_found(self._file.size or 0)
            return []
        if may_be_here:  # not counted by `needed_bytes`
            self._target.check_space(self._file.size or 0)
        part_size = self._part_size if self.num_parts > 1 else None
        self._partial = partial = PartialFile(self._target.state, self._file, part_size)
        self._counts.add_found(sum(partial.done))
        self._start_hash()
        return [part for part in range(partial.num_parts) if not partial.is_done(part)]

    def fetch(self, part: int) -> None:
        """Download a part, with further attempts after temporary failures."""
        partial = self._partial
        if partial is None:
            return
        attempts = self._session.attempts()
        is_done = False
        while not is_done and self.changed is None:
            before = partial.done[part]
            try:
                is_done = self._receive(partial, part)
            except TemporaryError as error:
                self._check_stopped()
                if not partial.is_resumable:
                    self._start_part_over(partial, part)
                attempts.failed(error, has_progressed=partial.done[part] - before >= MIN_PROGRESS)
        self._advance_hash(partial)

    def finish(self) -> bool:
        """Verify and publish the file; False if it must begin again. Raises `IntegrityError`."""
        if self.changed is not None:
            self._restart(str(self.changed))
            return False
        partial = self._partial
        if partial is None:
            return True  # it was here
        if self._hasher is not None and self._checksum is not None:
            partial.hash_range(self._hasher, self._hashed, sum(partial.done))
            self._check_stopped()
            if self._hasher.hexdigest() != self._checksum.digest:
                self._restart(f"{self._file.name}: the content does not match the checksum")
                return False
        self._check_stopped()
        partial.publish(self._target, self._file)
        self._partial = None
        return True

    def _restart(self, reason: str) -> None:
        """Drop what was downloaded."""
        if self._partial is not None:
            self._counts.add_found(-sum(self._partial.done))
            self._partial.discard()
            self._partial = None
        self._num_restarts += 1
        if self._num_restarts > MAX_RESTARTS:
            raise IntegrityError(f"{reason} ({self._num_restarts} attempts)")
        self.changed = None

    def close(self) -> None:
        """Close the file; what was downloaded stays for a later download."""
        if self._partial is not None:
            self._partial.close()

    def _receive(self, partial: PartialFile, part: int) -> bool:
        """One attempt; returns whether the part is complete."""
        start, stop = partial.bounds(part)
        content = self._source.open(self._session, self._file, start + partial.done[part], stop)
        try:
            if content.start != start + partial.done[part]:
                if partial.num_parts > 1:
                    self._ignores_ranges = True
                    raise FileChangedError(f"{self._file.name}: the server ignores ranges")
                self._start_part_over(partial, part)
            if self._checksum is None and content.checksum is not None:
                self._checksum = content.checksum
                self._start_hash()
            while not partial.is_done(part) and self.changed is None:
                offset = start + partial.done[part]
                rest = self._buffer_size if stop is None else min(self._buffer_size, stop - offset)
                data = content.read(rest)
                self._check_stopped()
                if not data:
                    if stop is None:
                        return True
                    raise TemporaryError(f"{self._file.name}: the content ends too early")
                if self._hasher is not None and self._hashed == offset:
                    self._hasher.update(data)
                    self._hashed += len(data)
                self._counts.add_fetched(len(data))
                partial.write(part, data)
        finally:
            content.close()
        return partial.is_done(part)

    def _start_part_over(self, partial: PartialFile, part: int) -> None:
        self._counts.add_found(-partial.done[part])
        partial.done[part] = 0
        self._start_hash()

    def _is_here(self) -> bool:
        """Whether a file that no download recorded has the right content."""
        size, checksum = self._file.size, self._file.checksum
        hasher = start_hasher(checksum, size) if checksum and size is not None else None
        if hasher is None or checksum is None or self._target.size_of(self._file.name) != size:
            return False
        self._target.hash_file(self._file.name, hasher)
        if hasher.hexdigest() != checksum.digest:
            return False
        self._target.record(self._file, size or 0)
        return True

    def _start_hash(self) -> None:
        checksum, size = self._checksum, self._file.size
        self._hasher = start_hasher(checksum, size) if checksum and size is not None else None
        self._hashed = 0

    def _advance_hash(self, partial: PartialFile) -> None:
        """Add the complete parts after the last hashed byte to the digest, unless another thread does."""
        if self._hasher is None or partial.num_parts == 1 or not self._hash_lock.acquire(blocking=False):
            return
        try:
            while (part := self._hashed // partial.part_size) < partial.num_parts and partial.is_done(part):
                _, stop = partial.bounds(part)
                partial.hash_range(self._hasher, self._hashed, stop or 0)
                self._hashed = stop or 0
                if part == partial.num_parts - 1:
                    break
        finally:
            self._hash_lock.release()

    def _check_stopped(self) -> None:
        if self._session.is_aborted:
            raise DownloadCancelledError("the download is cancelled")
