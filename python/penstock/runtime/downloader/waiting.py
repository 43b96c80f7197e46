"""Connections on which threads wait for the head of a response: other threads can end the waiting."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

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
        self._sockets: dict[socket.socket, float] = {}
        self._has_ended = False
        self._lock = threading.Lock()

    @contextmanager
    def on(self, connection: socket.socket) -> Iterator[None]:
        """Wait on this socket. Raises `ConnectionAbortedError` after `end_all`."""
        with self._lock:
            if self._has_ended:
                raise ConnectionAbortedError
            self._sockets[connection] = self._clock.now()
        try:
            yield
        finally:
            with self._lock:
                del self._sockets[connection]

    def end_late(self) -> None:
        """End the waiting that takes too long."""
        with self._lock:
            for connection, start in self._sockets.items():
                if self._clock.now() - start > HEAD_TIMEOUT:
                    _shut_down(connection)

    def end_all(self) -> None:
        """End all waiting, also of later requests."""
        with self._lock:
            self._has_ended = True
            for connection in self._sockets:
                _shut_down(connection)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # it has just ended
        # The method of TLS sockets is not for two threads.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def pool_classes(waiting: Waiting) -> dict[str, type[HTTPConnectionPool]]:
    """The classes of connections that register in `waiting`, by scheme."""

    class Plain(HTTPConnection):
        def getresponse(self) -> HTTPResponse:  # type: ignore[override] # as in the base class
            with waiting.on(self.sock):
                return super().getresponse()

    class Secure(HTTPSConnection):
        def getresponse(self) -> HTTPResponse:  # type: ignore[override] # as in the base class
            with waiting.on(self.sock):
                return super().getresponse()

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(HTTPSConnectionPool):
        ConnectionCls = Secure

    return {"http": PlainPool, "https": SecurePool}
