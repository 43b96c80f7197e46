"""The JSON objects of requests: decoding with bounds, errors with the name of the field."""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from penstock._json import without_strings
from penstock.server.errors import ApiError, invalid

__all__ = ["LARGE", "converted", "decoded", "size_of_values"]

Structure = TypeVar("Structure")

#: A larger body is decoded in a thread. One of this size takes at most 4 ms.
LARGE = 32 << 10
#: Memory of a decoded value beyond its JSON: that of a token id in a list, and what others take more.
_VALUE_BYTES = 32
_STRING_BYTES = 48
_LIST_BYTES = 64
_OBJECT_BYTES = 160
#: Bounds of a body, which bound the memory and the time for its decoding: the decoder holds the interpreter.
_MAX_VALUES = 1 << 20
#: Lists, objects and fields of objects, which take more time than other values.
_MAX_STRUCTURE = 1 << 17
_MAX_NESTING = 64
_MAX_FIELDS = 1 << 10
#: A type that msgspec expects, and the limits of its value.
_EXPECTED = re.compile("Expected `([^`]*)`(.*?)(?:, got `[^`]*`)?")
_KINDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "object": "an object",
    "str": "a string",
}


def decoded(body: bytes) -> dict[str, Any]:
    """The JSON object of a text, without the fields that are null."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _nested_too_deeply() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        name = _not_finite(body)
        if name is not None:
            raise ApiError(400, f"{name} is not a finite number, as JSON requires", param=name) from None
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    if len(value) > _MAX_FIELDS:
        raise ApiError(400, f"the body has {len(value)} fields: the limit is {_MAX_FIELDS}")
    if body.count(b"[") + body.count(b"{") > _MAX_NESTING:
        _check_nesting(value)
    return {name: field for name, field in value.items() if field is not None}


def size_of_values(text: bytes, *, is_body: bool = True) -> int:
    """About the memory that the decoded values of a text take beyond its own size.

    Texts count with their bytes in UTF-8, which are a quarter of their memory in the worst case. Raises if a
    body has too many values.
    """
    values = structure = size = 0
    for part in without_strings(text):
        lists, objects = part.count(b"["), part.count(b"{")
        structure += lists + objects + part.count(b":")
        values += lists + objects + part.count(b",")
        size += part.count(b'"') * _STRING_BYTES + lists * _LIST_BYTES + objects * _OBJECT_BYTES
        if is_body and structure > _MAX_STRUCTURE:
            message = f"the body has too many lists, objects and fields: the limit is {_MAX_STRUCTURE}"
            raise ApiError(400, message)
        if is_body and values > _MAX_VALUES:
            raise ApiError(400, f"the body has too many values: the limit is {_MAX_VALUES}")
    return size + values * _VALUE_BYTES


def _check_nesting(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(_MAX_NESTING):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is list or type(item) is dict
        ]
        if not level:
            return
    raise _nested_too_deeply()


def _nested_too_deeply() -> ApiError:
    return ApiError(400, f"the body is nested too deeply: the limit is {_MAX_NESTING} levels")


def _not_finite(body: bytes) -> str | None:
    """The name of the first field that is NaN or infinite, in a text that is JSON otherwise."""
    if len(body) > LARGE:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return next((name for name, field in value.items() if _has_infinity(field)), None)


def _has_infinity(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_infinity, value.values()))
    return isinstance(value, list) and any(map(_has_infinity, value))


def converted(fields: dict[str, Any], structure: type[Structure]) -> Structure:
    """The fields of a request as a structure; unknown ones are omitted."""
    try:
        return msgspec.convert(fields, structure)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        of_key = "key` in `"
        name = path.rstrip("`").removeprefix(of_key).removeprefix("$").lstrip(".")
        if missing := re.search("missing required field `(.*)`", message):
            name = f"{name}.{missing[1]}".lstrip(".")
            raise ApiError(400, f"{name} is missing", param=name) from None
        has_value = not path.startswith(of_key) and "[...]" not in name
        if (expected := _EXPECTED.fullmatch(message)) and has_value:
            kinds = [_KINDS.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
            raise invalid(name, _value_at(fields, name), " or ".join(kinds) + expected[2]) from None
        raise ApiError(400, f"{name or 'the body'}: {message}", param=name or None) from None


def _value_at(fields: dict[str, Any], place: str) -> Any:
    """The value at a place such as `messages[0].role`."""
    value: Any = fields
    for part in re.findall(r"[^.\[\]]+", place):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value
