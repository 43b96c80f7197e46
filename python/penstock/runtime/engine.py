"""Requests to the engine: its models, adapters and metrics."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import msgspec
from yarl import URL

from penstock.runtime.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import aiohttp

    from penstock.runtime.settings import RuntimeSettings

__all__ = ["EngineClient", "RefusedError", "Reply"]

#: The routes that load and unload adapters, of the engines that have them.
_ADAPTER_ROUTES = {
    "penstock": ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    "sglang": ("/load_lora_adapter", "/unload_lora_adapter"),
    "vllm": ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}
#: The engines have these routes if they are started with certain options.
_START_OPTIONS = {
    "penstock": "start it with --max-adapters",
    "sglang": "start it with --enable-lora",
    "vllm": "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=true",
}
#: Messages of Starlette and of Penstock for unknown paths.
_NO_ROUTE = ("Not Found", "there is no such path")
#: The first version of vLLM with these routes.
_FIRST_VERSION = (0, 6, 1)
_MAX_CONNECTIONS = 10
_CONNECT_TIMEOUT = 10.0
_MAX_REPLY = 8 << 20
_MAX_ERROR = 64 << 10
_MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 307, 308})
#: Tries of a request to which the engine answers with a server error, and the bounds of the wait between two.
_TRIES = 3
_MIN_WAIT = 1.0
_MAX_WAIT = 10.0
_REFUSALS = frozenset({400, 404, 409, 422})
_KINDS = {404: "NotFoundError", 409: "ConflictError"}
_SERVER_ERROR = 500


class RefusedError(ApiError):
    """The engine refuses a request, and none before it may have had an effect."""


class Reply(NamedTuple):
    """A response of the engine."""

    status: int
    body: bytes
    #: Whether the engine had a server error before, after which it may have done the work.
    is_repeated: bool = False

    @property
    def error(self) -> type[ApiError]:
        """The kind of the error for a response that is none of success."""
        return RefusedError if self.status in _REFUSALS and not self.is_repeated else ApiError

    def text(self, limit: int = 1000) -> str:
        """The beginning of the body."""
        return self.body[:limit].decode(errors="replace")

    def reason(self) -> str:
        """The message of an error response in one of the usual forms, or the beginning of the body.

        The event loop decodes no long body.
        """
        if len(self.body) > _MAX_ERROR:
            return self.text()
        try:
            found = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        error = found.get("error", found) if isinstance(found, dict) else found
        message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        return message[:1000] if isinstance(message, str) else self.text()


class EngineClient:
    """The engine beside the runtime. It is asked at its address only, also if it redirects."""

    def __init__(
        self, settings: RuntimeSettings, sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    ) -> None:
        self.kind = settings.engine.lower()
        self.version = settings.engine_version
        self._endpoint = URL(settings.engine_endpoint.rstrip("/"))
        self._settings = settings
        self._sleep = sleep
        self._session: aiohttp.ClientSession | None = None

    @staticmethod
    def prepare() -> None:
        """Import the HTTP client, which takes longer than the rest of the start: it reads certificates."""
        import aiohttp  # noqa: F401

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        authorization: str | None = None,
        json: Any = None,
        query: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - of the transport
        limit: int = _MAX_REPLY,
    ) -> Reply:
        """Ask the engine once. Raises `ApiError` if there is no response within the time and the size."""
        import aiohttp

        total = self._settings.engine_timeout if timeout is None else timeout
        try:
            with anyio.fail_after(total):
                return await self._answer(method, self._url(path, query), authorization, json, limit)
        except TimeoutError as error:
            message = f"the engine did not answer within {total:g} seconds"
            raise ApiError(408, "TimeoutError", message) from error
        except aiohttp.ClientConnectorError as error:
            message = "the engine cannot be reached at the address of --engine-endpoint"
            raise ApiError(502, "ConnectionError", message) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            message = f"the request to the engine failed: {type(error).__name__}"
            raise ApiError(500, "RequestError", message) from error

    def _url(self, path: str, query: Mapping[str, str] | None) -> URL:
        path, _, text = path.partition("?")
        return (self._endpoint / path.removeprefix("/")).with_query(text or None).update_query(query)

    async def _answer(self, method: str, url: URL, authorization: str | None, json: Any, limit: int) -> Reply:
        if self._session is None:
            import aiohttp

            from penstock.runtime.interim import Response

            connector = aiohttp.TCPConnector(limit=_MAX_CONNECTIONS)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                response_class=Response,
            )
        headers = {"Accept-Encoding": "identity"}
        if authorization is not None:
            headers["Authorization"] = authorization
        for _ in range(_MAX_REDIRECTS):
            async with self._session.request(
                method, url, headers=headers, json=json, allow_redirects=False
            ) as response:
                target = response.headers.get("location", "")
                if response.status not in _REDIRECTS or not target:
                    return Reply(response.status, await _read(response, limit))
                url = url.join(URL(target))
                if url.origin() != self._endpoint.origin():
                    raise ApiError(502, "ConnectionError", "the engine redirects to another address")
        raise ApiError(502, "ConnectionError", f"the engine redirects more than {_MAX_REDIRECTS - 1} times")

    async def models(self, authorization: str | None) -> bytes:
        """The engine's list of models, as it is."""
        reply = await self.request("GET", "/v1/models", authorization=authorization)
        _check(reply, "listing models")
        return reply.body

    async def load_adapter(self, name: str, path: str, authorization: str | None) -> str:
        """Load an adapter; returns the text of the engine."""
        route = self.adapter_routes()[0]
        fields = {"lora_name": name, "lora_path": path}
        reply = await self._repeat(route, fields, authorization)
        if reply.status == 404 and reply.reason() in _NO_ROUTE:  # noqa: PLR2004 - not found
            message = f"the engine has no route {route}: {_START_OPTIONS[self.kind]}"
            raise reply.error(404, "NotFoundError", message)
        _check(reply, f"loading the adapter {name!r}")
        return reply.text()

    async def unload_adapter(self, name: str, number: int | None, authorization: str | None) -> Reply:
        """Unload an adapter; returns the response, with the status 404 if the engine did not have it."""
        route = self.adapter_routes()[1]
        fields: dict[str, Any] = {"lora_name": name}
        if number is not None:
            fields["lora_int_id"] = number
        reply = await self._repeat(route, fields, authorization)
        if reply.status == 404 or _is_not_found(reply):  # noqa: PLR2004 - not found
            return reply._replace(status=404)
        _check(reply, f"unloading the adapter {name!r}")
        return reply

    async def _repeat(self, route: str, fields: dict[str, Any], authorization: str | None) -> Reply:
        """Ask again while the engine has a server error. Loading and unloading twice is harmless."""
        reply = await self.request("POST", route, authorization=authorization, json=fields)
        wait = _MIN_WAIT
        for _ in range(_TRIES - 1):
            if reply.status < _SERVER_ERROR:
                break
            await self._sleep(wait)
            wait = min(2 * wait, _MAX_WAIT)
            reply = await self.request("POST", route, authorization=authorization, json=fields)
            reply = reply._replace(is_repeated=True)
        return reply

    def adapter_routes(self) -> tuple[str, str]:
        """The routes that load and unload adapters. Raises an error 501 for an engine without them."""
        routes = _ADAPTER_ROUTES.get(self.kind)
        if routes is None:
            message = f"adapters of the engine {self.kind!r} are not supported"
            raise ApiError(501, "NotImplementedError", message)
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.version)
        if (
            self.kind == "vllm"
            and found
            and tuple(int(part or 0) for part in found.groups()) < _FIRST_VERSION
        ):
            message = f"vLLM {self.version} has no adapters at run time: 0.6.1 or newer is required"
            raise ApiError(501, "NotImplementedError", message)
        return routes


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    parts = bytearray()
    async for part in response.content.iter_any():
        parts += part
        if len(parts) > limit:
            raise ApiError(502, "ServerError", f"the engine's response is larger than {limit} bytes")
    return bytes(parts)


def _is_not_found(reply: Reply) -> bool:
    """Whether this is the answer of older vLLM for an adapter that it does not have."""
    return reply.status == 400 and "cannot be found" in reply.reason()  # noqa: PLR2004 - bad request


def _check(reply: Reply, verb: str) -> None:
    """Raise the error of a response that is none of success; those of the client have its status."""
    if reply.status in (200, 201):
        return
    status = reply.status if 400 <= reply.status < _SERVER_ERROR else _SERVER_ERROR  # noqa: PLR2004
    message = f"the engine answers with status {reply.status} to {verb}: {reply.reason()}"
    raise reply.error(status, _KINDS.get(status, "ServerError"), message)
