"""Reading requests and writing responses, as plain ASGI."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import msgspec
from starlette.datastructures import Headers

from penstock.server.errors import ApiError
from penstock.server.sse import json_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from penstock.server.settings import ServerSettings

__all__ = ["DisconnectedError", "Exchange", "converted", "parsed", "watch_connection"]

Structure = TypeVar("Structure")

#: A longer body that is not valid JSON is not searched for the field at fault.
_MAX_SEARCHED = 64 << 10

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx collects the events
)


class DisconnectedError(Exception):
    """The client has closed the connection."""


class Exchange:
    """A request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: ServerSettings) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self._settings = settings
        self.request_headers = Headers(scope=scope)
        #: The digest of the API key of the request, or nothing.
        self.key = b""
        #: Headers of every response, such as the request id.
        self.headers: list[tuple[bytes, bytes]] = []
        #: The JSON object of an error, in the form of the route's API.
        self.error_body: Callable[[ApiError], dict[str, Any]] = ApiError.body
        #: The status of the response, once it has begun.
        self.status: int | None = None

    async def read_object(self) -> dict[str, Any]:
        """The JSON object of the body, without the fields that are null."""
        kind = self.request_headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Browsers send other types to other origins without asking them first.
            raise ApiError(415, "the content type must be application/json")
        return parsed(await self._read_body())

    async def read_options(self) -> dict[str, Any]:
        """The JSON object of the body, which may be empty."""
        if self.request_headers.get("content-length", "0") == "0" and not self.request_headers.get(
            "transfer-encoding"
        ):
            return {}
        return await self.read_object()

    async def _read_body(self) -> bytes:
        limit, length = self._settings.max_body_bytes, self.request_headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        with anyio.move_on_after(self._settings.receive_timeout):
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise DisconnectedError
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
        raise ApiError(408, f"the body did not arrive within {self._settings.receive_timeout:g} seconds")

    async def send_json(self, value: object, status: int = 200) -> None:
        """Send a JSON response."""
        await self._send(status, [(b"content-type", b"application/json")], json_bytes(value))

    async def send_bytes(self, body: bytes, kind: str) -> None:
        """Send a response of another content type."""
        await self._send(200, [(b"content-type", kind.encode())], body)

    async def send_error(self, error: ApiError) -> None:
        """Send an error response, which ends the connection if the body may be unread."""
        await self._send(error.status, error.headers(), json_bytes(self.error_body(error)))

    async def start_stream(self) -> None:
        """Send the status and the headers of a stream of events."""
        headers = [*self.headers, *_STREAM_HEADERS]
        self.status = 200
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.status = status
        headers = [*self.headers, *headers, (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a text, without the fields that are null."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        name = _not_finite(body)
        if name is not None:
            raise ApiError(400, f"{name} is not a finite number, as JSON requires", param=name) from None
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return {name: field for name, field in value.items() if field is not None}


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is too large: the limit is {limit} bytes")


def _not_finite(body: bytes) -> str | None:
    """The name of the first field that is NaN or infinite, in a text that is JSON otherwise."""
    import json

    if len(body) > _MAX_SEARCHED:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return next((name for name, field in value.items() if _has_infinity(field)), None)


def _has_infinity(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_infinity, value.values()))
    return isinstance(value, list) and any(map(_has_infinity, value))


def converted(fields: dict[str, Any], structure: type[Structure]) -> Structure:
    """The fields of a request as a structure; unknown ones are omitted."""
    try:
        return msgspec.convert(fields, structure)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        name = path.rstrip("`").removeprefix("$").lstrip(".")
        if missing := re.search("missing required field `(.*)`", message):
            name = f"{name}.{missing[1]}".lstrip(".")
        raise ApiError(400, f"{name or 'the body'}: {message}", param=name or None) from None


async def watch_connection(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel the scope when the client disconnects. The body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
