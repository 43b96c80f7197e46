"""JSON of callers and files. The parser recurses as deep as a text is nested, so deep texts are refused."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MAX_NESTING", "MAX_SCHEMA", "loads", "number_of_values", "without_strings"]

MAX_NESTING = 100
"""Maximum nesting depth of objects and arrays."""

MAX_SCHEMA = 1 << 20
"""Maximum length of a schema that is given as a text. The engine has the same limit, in bytes."""

#: A string, also one without an end, or a bracket.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
#: The interpreter is released after a part of this size.
_PART = 1 << 18


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
    parts = without_strings(text.encode(errors="surrogatepass"))
    return sum(part.count(b"[") + part.count(b"{") + part.count(b",") for part in parts)


def without_strings(text: bytes) -> Iterator[bytes]:
    """The text in parts, in which each string is one quotation mark; one between two parts is left out."""
    begin = 0
    is_in_string = False
    while begin < len(text):
        end = begin + _PART
        part = text[begin:end]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # the last character escapes the next one
            end += 1
            part = text[begin:end]
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b'"'.join(pieces[is_in_string::2])
        is_in_string ^= len(pieces) % 2 == 0
        begin = end
