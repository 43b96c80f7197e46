"""Counts the events of a stream without decoding their JSON."""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

__all__ = ["EventReader", "StreamError"]

#: Output in an event: a text that is not empty. Only keys match: a quotation mark inside a JSON string
#: follows a backslash.
_has_output = re.compile(
    rb'"(?:text|content|reasoning|reasoning_content|arguments|name)"\s*:\s*"(?!")'
).search

_MAX_EVENT_BYTES = 16 << 20
_MAX_MESSAGE = 200


class StreamError(Exception):
    """A stream that reports an error, or that is not one of OpenAI's API; `kind` is short and constant.

    The message is one line of printable characters: a server must not control the terminal.
    """

    def __init__(self, kind: str, message: str) -> None:
        printable = "".join(letter if letter.isprintable() else " " for letter in message)
        super().__init__(" ".join(printable.split())[:_MAX_MESSAGE])
        self.kind = kind


class EventReader:
    """Notes the time of each event that has output.

    The events of the role and of the finish reason have none. The last two events are decoded at the end: one
    of them has the usage.
    """

    def __init__(self) -> None:
        self.times = array("d")
        self._rest = b""
        self._last: tuple[bytes, bytes] = (b"", b"")
        self._is_done = False

    def feed(self, data: bytes, now: float) -> None:
        """Read bytes that arrived at this time."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if _has_output(event):
                self.times.append(now)
                self._last = self._last[1], event
            elif event.startswith(b"data: [DONE]"):
                self._is_done = True
            elif not event.startswith(b":"):
                self._last = self._last[1], event
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise StreamError("event too large", f"an event has more than {_MAX_EVENT_BYTES} bytes")

    def usage(self) -> dict[str, Any]:
        """The usage at the end of the stream, empty if there is none. Raises `StreamError`."""
        usage: dict[str, Any] = {}
        for event in self._last:
            fields = _fields(event)
            if "error" in fields:
                error = fields["error"]
                message = error.get("message", "") if isinstance(error, dict) else error
                raise StreamError("error event", str(message))
            usage = fields.get("usage") or usage
        if not self._is_done:
            raise StreamError("incomplete stream", "the stream ended without [DONE]")
        return usage


def _fields(event: bytes) -> dict[str, Any]:
    """The JSON object of an event's data."""
    data = b"\n".join(line.removeprefix(b"data:") for line in event.split(b"\n") if line.startswith(b"data:"))
    try:
        value = json.loads(data) if data else {}
    except ValueError:
        raise StreamError("invalid event", repr(event[:200])) from None
    return value if isinstance(value, dict) else {}
