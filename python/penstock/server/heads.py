"""The limits of a request's head, which are checked before anything is looked up in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from starlette.types import Scope

__all__ = ["MAX_HEADERS", "Refusal", "bounded", "refusal_of"]

#: Headers of a request, and trailers of a body.
MAX_HEADERS = 100
_MAX_QUERY_BYTES = 4 << 10
_MAX_QUERY_FIELDS = 64
#: The item of the scope with the refusal.
_KEY = "penstock.refusal"


class Refusal(NamedTuple):
    """The status and the message for a head beyond a limit."""

    status: int
    message: str


def bounded(scope: Scope, max_bytes: int) -> Scope:
    """The scope of a request, without headers and query if they are beyond a limit.

    The time of each lookup grows with the number of headers, that of decoding with the fields of the query.
    """
    if scope["type"] != "http" or (refusal := _refusal(scope, max_bytes)) is None:
        return scope
    return {**scope, "headers": [], "query_string": b"", _KEY: refusal}


def refusal_of(scope: Scope) -> Refusal | None:
    """The refusal of a request, of which `bounded` has returned the scope."""
    found: Refusal | None = scope.get(_KEY)
    return found


def _refusal(scope: Scope, max_bytes: int) -> Refusal | None:
    headers, query = scope["headers"], scope["query_string"]
    if len(headers) > MAX_HEADERS:
        return Refusal(431, f"the request has too many headers: the limit is {MAX_HEADERS}")
    if len(query) > _MAX_QUERY_BYTES:
        return Refusal(414, f"the query has {len(query)} bytes: the limit is {_MAX_QUERY_BYTES}")
    if (number := query.count(b"&") + 1) > _MAX_QUERY_FIELDS:
        return Refusal(414, f"the query has {number} fields: the limit is {_MAX_QUERY_FIELDS}")
    size = sum(len(name) + len(value) for name, value in headers)
    if size + len(scope.get("raw_path") or b"") + len(query) > max_bytes:
        return Refusal(431, f"the headers are too large: the limit is {max_bytes} bytes")
    return None
