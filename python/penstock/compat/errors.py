"""`UnsupportedError`: a value of another engine's API that Penstock does not support."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import penstock
from penstock._shown import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["UnsupportedError", "invalid", "refuse", "refuse_all", "renamed", "unexpected"]

FieldError = TypeVar("FieldError", penstock.ConfigError, penstock.InvalidRequestError)


class UnsupportedError(ValueError):
    """A value that Penstock does not support. The message names the field, the value and the reason."""


def invalid(name: str, value: object, limit: str) -> penstock.InvalidRequestError:
    """The error for the value of an argument, in the words of those of Penstock."""
    message = f"{name}={shown(value)} is not allowed: it must be {limit}"
    return penstock.InvalidRequestError(message, name, value, limit)


def refuse(name: str, value: object, reason: str) -> NoReturn:
    """Raise the error for the value of a field."""
    raise UnsupportedError(f"{name} is {shown(value)}; it is not supported: {reason}")


def refuse_all(given: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, str]]) -> None:
    """Raise the error for a field that has another value than the accepted one; `unsupported` has reasons."""
    for name, (accepted, reason) in unsupported.items():
        value = given.get(name, accepted)
        if value != accepted:
            refuse(name, value, reason)


def unexpected(function: str, keyword: str, names: Iterable[str]) -> TypeError:
    """The error for an argument that a function does not have, with the most similar one of its `names`."""
    similar = difflib.get_close_matches(keyword, list(names), 1)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    return TypeError(f"{function}() got an unexpected keyword argument {keyword!r}{hint}")


def renamed(error: FieldError, names: Mapping[str, str]) -> FieldError:
    """The error of a field with the name that the other engine has for it."""
    field = error.field or ""
    name = names.get(field, field)
    return type(error)(str(error).replace(field, name, 1), name, error.value, error.limit)
