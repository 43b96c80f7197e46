"""`app`: the routes of the server as one ASGI application."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.routing import Route, Router

from penstock.server.admin import (
    abort,
    health,
    model,
    models,
    ping,
    reset_prefix_cache,
    sleep,
    version,
    wake_up,
)
from penstock.server.anthropic import count_tokens, messages
from penstock.server.chat import chat_completions
from penstock.server.completions import completions
from penstock.server.errors import ApiError
from penstock.server.limits import Access, Endpoint, Handler, not_found
from penstock.server.metrics import metrics
from penstock.server.responses.handlers import create_response
from penstock.server.settings import ServerSettings
from penstock.server.state import State
from penstock.server.tokens import detokenize, tokenize

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    import penstock

__all__ = ["Application", "app"]

_ROUTES: tuple[tuple[str, str, Handler, Access], ...] = (
    ("POST", "/v1/chat/completions", chat_completions, "key"),
    ("POST", "/v1/completions", completions, "key"),
    ("POST", "/v1/responses", create_response, "key"),
    ("POST", "/v1/messages", messages, "key"),
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
    ("GET", "/metrics", metrics, "monitor"),
    ("GET", "/health", health, "open"),
    ("GET", "/ping", ping, "open"),
)


def _error_body(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """The form of the errors of a route."""
    return ApiError.anthropic_body if path.startswith("/v1/messages") else ApiError.body


class Application:
    """The server as an ASGI application; made by `app`."""

    def __init__(self, state: State) -> None:
        self.state = state
        routes = [
            Route(path, Endpoint(state, path, method, handler, access, _error_body(path)))
            for method, path, handler, access in _ROUTES
        ]
        self._router: ASGIApp = Router(
            routes, redirect_slashes=False, default=Endpoint(state, None, None, not_found)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._router(scope, receive, send)


def app(
    engines: penstock.Engine | Mapping[str, penstock.Engine], settings: ServerSettings | None = None
) -> Application:
    """The ASGI application of one or more engines, to run with an ASGI server or to mount in an application.

    The keys of a mapping are the names of the models; several names can have one engine. An engine without a
    name is `"default"`. The application neither opens nor closes the engines: until an engine is open, its
    requests get status 503.
    """
    engines = dict(engines) if isinstance(engines, Mapping) else {"default": engines}
    return Application(State(engines, settings or ServerSettings()))
