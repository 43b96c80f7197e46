"""`app`: the routes of the runtime as one ASGI application."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router

from penstock.runtime.engines import handlers as engines
from penstock.runtime.errors import ApiError, api_error
from penstock.runtime.handlers import (
    BODY_READ,
    cancel_download,
    download_model,
    has_body,
    healthz,
    list_models,
    load_adapter,
    models,
    ready,
    unload_adapter,
)
from penstock.runtime.metrics import metrics
from penstock.runtime.settings import RuntimeSettings
from penstock.runtime.state import State
from penstock.server.disconnects import DisconnectedError
from penstock.server.heads import bounded, refusal_of
from penstock.server.logs import AccessRecord, access_logger, client_of, request_id, unknown_path_of
from penstock.server.paths import forms_of
from penstock.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Receive, Scope, Send

    from penstock.runtime.access import Level

__all__ = ["Application", "app"]

Handler: TypeAlias = Callable[[State, Request], Awaitable[Response]]


class _Action(NamedTuple):
    """The answer to one method of a path."""

    handler: Handler
    level: Level


_ROUTES: tuple[tuple[str, str, Handler, Level], ...] = (
    ("GET", "/healthz", healthz, "open"),
    ("GET", "/ready", ready, "open"),
    ("GET", "/metrics", metrics, "open"),
    ("GET", "/v1/models", models, "read"),
    ("POST", "/v1/lora_adapter/load", load_adapter, "change"),
    ("POST", "/v1/lora_adapter/unload", unload_adapter, "change"),
    ("POST", "/v1/model/download", download_model, "change"),
    ("DELETE", "/v1/model/download", cancel_download, "change"),
    ("GET", "/v1/model/list", list_models, "read"),
    ("POST", "/v1/runtime/models/activate", engines.activate, "engines"),
    ("POST", "/v1/runtime/models/deactivate", engines.deactivate, "engines"),
    ("POST", "/v1/runtime/models/kv-limit", engines.limit_kv_cache, "engines"),
    ("POST", "/v1/runtime/models/sleep", engines.sleep, "engines"),
    ("POST", "/v1/runtime/models/wake", engines.wake, "engines"),
    ("GET", "/v1/runtime/models", engines.engines, "engines"),
    ("GET", "/v1/runtime/snapshot", engines.snapshot, "engines"),
)
#: Routes that are logged only for debugging.
_PROBES = frozenset({"/healthz", "/ready", "/metrics"})
_DISCONNECTED = 499
_DISCONNECTS = (ClientDisconnect, DisconnectedError)
_LABEL = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def _described_routes() -> tuple[tuple[str, str, Handler, Level], ...]:
    """The routes that describe the others."""
    from penstock.runtime.openapi import document, page

    description = document(_ROUTES)

    async def openapi(_state: State, _request: Request) -> Response:
        return JSONResponse(description)

    async def docs(_state: State, _request: Request) -> Response:
        return HTMLResponse(page(description))

    return (("GET", "/openapi.json", openapi, "read"), ("GET", "/docs", docs, "read"))


def _check_head(request: Request) -> None:
    if (refusal := refusal_of(request.scope)) is not None:
        raise ApiError(refusal.status, "HeadTooLargeError", refusal.message)


class _Endpoint:
    """The methods of a path as an ASGI application; `HEAD` is answered as `GET`."""

    def __init__(self, state: State, path: str | None, actions: Mapping[str, _Action]) -> None:
        self._state = state
        self._path = path
        self._actions = dict(actions)
        if "GET" in self._actions:
            self._actions.setdefault("HEAD", self._actions["GET"])
        self._allow = ", ".join(sorted({*self._actions, "OPTIONS"}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        begin = time.perf_counter()
        request = Request(scope, receive)
        label = request.headers.get("x-request-id", "")
        label = label if _LABEL.fullmatch(label) else secrets.token_hex(16)
        token = request_id.set(label)
        status, size = _DISCONNECTED, 0
        try:
            response = await self._answer(request)
            response.headers["x-request-id"] = label
            status, size = response.status_code, len(response.body)
            await response(scope, receive, send)
        except (*_DISCONNECTS, OSError):
            status = _DISCONNECTED
        finally:
            seconds = time.perf_counter() - begin
            self._state.measures.add(request.method, self._path, status, seconds)
            self._log(request, status, size, seconds)
            request_id.reset(token)

    async def _answer(self, request: Request) -> Response:
        state = self._state
        try:
            _check_head(request)
            action = self._actions.get(request.method)
            state.access.check(request, "read" if action is None else action.level)
            if action is None:
                return self._answer_other(request)
            if action.level in ("open", "read"):
                return await action.handler(state, request)
            with state.change():
                return await action.handler(state, request)
        except _DISCONNECTS:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of the request
            found = api_error(error)
            return JSONResponse(found.body(), found.status, self._error_headers(request, found))

    def _answer_other(self, request: Request) -> Response:
        """Answer a request with another method, or for an unknown path."""
        if self._path is None:
            message = "there is no such path"
            raise ApiError(404, "NotFoundError", message, fields={"detail": "Not Found"})
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"allow": self._allow})
        message = f"the method {request.method[:16]} is not allowed: it must be one of {self._allow}"
        raise ApiError(405, "MethodNotAllowedError", message, fields={"detail": "Method Not Allowed"})

    def _error_headers(self, request: Request, error: ApiError) -> dict[str, str]:
        headers = {}
        if error.status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["allow"] = self._allow
        if error.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        if error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            headers["retry-after"] = "1"
        if has_body(request) and not request.scope.get(BODY_READ):
            headers["connection"] = "close"
        return headers

    def _log(self, request: Request, status: int, size: int, seconds: float) -> None:
        level = logging.DEBUG if self._path in _PROBES else logging.INFO
        if not access_logger.isEnabledFor(level):
            return
        record = AccessRecord(
            method=request.method[:16],
            path=self._path or unknown_path_of(request.scope),
            status=status,
            milliseconds=round(1000 * seconds, 1),
            bytes=size,
            client=client_of(request.scope),
            key=None,
            model=None,
            prompt_tokens=None,
            completion_tokens=None,
        )
        access_logger.log(level, record)


class Application:
    """The runtime as an ASGI application; made by `app`. Operations and downloads need its lifespan."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.state = State(settings)
        actions: dict[str, dict[str, _Action]] = {}
        described = _described_routes() if settings.enable_fastapi_docs else ()
        for method, path, handler, level in (*_ROUTES, *described):
            actions.setdefault(path, {})[method] = _Action(handler, level)
        endpoints = {path: _Endpoint(self.state, path, found) for path, found in actions.items()}
        routes = [Route(form, endpoint) for path, endpoint in endpoints.items() for form in forms_of(path)]
        self._router = Router(
            routes,
            redirect_slashes=False,
            default=_Endpoint(self.state, None, {}),
            lifespan=self.state.lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._router(bounded(scope, ServerSettings.max_header_bytes), receive, send)


def app(settings: RuntimeSettings | None = None) -> Application:
    """The ASGI application of the runtime, to run with an ASGI server."""
    return Application(settings or RuntimeSettings())
