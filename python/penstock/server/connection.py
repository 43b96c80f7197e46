"""Limits of a connection that uvicorn does not have.

uvicorn stops reading when bytes follow a request, and so does not see that the client disconnects. Here a
connection is always read: bytes ahead of the response are held up to a bound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from penstock._system import AF_UNIX, set_send_timeout
from penstock.server.addresses import network_of
from penstock.server.heads import MAX_HEADERS
from penstock.server.open_connections import OpenConnections

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from penstock.server.open_connections import Connection, Group
    from penstock.server.settings import ServerSettings

__all__ = ["limited_protocol"]

_EMPTY = b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request" + _EMPTY
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large" + _EMPTY
_WRONG_VERSION = b"HTTP/1.1 505 HTTP Version Not Supported" + _EMPTY
#: Bytes that are parsed at once; a parser can hold requests of one piece.
_PIECE = 16 << 10
#: Unsent bytes of a connection from which on its response waits.
_MAX_UNSENT = 64 << 10
#: The number of unanswered requests of a connection; httptools parses all of a piece.
_MAX_PIPELINED = 16
#: Seconds for which a client can read the response to a request that was not read to its end.
_LINGER = 2.0


class _Transport:
    """The transport as a request's response sees it."""

    def __init__(self, transport: asyncio.Transport, protocol: _Limits) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = protocol.close_after_response


