"""The requests of a batch that ran when the server was killed or has crashed."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from typing import TYPE_CHECKING

from penstock._system import O_BINARY

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Attempts"]

_DIGEST_BYTES = 16
_RECORD_BYTES = 1 + _DIGEST_BYTES


class Attempts:
    """A file with a record for each start of a request, `+`, and for each end without an answer, `-`.

    For a request without an answer, the excess of starts is the number of processes that have ended while it
    ran. Records are not forced to the disk: the system keeps them when the process ends.
    """

    def __init__(self, path: Path) -> None:
        """Read the records of earlier processes."""
        self._excess = Counter[bytes]()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | O_BINARY, 0o600)
        with open(self._descriptor, "rb", closefd=False) as file:
            while len(record := file.read(_RECORD_BYTES)) == _RECORD_BYTES:
                self._excess[record[1:]] += 1 if record.startswith(b"+") else -1
            os.ftruncate(self._descriptor, file.tell() - len(record))

    def num_interrupted(self, custom_id: str) -> int:
        """The number of earlier processes that have ended while a request ran, if it has no answer."""
        return self._excess[_digest_of(custom_id)]

    def begin(self, custom_id: str) -> None:
        """Note that a request begins."""
        os.write(self._descriptor, b"+" + _digest_of(custom_id))

    def withdraw(self, custom_id: str) -> None:
        """Note that a request ends without an answer."""
        os.write(self._descriptor, b"-" + _digest_of(custom_id))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _digest_of(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
