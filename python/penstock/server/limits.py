"""Checks of every request before its route: keys, limits, request ids; and the boundary for exceptions."""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from penstock._client import client
from penstock._renderer import renderer
from penstock.server.addresses import network_of
from penstock.server.disconnects import DisconnectedError
from penstock.server.errors import ApiError
from penstock.server.heads import refusal_of
from penstock.server.http import Exchange
from penstock.server.keys import client_number, digest_of
from penstock.server.logs import AccessRecord, access_logger, client_of, request_id, unknown_path_of
from penstock.server.measures import DISCONNECTED, PROBES
from penstock.server.paths import path_to_use

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.types import Receive, Scope, Send

    from penstock.server.state import State
    from penstock.server.tracing import Tracer

__all__ = ["Action", "Endpoint", "Handler", "RouteRow"]

#: Answers the requests of a route.
Handler: TypeAlias = "Callable[[State, Exchange], Awaitable[None]]"
#: The key that a route needs: none, any, or an administrator's. "generate" needs any; the server waits for
#: its requests, and refuses them, when it drains.
Access: TypeAlias = Literal["open", "key", "generate", "admin"]


#: The method, the path, the answer and the key of a route.
RouteRow: TypeAlias = "tuple[str, str, Handler, Access]"


class Action(NamedTuple):
    """The answer to one method of a path."""

    handler: Handler
    access: Access = "key"


def _client_of(exchange: Exchange) -> int:
    address = exchange.scope.get("client")
    return client_number(
        exchange.key or digest_of(b"" if address is None else network_of(address[0]).encode())
    )


_LABEL = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Endpoint:
    """The methods of a path as an ASGI application.

    The access belongs to the route itself, so the path that is checked is the path that is routed. Paths
    without a route need a key, too. `HEAD` is answered as `GET`.
    """

    def __init__(
        self,
        state: State,
        path: str | None,
        actions: Mapping[str, Action],
        error_body: Callable[[ApiError], dict[str, Any]] = ApiError.body,
        tracer: Tracer | None = None,
    ) -> None:
        self._state = state
        self._path = path
        self._actions = dict(actions)
        if "GET" in self._actions:
            self._actions.setdefault("HEAD", self._actions["GET"])
        self._allow = ", ".join(sorted({*self._actions, "OPTIONS"}))
        #: For methods that the path does not have.
        access = next((action.access for action in actions.values()), None)
        self._other = Action(self._answer_other, "open" if access == "open" else "key")
        self._error_body = error_body
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        begin = time.perf_counter()
        exchange = Exchange(scope, receive, send, self._state)
        exchange.error_body = self._error_body
        label = exchange.request_headers.get("x-request-id", "")
        label = label if _LABEL.fullmatch(label) else secrets.token_hex(16)
        exchange.headers.append((b"x-request-id", label.encode()))
        if self._error_body is ApiError.anthropic_body:
            exchange.headers.append((b"request-id", label.encode()))
        token = request_id.set(label)
        try:
            await self._answer(exchange)
        finally:
            exchange.close()
            seconds = time.perf_counter() - begin
            self._state.http.add(self._path, scope["method"], exchange.status, seconds)
            level = logging.DEBUG if self._path in PROBES else logging.INFO
            if access_logger.isEnabledFor(level):
                access_logger.log(level, self._access(exchange, seconds))
            if self._tracer is not None and exchange.generation is not None:
                self._tracer.add(exchange, exchange.generation, seconds)
            request_id.reset(token)

    def _access(self, exchange: Exchange, seconds: float) -> AccessRecord:
        scope, generation = exchange.scope, exchange.generation
        usage = {} if generation is None else generation.usage()
        return AccessRecord(
            method=scope["method"][:16],
            path=self._path or unknown_path_of(scope),
            status=exchange.status or DISCONNECTED,
            milliseconds=round(1000 * seconds, 1),
            bytes=exchange.num_bytes,
            client=client_of(scope),
            key=exchange.key.hex()[:8] or None,
            model=None if generation is None else generation.name,
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
        )

    async def _answer(self, exchange: Exchange) -> None:
        state = self._state
        action = self._actions.get(exchange.scope["method"], self._other)
        if state.calls.is_draining:
            exchange.end_connection()
        is_counted = False
        try:
            exchange.key = self._check(exchange, action.access)
            exchange.client = _client_of(exchange)
            client.set(exchange.client)
            renderer.set(state.templates.template)
            if action.access == "generate":
                state.calls.enter()
                is_counted = True
            await action.handler(state, exchange)
        except DisconnectedError:
            pass
        except Exception as error:  # noqa: BLE001 - the boundary of the request
            with suppress(DisconnectedError):
                await exchange.send_error(exchange.error_of(error))
        finally:
            if is_counted:
                state.calls.leave()

    def _check(self, exchange: Exchange, access: Access) -> bytes:
        """Check what can be checked without the body; returns the digest of a known key."""
        if (refusal := refusal_of(exchange.scope)) is not None:
            raise ApiError(*refusal)
        self._state.hosts.check(exchange.request_headers)
        return self._check_key(exchange, access)

    def _check_key(self, exchange: Exchange, access: Access) -> bytes:
        scheme, _, key = exchange.request_headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = exchange.request_headers.get("x-api-key", "")
        if access == "open":
            return b""
        digest = digest_of(key.strip().encode())
        keys, admin_keys = self._state.keys, self._state.admin_keys
        is_admin = digest in admin_keys
        is_known = digest in keys
        if keys and not (is_known or is_admin):
            raise ApiError(401, "a valid API key is required", code="invalid_api_key")
        if access == "admin" and not is_admin:
            if not admin_keys:
                raise ApiError(403, "this route is closed: the server has no administrator's key")
            raise ApiError(401, "an administrator's API key is required", code="invalid_api_key")
        # Without keys, all requests count as those of one: a client could send any other key.
        return digest if is_known or is_admin else b""

    async def _answer_other(self, _state: State, exchange: Exchange) -> None:
        """Answer a request with another method, or for an unknown path."""
        method = exchange.scope["method"]
        if self._path is None:
            found = path_to_use(exchange.scope["path"])
            hint = "" if found is None else f"; use {found}"
            raise ApiError(404, f"there is no such path{hint}", code="not_found")
        if method != "OPTIONS":
            message = f"the method {method[:16]} is not allowed: it must be one of {self._allow}"
            raise ApiError(405, message, allow=self._allow)
        await exchange.send_empty([(b"allow", self._allow.encode())])