class _Limits(asyncio.Protocol):
    """A protocol of uvicorn, with limits; the base class is given by `limited_protocol`."""

    settings: ServerSettings
    clients: OpenConnections
    group: Group | None = None
    #: The same connection before its handshake had ended.
    former: Connection | None = None
    # Of uvicorn's protocols; `cycle` is the newest request.
    client: tuple[str, int] | None
    cycle: Any
    flow: Any
    loop: asyncio.AbstractEventLoop
    timeout_keep_alive_task: asyncio.TimerHandle | None
    transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive = self.settings.keep_alive_timeout
        transport.set_write_buffer_limits(_MAX_UNSENT)  # that of TLS is larger
        if hasattr(self, "parser"):  # httptools, which is optional
            from penstock.server.parser import Parser

            self.parser = Parser(self)
        #: Unanswered requests; the first one is being answered.
        self._requests: deque[Any] = deque()
        #: Bytes after a request that is complete but not answered.
        self._ahead = b""
        #: Bytes of a head, or of the framing and the trailers of a body; bytes of the body.
        self._num_overhead = self._num_body = 0
        #: Bytes since the last byte of a body; header lines of a head, or of trailers.
        self._num_since_body = self._num_headers = 0
        self._is_lingering = False
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._transport = _Transport(transport, self)
        if self.former is not None:
            self.clients.remove(self.former)
        # Those of a unix socket have no address, and are in one group.
        if not self.clients.add(self, network_of(self.client[0]) if self.client else ""):
            transport.abort()
            return
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != AF_UNIX:
            # A client that reads nothing keeps neither the connection nor its buffers.
            set_send_timeout(connection, self.settings.send_timeout)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.clients.remove(self)
        self._stop_timer()
        self._stop_send_timer()
        self._ahead = b""
        self._disconnect_requests()
        super().connection_lost(exc)
        # uvicorn leaves it after an error; it would keep the connection in memory until its time.
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()

    # ---- requests

    def data_received(self, data: bytes) -> None:
        self._parse(self._ahead + data)
        if len(self._ahead) > self.settings.max_header_bytes:
            self.transport.abort()

    def _parse(self, data: bytes) -> None:
        """Parse as long as the newest request is incomplete or answered, and hold the rest."""
        self._ahead = b""
        for begin in range(0, len(data), _PIECE):
            if self._is_lingering or self.transport.is_closing():
                return
            if self._is_held():
                self._ahead = data[begin:]
                break
            self._parse_piece(data[begin : begin + _PIECE])
        if self._is_held():
            # uvicorn pauses when a piece has bytes after a request.
            self.flow.resume_reading()
        if self.group is not None:
            self.group.touch(self, is_idle=not self._is_held())

    def _is_held(self) -> bool:
        return bool(self._requests) and not self._requests[0].more_body

    def _parse_piece(self, piece: bytes) -> None:
        newest = self.cycle
        size = 0 if newest is None else len(newest.body)
        super().data_received(piece)
        self._add_request()
        limit = self.settings.max_header_bytes
        if self.cycle is not newest:
            self._stop_timer()
            self._num_overhead = self._num_body = self._num_since_body = 0
            if self._num_headers > MAX_HEADERS:  # of trailers, or of the next head
                self._refuse(_TOO_LARGE)
            return
        if self._requests:
            growth = len(newest.body) - size
            self._num_body += growth
            self._num_overhead += len(piece) - growth
            self._num_since_body = 0 if growth else self._num_since_body + len(piece)
            limit += self._num_body
        else:
            self._num_overhead += len(piece)
            if self._receive_timer is None:
                self._start_timer()
        is_large = self._num_overhead > limit or self._num_since_body > self.settings.max_header_bytes
        if is_large or self._num_headers > MAX_HEADERS:
            self._refuse(_TOO_LARGE)

    def _refuse(self, response: bytes) -> None:
        """Close the connection, with this response if none has begun."""
        if self.transport.is_closing():
            return
        if not (self._requests and self._requests[0].response_started):
            self.transport.write(response)
        self._disconnect_requests()
        self._linger()

    def _disconnect_requests(self) -> None:
        for request in self._requests:
            request.disconnected = True
            request.message_event.set()

    def on_message_begin(self) -> None:
        """Called by httptools."""
        super().on_message_begin()  # type: ignore[misc] # of the base class
        self._num_headers = 0
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools. Trailers, which no request reads, and headers beyond the limit are dropped."""
        self._num_headers += 1
        if self._is_in_head and self._num_headers <= MAX_HEADERS + 1:  # the last one is too many
            super().on_header(name, value)  # type: ignore[misc] # of the base class

    def on_headers_complete(self) -> None:
        """Called by httptools."""
        self._num_headers = 0
        self._is_in_head = False
        if self.parser.should_upgrade():
            return  # the parser begins this request again
        if len(self._requests) == _MAX_PIPELINED:
            self.transport.abort()
            return
        super().on_headers_complete()  # type: ignore[misc] # of the base class
        self._add_request()

    def on_message_complete(self) -> None:
        """Called by httptools."""
        if not self.parser.should_upgrade():
            super().on_message_complete()  # type: ignore[misc] # of the base class

    def _get_upgrade(self) -> None:
        """No upgrade is made, nor logged by uvicorn."""

    def _add_request(self) -> None:
        """List the newest request, if it is not."""
        request = self.cycle
        if request is None or request.response_complete or request in self._requests:
            return
        self._requests.append(request)
        request.transport = self._transport
        names = [name for name, _ in request.scope["headers"]]
        version = request.scope["http_version"]
        if version not in ("1.0", "1.1"):
            self._refuse(_WRONG_VERSION)
        elif b"transfer-encoding" in names and (b"content-length" in names or version == "1.0"):
            # A proxy could see another end of the body.
            self._refuse(_BAD_REQUEST)
        elif version == "1.0" and hasattr(request, "chunked_encoding"):
            request.send = partial(_send_without_chunks, request)

    # ---- responses

    def on_response_complete(self) -> None:
        """Called when the response to the first request has been written."""
        if self._requests[0].more_body:
            self.close_after_response()
        self._requests.popleft()
        if self._is_lingering:
            return
        super().on_response_complete()  # type: ignore[misc] # of the base class
        self._add_request()
        if not self.transport.is_closing():
            self._parse(self._ahead)

    def close_after_response(self) -> None:
        """Close the connection after a response that has been written."""
        if self._requests[0].more_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close the connection when the client has had time to read.

        If bytes of the client are unread at the end, the system resets the connection, and the client can
        lose the response.
        """
        if self._is_lingering or self.transport.is_closing():
            return
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self._is_lingering = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self._stop_timer()
        self._receive_timer = self.loop.call_later(_LINGER, self.transport.abort)

    # ---- the ends of the connection and of the server

    @property
    def has_unsent(self) -> bool:
        """Whether a part of a response has not been sent."""
        return bool(self.transport.get_write_buffer_size())

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open and had a request, and has none now."""
        is_open = self.cycle is not None and not (self._is_lingering or self.transport.is_closing())
        return is_open and not (self._requests or self._num_overhead)

    def fileno(self) -> int:
        """The descriptor of the connection."""
        number: int = self.transport.get_extra_info("socket").fileno()
        return number

    # ---- times

    def _start_timer(self) -> None:
        self._receive_timer = self.loop.call_later(self.settings.receive_timeout, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def _start_send_timer(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self.settings.send_timeout, self._check_reader, size)

    def _check_reader(self, size: int) -> None:
        """Abort the connection if the client has read nothing since the timer started."""
        if self.transport.get_write_buffer_size() >= size:
            self.transport.abort()
        else:
            self._start_send_timer()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def _send_without_chunks(request: Any, message: Any) -> Coroutine[Any, Any, None]:
    """Send a part of a response that the end of the connection ends, for HTTP/1.0 with httptools."""
    if message["type"] == "http.response.start":
        request.chunked_encoding = False
    else:
        request.expected_content_length = len(message.get("body", b""))
    return type(request).send(request, message)  # type: ignore[no-any-return]


def limited_protocol(settings: ServerSettings, base: Any = AutoHTTPProtocol) -> type[asyncio.Protocol]:
    """The HTTP protocol of uvicorn with these limits."""
    fields = {"settings": settings, "clients": OpenConnections(settings.max_connections)}
    return type("LimitedProtocol", (_Limits, base), fields)
