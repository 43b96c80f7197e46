"""The output of a batch, a line for each request, to which a process that is started again adds.

A line is one write of a whole line, so a process that is killed leaves whole lines and at most a part of one.
"""

from __future__ import annotations

import os
import stat
from http import HTTPStatus
from itertools import chain
from typing import TYPE_CHECKING, Self

import msgspec

from penstock._system import O_BINARY, lock_file
from penstock.server.batch.lines import ID_PREFIX, PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

    from penstock.server.batch.lines import Answer

__all__ = ["OutputError", "Results"]

_BEGIN = b'{"id":"' + ID_PREFIX.encode()


class OutputError(Exception):
    """A file is not the output of this batch."""


class _Response(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None


_decode = msgspec.json.Decoder(_Line).decode


class _File:
    """A file of lines, which no other process writes meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Where the last whole line ends.
        self._end = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | O_BINARY, 0o666)
        try:
            self._lock()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise OutputError(f"{self._path}: this is not a regular file")
        try:
            lock_file(self._descriptor)
        except (BlockingIOError, PermissionError):
            raise OutputError(f"{self._path}: another process writes this file") from None

    def read(self) -> Iterator[tuple[_Line, int]]:
        """The whole lines of an earlier process, with their sizes."""
        with open(self._descriptor, "rb", closefd=False) as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n") and (text.startswith(_BEGIN) or _BEGIN.startswith(text)):
                    return
                try:
                    line = _decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    message = f"{self._path}, line {number}: this is not the output of a batch"
                    raise OutputError(message) from None
                self._end += len(text)
                yield line, len(text)

    def remove_rest(self) -> None:
        """Remove the part of a line at the end."""
        os.ftruncate(self._descriptor, self._end)

    def write(self, text: bytes) -> None:
        rest = memoryview(text)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Write the file to the disk."""
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class Results:
    """The lines of successful requests in a file, and those of failed ones in the same or in another file.

    First, `advance` reads the lines of an earlier process. Raises `OutputError` for a file with other
    contents, and for one that another process writes. No file is changed before `resume`.
    """

    def __init__(self, output: Path, errors: Path | None = None) -> None:
        self.custom_ids = set[str]()
        self.num_completed = self.num_failed = 0
        self._files: list[_File] = []
        try:
            for path in (output,) if errors is None else (output, errors):
                self._files.append(_File(path))
        except BaseException:
            self.close()
            raise
        self._lines = chain.from_iterable([file.read() for file in self._files])

    def advance(self) -> bool:
        """Read the next lines, `PIECE_BYTES` of them or one more; returns whether there can be others."""
        total = 0
        for line, size in self._lines:
            self._count(line.custom_id, is_ok=_is_ok(line))
            total += size
            if total >= PIECE_BYTES:
                return True
        return False

    def _count(self, custom_id: str, *, is_ok: bool) -> None:
        self.custom_ids.add(custom_id)
        self.num_completed += is_ok
        self.num_failed += not is_ok

    def check(self, custom_ids: set[str]) -> None:
        """Raise `OutputError` if there is a line of another request than these."""
        if others := self.custom_ids - custom_ids:
            message = f"the output has a line for {min(others)[:64]!r}, which the input does not have"
            raise OutputError(message)

    def resume(self) -> None:
        """Remove the part of a line at the end, after the lines that `advance` has not read."""
        while self.advance():
            pass
        for file in self._files:
            file.remove_rest()

    def add(self, custom_id: str, answer: Answer) -> None:
        """Write a line."""
        file = self._files[0] if answer.is_ok else self._files[-1]
        file.write(answer.text)
        self._count(custom_id, is_ok=answer.is_ok)

    def close(self) -> None:
        """Write the files to the disk."""
        while self._files:
            self._files.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _is_ok(line: _Line) -> bool:
    return line.response is not None and line.response.status_code == HTTPStatus.OK
