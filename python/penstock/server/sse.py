"""The bytes of server-sent events. The constant parts of a stream are encoded once."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["DONE", "KEEP_ALIVE", "event", "json_bytes", "named_event"]

#: The JSON text of a value.
json_bytes = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One event under the name of its type."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\n" + event(value)
