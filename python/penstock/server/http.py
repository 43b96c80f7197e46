"""Reading requests and writing responses, as plain ASGI."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import parse_qsl

import anyio
import anyio.lowlevel
from starlette.datastructures import Headers

import penstock
from penstock.server import orca
from penstock.server.bodies import LARGE, decoded, size_of_values
from penstock.server.disconnects import DisconnectedError
from penstock.server.errors import ApiError, api_error
from penstock.server.sse import json_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Message, Receive, Scope, Send

    from penstock.server.calls import Generation
    from penstock.server.state import State

__all__ = ["LARGE_PIECE", "Exchange", "too_large"]

logger = logging.getLogger("penstock.server")

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

#: A larger part of a response counts as a body until it is sent. At its end, a response is sent in pieces of
#: this size: the ASGI server takes one when the client has read most of those before.
LARGE_PIECE = 64 << 10
_CLOSE = (b"connection", b"close")
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx collects the events
)


class Exchange:
    """A request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, state: State) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self._state = state
        self.request_headers = Headers(scope=scope)
        #: The digest of the API key of the request, or nothing.
        self.key = b""
        #: Identifies the client: by its key or, without one, by its address.
        self.client = 0
        #: Headers of every response, such as the request id.
        self.headers: list[tuple[bytes, bytes]] = []
        #: The JSON object of an error, in the form of the route's API.
        self.error_body: Callable[[ApiError], dict[str, Any]] = ApiError.body
        #: The status of the response, once it has begun.
        self.status: int | None = None
        #: The error that was sent as a response, or as the last event of a stream.
        self.error: ApiError | None = None
        #: Bytes of the body of the response that were sent.
        self.num_bytes = 0
        #: The least priority value that the request may have.
        self.min_priority: int | None = None
        #: The request of a generating route, once it is valid.
        self.generation: Generation | None = None
        self._is_read = False
        self._is_large = False
        #: Bytes of the body, its values and the response that count towards the limit of all bodies.
        self._num_body_bytes = 0

    def close(self) -> None:
        """The response has been sent, or cannot be."""
        self._state.body_bytes.release(self.client, self._num_body_bytes)
        self._num_body_bytes = 0

    def query(self) -> dict[str, str]:
        """The parameters after the path; of several with the same name, the last one."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    async def read_object(self) -> dict[str, Any]:
        """The JSON object of the body, without the fields that are null."""
        kind = self.request_headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Browsers send other types to other origins without asking them first.
            raise ApiError(415, "the content type must be application/json")
        body = await self._read_body()
        self._is_large = len(body) > LARGE
        self.hold(await self.in_body_thread(size_of_values, body))
        return await self.in_body_thread(decoded, body)

    def reads(self, size: int) -> None:
        """The work for this request reads this number of bytes that the server has stored."""
        self._is_large |= size > LARGE
        self.hold(size)

    def hold(self, size: int) -> None:
        """Count memory as that of a body, until the response has been sent. Raises if there is no room."""
        self._state.body_bytes.take(self.client, size, self._num_body_bytes)
        self._num_body_bytes += size

    async def in_body_thread(
        self, work: Callable[Arguments, Returned], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Returned:
        """Run this in the thread of large bodies if what the request sends or reads is large, else here."""
        if not self._is_large:
            return work(*args, **options)
        return await self._state.body_threads.run(work, *args, **options)

    async def read_options(self) -> dict[str, Any]:
        """The JSON object of the body, which may be empty."""
        return await self.read_object() if self._has_body() else {}

    def _has_body(self) -> bool:
        headers = self.request_headers
        return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers

    async def _read_body(self) -> bytes:
        limit = self._state.max_body_bytes()
        self.check_length(limit)
        until = anyio.current_time() + self._state.settings.receive_timeout
        parts: list[bytes] = []
        size = 0
        while (part := await self.read_piece(until)) is not None:
            size += len(part)
            if size > limit:
                raise too_large(limit)
            self.hold(len(part))
            parts.append(part)
        return b"".join(parts)

    def check_length(self, limit: int) -> None:
        """Raise if the request announces a larger body."""
        length = self.request_headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large(limit)

    async def read_piece(self, until: float) -> bytes | None:
        """The next piece of the body, or nothing after the last one. Raises if it comes after this time."""
        if self._is_read:
            return None
        with anyio.move_on_after(until - anyio.current_time()):
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            self._is_read = not message.get("more_body", False)
            piece: bytes = message.get("body", b"")
            return piece
        timeout = self._state.settings.receive_timeout
        raise ApiError(408, f"the body did not arrive within {timeout:g} seconds")

    async def send_json(self, value: object, status: int = 200) -> None:
        """Send a JSON response."""
        await self._send(status, [(b"content-type", b"application/json")], json_bytes(value))

    async def send_bytes(self, body: bytes, kind: str) -> None:
        """Send a response of another content type."""
        await self._send(200, [(b"content-type", kind.encode())], body)

    async def send_file(self, size: int, read: Callable[[int], Awaitable[bytes]]) -> None:
        """Send this number of bytes, of which `read` returns the next ones, as the client reads them."""
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(size).encode())]
        await self._start(200, headers)
        while piece := await read(LARGE_PIECE):
            await self._send_piece(piece, is_last=False)
        await self._send_piece(b"", is_last=True)

    def error_of(self, error: BaseException) -> ApiError:
        """The response for an exception of the route."""
        if self._state.models.is_loading and isinstance(error, penstock.EngineStoppedError):
            logger.warning("request refused: the model is still loading")
            return ApiError(503, "the model is still loading", code="unavailable", retry_after=5)
        return api_error(error) if self.generation is None else self.generation.error_of(error)

    async def send_error(self, error: ApiError) -> None:
        """Send an error response, which ends the connection if the body is unread."""
        self.error = error
        headers = error.headers()
        if self._has_body() and not self._is_read:
            self.end_connection()
        await self._send(error.status, headers, json_bytes(self.error_body(error)))

    def end_connection(self) -> None:
        """Make the response the last one of its connection."""
        if _CLOSE not in self.headers:
            self.headers.append(_CLOSE)

    async def start_stream(self) -> None:
        """Send the status and the headers of a stream of events."""
        await self._start(200, list(_STREAM_HEADERS))

    async def send_empty(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send a response without a body."""
        await self._send(204, headers, b"")

    async def send_rest(self, body: bytes) -> None:
        """Send the last part of a body. A client that leaves a piece unread for too long has disconnected."""
        if len(body) <= LARGE_PIECE:
            await self.deliver({"type": "http.response.body", "body": body})
            self.num_bytes += len(body)
            return
        for end in range(LARGE_PIECE, len(body) + LARGE_PIECE, LARGE_PIECE):
            await self._send_piece(body[end - LARGE_PIECE : end], is_last=end >= len(body))

    async def _send_piece(self, piece: bytes, *, is_last: bool) -> None:
        with anyio.move_on_after(self._state.settings.send_timeout) as wait:
            await self.deliver({"type": "http.response.body", "body": piece, "more_body": not is_last})
        if wait.cancelled_caught:
            raise DisconnectedError
        self.num_bytes += len(piece)
        await anyio.lowlevel.checkpoint()  # a disconnect is seen, and other requests have their turn

    async def deliver(self, message: Message) -> None:
        """Send an ASGI message; some servers raise an error when the client has disconnected."""
        try:
            await self.send(message)
        except OSError as error:
            raise DisconnectedError from error

    async def _send(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        if status != HTTPStatus.NO_CONTENT:
            headers = [*headers, (b"content-length", str(len(body)).encode())]
        if len(body) > LARGE_PIECE:
            self.hold(len(body))
        await self._start(status, headers)
        await self.send_rest(body)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        load: list[tuple[bytes, bytes]] = []
        if self.generation is not None and (kind := self.request_headers.get(orca.FORMAT)) is not None:
            load = orca.load_header(kind, self.generation.model.engine)
        headers = [*self.headers, *load, *headers]
        await self.deliver({"type": "http.response.start", "status": status, "headers": headers})


def too_large(limit: int) -> ApiError:
    """The error of a body with more bytes than this."""
    return ApiError(413, f"the body is too large: the limit is {limit} bytes")
