"""The bytes of server-sent events. The constant parts of a stream are encoded once."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["DONE", "KEEP_ALIVE", "event", "json_bytes", "named_event"]

_encode = msgspec.json.Encoder().encode
#: The characters beyond ASCII at which `str.splitlines` ends a line, in UTF-8, and their JSON escapes.
_LINE_ENDS = (
    ("\x85".encode(), rb"\u0085"),
    ("\u2028".encode(), rb"\u2028"),
    ("\u2029".encode(), rb"\u2029"),
)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def json_bytes(value: Any) -> bytes:
    """The JSON text of a value. It is one line, also for clients that read lines with `str.splitlines`."""
    text = _encode(value)
    if not text.isascii():
        for line_end, escape in _LINE_ENDS:
            text = text.replace(line_end, escape)
    return text


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One event under the name of its type."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\n" + event(value)
