"""JSON of callers and files. The parser recurses as deep as a text is nested, so deep texts are refused."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["MAX_NESTING", "loads", "number_of_values"]

MAX_NESTING = 100
"""Maximum nesting depth of objects and arrays."""

#: A string, also one without an end.
_STRING = r'"(?:[^"\\]|\\.)*+"?'
_STRINGS = re.compile(_STRING, re.DOTALL)
_TOKEN = re.compile(rf"{_STRING}|[\[\]{{}}]", re.DOTALL)


def loads(text: str | bytes) -> Any:
    """`json.loads`, for threads with any stack. Raises `ValueError`."""
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    if text.count("[") + text.count("{") > MAX_NESTING:
        depth = 0
        for match in _TOKEN.finditer(text):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
            if depth > MAX_NESTING:
                message = f"the text is nested deeper than {MAX_NESTING} at position {match.start()}"
                raise ValueError(message)
    return json.loads(text)


def number_of_values(text: str) -> int:
    """The number of values in the lists and objects of a text, by its commas and opening brackets."""
    return sum(map(_STRINGS.sub("", text).count, "[{,"))
