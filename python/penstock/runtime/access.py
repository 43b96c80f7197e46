"""Access to the routes: tokens, and clients of the same machine.

Processes of engines need a token. Everything else that changes something needs one, too, or comes from the
same machine if there are no tokens. The engine's key goes to the engine only, and only for such clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock.runtime.errors import ApiError
from penstock.server.errors import ApiError as HostError
from penstock.server.hosts import Hosts, names_this_machine
from penstock.server.keys import Keys, digest_of
from penstock.server.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.requests import Request

    from penstock.runtime.settings import RuntimeSettings

__all__ = ["Access", "Level"]

#: Requests to a route: all; those with a token if there are tokens; those that change adapters and models;
#: those about processes.
Level: TypeAlias = Literal["open", "read", "change", "engines"]

#: The addresses of clients on this machine. Proxies of service meshes connect from others of 127.0.0.0/8.
_LOCAL = ("127.0.0.1", "::1")
#: The beginnings of names of headers that proxies add: one on this machine has clients of others.
_FORWARDED = (
    *("cf-connecting-ip", "client-ip", "fastly-client-ip", "forwarded", "true-client-ip", "via"),
    *("x-client-ip", "x-cluster-client-ip", "x-envoy", "x-forwarded", "x-original-forwarded", "x-real-ip"),
)
_REMEDY = "needs a token, and the runtime has none: start it with --token-file or PENSTOCK_RUNTIME_TOKEN"


class Access:
    """Decides which requests are allowed, and with which key the engine is asked for them."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self._tokens = Keys(settings.tokens)
        self._hosts = Hosts(ServerSettings())
        self._is_open = settings.open_changes
        key = settings.engine_key
        #: The header for requests of the runtime itself.
        self.engine_authorization = None if key is None else f"Bearer {key}"

    def check(self, request: Request, level: Level) -> None:
        """Raise unless the request is allowed."""
        if level == "open" or self._has_token(request):
            return
        if self._tokens:
            raise ApiError(401, "AuthenticationError", "a valid token is required")
        if level == "read" or (level == "change" and self._is_open):
            return
        if level == "engines":
            raise ApiError(403, "PermissionError", f"a request about processes of engines {_REMEDY}")
        self._check_is_local(request)

    def authorization(self, request: Request, level: Level, key: str | None = None) -> str | None:
        """The header with which the engine is asked for a request that is allowed.

        It has `key`, or is the client's, or has the engine's own key. A token of the runtime never leaves it.
        """
        given = request.headers.get("authorization") if key is None else f"Bearer {key}"
        if given is not None and digest_of(_bearer(given)) not in self._tokens:
            return given
        return self.engine_authorization if self._may_use_key(request, level) else None

    def _may_use_key(self, request: Request, level: Level) -> bool:
        """Whether a request that is allowed may have the engine's key: not that of a stranger."""
        if level in ("change", "engines"):
            return True
        if self._tokens:
            return self._has_token(request)
        try:
            self._check_is_local(request)
        except ApiError:
            return False
        return True

    def _has_token(self, request: Request) -> bool:
        given = [_bearer(request.headers.get("authorization", ""))]
        given.append(request.headers.get("x-api-key", "").strip().encode())
        return any([digest_of(token) in self._tokens for token in given])  # noqa: C419 - all are compared

    def _check_is_local(self, request: Request) -> None:
        """A web page in a browser of this machine is no local client, either: its host or origin shows it."""
        is_forwarded = any(name.lower().startswith(_FORWARDED) for name in request.headers)
        if is_forwarded or request.client is None or request.client.host not in _LOCAL:
            raise ApiError(403, "PermissionError", f"a client of another machine or of a proxy {_REMEDY}")
        message = f"a request with this Host or Origin {_REMEDY}"
        hosts = request.headers.getlist("host")
        if not hosts or not all(map(names_this_machine, hosts)):
            raise ApiError(403, "PermissionError", message)
        try:
            self._hosts.check(request.headers)
        except HostError as error:
            raise ApiError(403, "PermissionError", message) from error


def _bearer(header: str) -> bytes:
    scheme, _, token = header.partition(" ")
    return token.strip().encode() if scheme.lower() == "bearer" else b""
