"""`app`: the routes of the server as one ASGI application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from penstock.server.admin import (
    abort,
    load_adapter,
    model,
    models,
    reset_prefix_cache,
    sleep,
    unload_adapter,
    version,
    wake_up,
)
from penstock.server.anthropic import count_tokens, messages
from penstock.server.batch.answers import answer_line
from penstock.server.batch.batches import Batches
from penstock.server.batch.handlers import (
    cancel_batch,
    create_batch,
    create_file,
    delete_file,
    file_content,
    list_batches,
    list_files,
    read_batch,
    read_file,
)
from penstock.server.chat import chat_completions
from penstock.server.completions import completions
from penstock.server.embeddings import embeddings
from penstock.server.errors import ApiError
from penstock.server.heads import bounded
from penstock.server.limits import Action, Endpoint, RouteRow
from penstock.server.metrics import metrics
from penstock.server.openapi import openapi_handler
from penstock.server.page import page, page_file
from penstock.server.paths import forms_of
from penstock.server.probes import health, ping
from penstock.server.rerank import rerank, score
from penstock.server.responses.handlers import (
    cancel_response,
    create_response,
    delete_response,
    input_items,
    read_response,
)
from penstock.server.settings import ServerSettings
from penstock.server.state import State
from penstock.server.tokens import detokenize, tokenize
from penstock.server.tracing import Tracer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    import penstock
    from penstock.server.batch.lines import Answer, Line, Requester

__all__ = ["Application", "app"]

_ROUTES: tuple[RouteRow, ...] = (
    ("POST", "/v1/chat/completions", chat_completions, "generate"),
    ("POST", "/v1/completions", completions, "generate"),
    ("POST", "/v1/embeddings", embeddings, "generate"),
    ("POST", "/v1/rerank", rerank, "generate"),
    ("POST", "/v2/rerank", rerank, "generate"),
    ("POST", "/rerank", rerank, "generate"),
    ("POST", "/v1/score", score, "generate"),
    ("POST", "/score", score, "generate"),
    ("POST", "/v1/responses", create_response, "generate"),
    ("GET", "/v1/responses/{response_id}", read_response, "key"),
    ("DELETE", "/v1/responses/{response_id}", delete_response, "key"),
    ("POST", "/v1/responses/{response_id}/cancel", cancel_response, "key"),
    ("GET", "/v1/responses/{response_id}/input_items", input_items, "key"),
    ("POST", "/v1/files", create_file, "key"),
    ("GET", "/v1/files", list_files, "key"),
    ("GET", "/v1/files/{file_id}", read_file, "key"),
    ("DELETE", "/v1/files/{file_id}", delete_file, "key"),
    ("GET", "/v1/files/{file_id}/content", file_content, "key"),
    ("POST", "/v1/batches", create_batch, "key"),
    ("GET", "/v1/batches", list_batches, "key"),
    ("GET", "/v1/batches/{batch_id}", read_batch, "key"),
    ("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, "key"),
    ("POST", "/v1/messages", messages, "generate"),
    ("POST", "/v1/messages/count_tokens", count_tokens, "key"),
    ("POST", "/tokenize", tokenize, "key"),
    ("POST", "/detokenize", detokenize, "key"),
    ("POST", "/abort", abort, "key"),
    ("POST", "/reset_prefix_cache", reset_prefix_cache, "admin"),
    ("POST", "/sleep", sleep, "admin"),
    ("POST", "/wake_up", wake_up, "admin"),
    ("GET", "/version", version, "key"),
    ("GET", "/v1/models", models, "key"),
    ("GET", "/v1/models/{name:path}", model, "key"),
    ("GET", "/metrics", metrics, "key"),
    ("GET", "/health", health, "open"),
    ("GET", "/ping", ping, "open"),
)
#: Of a server with a model that can have adapters.
_ADAPTER_ROUTES: tuple[RouteRow, ...] = (
    ("POST", "/v1/load_lora_adapter", load_adapter, "admin"),
    ("POST", "/v1/unload_lora_adapter", unload_adapter, "admin"),
)
_PAGE_ROUTES: tuple[RouteRow, ...] = (
    ("GET", "/", page, "open"),
    ("GET", "/page/{name}", page_file, "open"),
)


#: Headers of responses that a web page of another origin can read.
_EXPOSED_HEADERS = ("X-Request-Id", "Request-Id", "Retry-After")


def _error_body(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """The form of the errors of a route."""
    return ApiError.anthropic_body if path.startswith("/v1/messages") else ApiError.body


@asynccontextmanager
async def _running_batches(batches: Batches | None) -> AsyncIterator[None]:
    """Run the batches while an ASGI server runs the application."""
    async with anyio.create_task_group() as group:
        if batches is not None:
            await group.start(batches.run)
        yield
        group.cancel_scope.cancel()


def _batches_of(state: State, root: str) -> Batches:
    def answer(line: Line, requester: Requester) -> Awaitable[Answer]:
        return answer_line(state, line, requester, lambda: None)

    keys = {*state.keys, *state.admin_keys}
    if not state.keys:
        keys.add(b"")  # of clients without a key
    return Batches(root, state.settings, keys, state.models, state.templates, answer)


class Application:
    """The server as an ASGI application; made by `app`."""

    def __init__(self, state: State) -> None:
        self.state = state
        if (root := state.settings.files_dir) is not None:
            state.batches = _batches_of(state, root)
        actions: dict[str, dict[str, Action]] = {}
        described = (*_ROUTES, *(_ADAPTER_ROUTES if state.adapters.models else ()))
        openapi: RouteRow = ("GET", "/openapi.json", openapi_handler(described), "key")
        pages = _PAGE_ROUTES if state.settings.chat_page else ()
        for method, path, handler, access in (*described, openapi, *pages):
            actions.setdefault(path, {})[method] = Action(handler, access)
        url = state.settings.otlp_traces_endpoint
        self.tracer = None if url is None else Tracer(url)
        endpoints = {
            path: Endpoint(state, path, found, _error_body(path), self.tracer)
            for path, found in actions.items()
        }
        routes = [Route(form, endpoint) for path, endpoint in endpoints.items() for form in forms_of(path)]
        other = Endpoint(state, None, {})
        self._application: ASGIApp = Router(
            routes, redirect_slashes=False, default=other, lifespan=lambda _: _running_batches(state.batches)
        )
        if origins := state.settings.cors_origins:
            self._application = CORSMiddleware(
                self._application,
                allow_origins=origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=_EXPOSED_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        scope = bounded(scope, self.state.settings.max_header_bytes)
        await self._application(scope, receive, send)


def app(
    engines: penstock.Engine | Mapping[str, penstock.Engine], settings: ServerSettings | None = None
) -> Application:
    """The ASGI application of one or more engines, to run with an ASGI server or to mount in an application.

    The keys of a mapping are the names of the models; several names can have one engine. An engine without a
    name is `"default"`. The application neither opens nor closes the engines: until an engine is open, its
    requests get status 503. With `files_dir`, batches run while an ASGI server runs the lifespan.
    """
    engines = dict(engines) if isinstance(engines, Mapping) else {"default": engines}
    return Application(State(engines, settings or ServerSettings()))
