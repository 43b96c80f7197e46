"""Limits of a connection that uvicorn does not have: the size of a request's head, and the time for it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    import asyncio

    from penstock.server.settings import ServerSettings

__all__ = ["limited_protocol"]

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def limited_protocol(settings: ServerSettings, base: Any = AutoHTTPProtocol) -> type[asyncio.Protocol]:
    """The HTTP protocol of uvicorn with these limits."""

    class LimitedProtocol(base):  # type: ignore[misc] # one of several classes
        """Closes the connection of a client that sends a head too slowly, or one that is too large."""

        _timer: asyncio.TimerHandle | None = None
        _num_pending = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                transport.abort()
                return
            connection = transport.get_extra_info("socket")
            if connection is not None and connection.family != socket.AF_UNIX:
                # A client that reads nothing keeps neither the connection nor its buffers.
                milliseconds = int(settings.send_timeout * 1000)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            cycle = self.cycle
            super().data_received(data)
            if self.cycle is not cycle:
                self._stop_timer()
                self._num_pending = 0
            elif cycle is None or cycle.response_complete:
                self._num_pending += len(data)
                if self._timer is None:
                    self._start_timer()
                if self._num_pending > settings.max_header_bytes and not self.transport.is_closing():
                    self.transport.write(_TOO_LARGE)
                    self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(settings.receive_timeout, self.transport.abort)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return LimitedProtocol
