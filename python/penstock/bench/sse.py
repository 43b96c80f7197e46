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
_MAX_COUNT = 1 << 53


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

    The events of the role and of the finish reason have none. The last two events are decoded at the end:
    they have the finish reason and the usage.
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
            elif data := _data(event):
                if data == b"[DONE]":
                    self._is_done = True
                else:
                    self._last = self._last[1], event
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise StreamError("event too large", f"an event has more than {_MAX_EVENT_BYTES} bytes")

    def end(self, now: float) -> dict[str, int]:
        """The counts of the usage at the end of the stream, empty if there is none. Raises `StreamError`.

        Servers may leave out the empty line after the last event, and `[DONE]` after a finish reason.
        """
        self.feed(b"\n\n", now)
        usage: object = None
        is_done = self._is_done
        for event in self._last:
            fields = _fields(event)
            if error := fields.get("error"):
                message = error.get("message", "") if isinstance(error, dict) else error
                raise StreamError("error event", str(message))
            usage = fields.get("usage") or usage
            is_done = is_done or _is_last(fields)
        if not is_done:
            raise StreamError(
                "incomplete stream", "the stream ended without [DONE] and without a finish reason"
            )
        counts = usage.items() if isinstance(usage, dict) else ()
        return {name: count for name, count in counts if isinstance(count, int) and 0 <= count < _MAX_COUNT}


def _is_last(fields: dict[str, Any]) -> bool:
    """Whether a complete stream can end with this event: it has a finish reason, or only the usage."""
    choices = fields.get("choices")
    if not choices:
        return bool(fields.get("usage"))
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") for choice in choices
    )


def _data(event: bytes) -> bytes:
    """The data of an event, without other fields and comments."""
    lines = event.split(b"\n")
    return b"\n".join(line.removeprefix(b"data:") for line in lines if line.startswith(b"data:")).strip()


def _fields(event: bytes) -> dict[str, Any]:
    """The JSON object of an event's data."""
    data = _data(event)
    try:
        value = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        raise StreamError("invalid event", repr(event[:200])) from None
    return value if isinstance(value, dict) else {}
