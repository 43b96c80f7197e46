"""TLS with limits on the records of a client that have no data.

OpenSSL handles any number of such records in one call, for instance those that change the keys: as many as
an event loop reads at once take 50 ms. Here it gets one record at a time.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BoundedContext"]

#: Records of a handshake, and those without data beyond the number of those with data.
_MAX_HANDSHAKE, _MAX_EMPTY = 64, 32
_HEAD = 5
#: The types of records, and the first byte of their versions.
_TYPES = range(20, 25)
_VERSION = 3


class _Records:
    """Passes on the bytes of a client by whole records.

    Bytes of later records stay in `incoming`: asyncio reads its `pending` to see whether there are more.
    """

    def __init__(self, incoming: ssl.MemoryBIO) -> None:
        self._incoming = incoming
        #: The first bytes of a record that is not complete.
        self._head = b""
        #: The bytes that OpenSSL reads.
        self.passed = ssl.MemoryBIO()

    def take(self) -> bool:
        """Pass on the next record; false if it is not complete. Bytes that are no record are passed on."""
        incoming = self._incoming
        if not self._head:
            if incoming.pending < _HEAD:
                return False
            self._head = incoming.read(_HEAD)
        head = self._head
        is_record = head[0] in _TYPES and head[1] == _VERSION
        size = int.from_bytes(head[3:]) if is_record else 0
        if incoming.pending < size:
            return False
        self.passed.write(head + incoming.read(size) if size else head)
        self._head = b""
        return True


class _BoundedObject(ssl.SSLObject):
    """A connection that reads one record at a time; raises `SSLError` beyond the limits."""

    records: _Records
    _num_handshake = _num_empty = _num_full = 0

    def do_handshake(self) -> None:
        """Continue the handshake with the records so far."""
        while True:
            try:
                super().do_handshake()
            except ssl.SSLWantReadError:
                if not self.records.take():
                    raise
                self._num_handshake += 1
                if self._num_handshake > _MAX_HANDSHAKE:
                    raise ssl.SSLError("the handshake has too many records") from None
            else:
                return

    def read(self, len: int = 1024, buffer: Any = None) -> Any:  # noqa: A002 - the name of the base class
        """The data of the next record that has some."""
        return self._advance(super().read, len, buffer)

    def unwrap(self) -> None:
        """End the connection, after the records so far."""
        self._advance(super().unwrap)

    def _advance(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, and again with each record that it asks for; counts those that have no data."""
        num_taken = 0
        while True:
            try:
                found = call(*arguments)
            except ssl.SSLWantReadError:
                self._num_empty += num_taken > 0
                if self._num_empty > _MAX_EMPTY + self._num_full:
                    raise ssl.SSLError("the client sends too many records without data") from None
                if not self.records.take():
                    raise
                num_taken += 1
            else:
                self._num_full += num_taken > 0
                return found


class BoundedContext(ssl.SSLContext):
    """A context for connections with these limits."""

    sslobject_class = _BoundedObject

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> Any:
        """A connection over these buffers."""
        records = _Records(incoming)
        found: Any = super().wrap_bio(records.passed, outgoing, *args, **options)
        found.records = records
        return found
