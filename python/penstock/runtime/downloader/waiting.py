"""Connections on which threads wait for the head of a response: other threads can end the waiting.

A head that ends too early is an error; `http.client` takes it for a whole one.
"""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from urllib3.response import HTTPResponse

    from penstock.runtime.downloader.retries import Clock

__all__ = ["Waiting", "pool_classes"]

#: Seconds for the head of a response; the timeout of a read is that of one byte.
HEAD_TIMEOUT = 60.0


class Waiting:
    """The sockets on which threads wait, with the time since when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: None for waiting that has been ended.
        self._sockets: dict[socket.socket, float | None] = {}
        self._has_ended = False
        self._lock = threading.Lock()

    @contextmanager
    def on(self, connection: socket.socket) -> Iterator[None]:
        """Wait on this socket. Raises `ConnectionAbortedError` if another thread ends the waiting."""
        with self._lock:
            if self._has_ended:
                raise ConnectionAbortedError
            self._sockets[connection] = self._clock.now()
        try:
            yield
        finally:
            with self._lock:
                is_ended = self._sockets.pop(connection) is None
        if is_ended:
            raise ConnectionAbortedError

    def end_late(self) -> None:
        """End the waiting that takes too long."""
        with self._lock:
            for connection, start in self._sockets.items():
                if start is not None and self._clock.now() - start > HEAD_TIMEOUT:
                    self._end(connection)

    def end_all(self) -> None:
        """End all waiting, also of later requests."""
        with self._lock:
            self._has_ended = True
            for connection in self._sockets:
                self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._sockets[connection] = None
        with suppress(OSError):  # it has just ended
            # The method of TLS sockets is not for two threads.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Lines:
    """The lines of a head."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.last = b""

    def readline(self, size: int = -1) -> bytes:
        self.last = self.file.readline(size)
        return self.last

    def close(self) -> None:
        self.file.close()


class _Response(http.client.HTTPResponse):
    """Raises `RemoteDisconnected` for a head without its last line, which is empty."""

    def begin(self) -> None:
        response: Any = self
        lines = response.fp = _Lines(response.fp)
        try:
            super().begin()
        finally:
            if response.fp is lines:
                response.fp = lines.file
        if lines.last not in (b"\r\n", b"\n"):
            raise http.client.RemoteDisconnected("the head of the response ends too early")


def pool_classes(waiting: Waiting) -> dict[str, type[HTTPConnectionPool]]:
    """The classes of connections that register in `waiting`, by scheme."""

    class Plain(HTTPConnection):
        response_class = _Response

        def getresponse(self) -> HTTPResponse:  # type: ignore[override] # as in the base class
            with waiting.on(self.sock):
                return super().getresponse()

    class Secure(HTTPSConnection):
        response_class = _Response

        def getresponse(self) -> HTTPResponse:  # type: ignore[override] # as in the base class
            with waiting.on(self.sock):
                return super().getresponse()

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(HTTPSConnectionPool):
        ConnectionCls = Secure

    return {"http": PlainPool, "https": SecurePool}
