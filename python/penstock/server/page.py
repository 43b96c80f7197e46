"""The chat page at `/`: static files that browsers get with strict headers."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from penstock.server.errors import ApiError

if TYPE_CHECKING:
    from penstock.server.http import Exchange
    from penstock.server.state import State

__all__ = ["File", "page", "page_file", "read_files"]

_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: Scripts and styles come from files of this server, requests go to it, and a script cannot parse HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # browsers ask whether the tag is the same
)


class File(NamedTuple):
    """A file and its headers."""

    body: bytes
    kind: str
    tag: str


@cache
def read_files(package: str = "penstock.server") -> dict[str, File]:
    """The files of the page by name. The package may be in an archive."""
    found = {}
    for item in files(package).joinpath("page").iterdir():
        kind = _KINDS.get(item.name[item.name.rfind(".") :])
        if kind is not None:
            body = item.read_bytes()
            found[item.name] = File(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


async def page(_state: State, exchange: Exchange) -> None:
    """The chat page."""
    await _send("index.html", exchange)


async def page_file(_state: State, exchange: Exchange) -> None:
    """A file of the chat page."""
    await _send(exchange.scope["path_params"]["name"], exchange)


async def _send(name: str, exchange: Exchange) -> None:
    file = read_files().get(name)
    if file is None:
        raise ApiError(404, "there is no such path", code="not_found")
    exchange.headers += [*_HEADERS, (b"etag", file.tag.encode())]
    tags = exchange.request_headers.get("if-none-match", "")
    if file.tag in (tag.strip().removeprefix("W/") for tag in tags.split(",")):
        exchange.status = 304
        await exchange.send({"type": "http.response.start", "status": 304, "headers": exchange.headers})
        await exchange.send({"type": "http.response.body"})
        return
    await exchange.send_bytes(file.body, file.kind)
