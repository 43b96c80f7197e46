"""Checks of every request before its route: keys, limits, request ids; and the boundary for exceptions."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.server.errors import ApiError, api_error
from penstock.server.http import DisconnectedError, Exchange
from penstock.server.keys import digest_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    from penstock.server.state import State

__all__ = ["Access", "Endpoint", "Handler", "not_found"]

#: Answers the requests of a route.
Handler: TypeAlias = "Callable[[State, Exchange], Awaitable[None]]"
#: The key that a route needs: none, any, or an administrator's. "monitor" needs any, and its requests are
#: neither counted nor refused while the server drains.
Access: TypeAlias = Literal["open", "monitor", "key", "admin"]

logger = logging.getLogger("penstock.server")

_LABEL = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Endpoint:
    """A route as an ASGI application.

    The access belongs to the route itself, so the path that is checked is the path that is routed. Paths
    without a route need a key, too.
    """

    def __init__(
        self,
        state: State,
        path: str | None,
        method: str | None,
        handler: Handler,
        access: Access = "key",
        error_body: Callable[[ApiError], dict[str, Any]] = ApiError.body,
    ) -> None:
        self._state = state
        self._path = path
        self._method = method
        self._handler = handler
        self._access = access
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        begin = time.perf_counter()
        exchange = Exchange(scope, receive, send, self._state.settings)
        exchange.error_body = self._error_body
        try:
            await self._answer(exchange)
        finally:
            seconds = time.perf_counter() - begin
            self._state.http.add(self._path, scope["method"], exchange.status, seconds)

    async def _answer(self, exchange: Exchange) -> None:
        state = self._state
        label = exchange.request_headers.get("x-request-id", "")
        label = label if _LABEL.fullmatch(label) else secrets.token_hex(16)
        exchange.headers.append((b"x-request-id", label.encode()))
        try:
            exchange.key = self._check(exchange)
            if self._access in ("open", "monitor"):
                await self._handler(state, exchange)
                return
            state.enter()
        except Exception as error:  # noqa: BLE001 - the boundary of the request
            await exchange.send_error(api_error(error))
            return
        try:
            await self._handler(state, exchange)
        except DisconnectedError:
            pass
        except Exception as error:  # noqa: BLE001 - the boundary of the request
            await exchange.send_error(api_error(error))
        finally:
            state.leave()

    def _check(self, exchange: Exchange) -> bytes:
        """Check what can be checked without the body; returns the digest of a known key."""
        size = sum(len(name) + len(value) for name, value in exchange.scope["headers"])
        size += len(exchange.scope.get("raw_path") or b"") + len(exchange.scope["query_string"])
        if size > (limit := self._state.settings.max_header_bytes):
            raise ApiError(431, f"the headers are too large: the limit is {limit} bytes")
        digest = self._check_key(exchange)
        method = exchange.scope["method"]
        if self._method is not None and method != self._method and (method, self._method) != ("HEAD", "GET"):
            raise ApiError(405, f"the method {method[:16]} is not allowed: it must be {self._method}")
        return digest

    def _check_key(self, exchange: Exchange) -> bytes:
        scheme, _, key = exchange.request_headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = exchange.request_headers.get("x-api-key", "")
        if self._access == "open":
            return b""
        digest = digest_of(key.strip().encode())
        keys, admin_keys = self._state.keys, self._state.admin_keys
        is_admin = digest in admin_keys
        is_known = digest in keys
        if keys and not (is_known or is_admin):
            raise ApiError(401, "a valid API key is required", code="invalid_api_key")
        if self._access == "admin" and not is_admin:
            if not admin_keys:
                raise ApiError(403, "this route is closed: the server has no administrator's key")
            raise ApiError(401, "an administrator's API key is required", code="invalid_api_key")
        # Without keys, all requests count as those of one: a client could send any other key.
        return digest if is_known or is_admin else b""


async def not_found(_state: State, exchange: Exchange) -> None:
    """Answer a request for an unknown path."""
    await exchange.send_error(ApiError(404, "there is no such path", code="not_found"))
