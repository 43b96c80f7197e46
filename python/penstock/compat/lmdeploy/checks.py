"""Checks of the values of configurations. They raise `ArgumentError`."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from penstock._shown import shown
from penstock.compat.lmdeploy.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "check_arguments",
    "check_choice",
    "check_flags",
    "check_integer",
    "check_number",
    "place",
    "refuse",
    "token_ids",
]


def check_integer(
    config: object, *names: str, low: int = 0, high: int | None = None, optional: bool = False
) -> None:
    """Require that these fields are integers in this range, or also `None` if they are `optional`."""
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        try:
            number = low - 1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = low - 1
        if number < low or (high is not None and number > high):
            limit = f"an integer from {low}" if high is None else f"an integer from {low} to {high}"
            refuse(name, value, f"None or {limit}" if optional else limit)


def check_number(
    config: object, *names: str, low: float, high: float = math.inf, above_low: bool = False
) -> None:
    """Require that these fields are numbers in this range, or above its lower end."""
    for name in names:
        value = getattr(config, name)
        try:
            number = math.nan if isinstance(value, (bool, str)) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not low <= number <= high or (above_low and number == low):
            start = f"a number above {low:g}" if above_low else f"a number from {low:g}"
            refuse(name, value, start if high == math.inf else f"{start} to {high:g}")


def check_choice(config: object, name: str, choices: Iterable[Any]) -> None:
    """Require that a field is one of these values."""
    value = getattr(config, name)
    choices = list(choices)
    if not any(value == choice and isinstance(value, type(choice)) for choice in choices):
        refuse(name, value, f"one of {', '.join(map(repr, choices))}")


def check_flags(config: object, *names: str, is_strict: bool = False) -> None:
    """Require that these fields are `True` or `False`, or also 1 or 0 unless `is_strict`."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool if is_strict else int) or value not in (0, 1):
            refuse(name, value, "True or False")


def check_arguments(*, adapter_name: object = None, **flags: object) -> None:
    """Require that these arguments are `True` or `False`, and `adapter_name` a text or `None`."""
    check_flags(SimpleNamespace(**flags), *flags)
    if not isinstance(adapter_name, str | None):
        refuse("adapter_name", adapter_name, "None or the name of an adapter")


def token_ids(name: str, values: Any) -> list[int]:
    """The token ids of a sequence, an array or a tensor."""
    given = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        refuse(name, values, "a list of token ids")
    if all(type(token) is int for token in given):
        return list(given)
    ids = []
    for position, token in enumerate(given):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            refuse(f"{name}[{position}]", token, "a token id")
        ids.append(operator.index(token))
    return ids


def place(function: str, args: Sequence[Any], names: Sequence[str], given: dict[str, Any]) -> None:
    """Set the keywords with these names to positional arguments; `given` has those that the call has."""
    if len(args) > len(names):
        message = f"{function}() takes at most {len(names) + 1} positional arguments"
        raise TypeError(message)
    for name, value in zip(names, args, strict=False):
        if given[name] is not None and given[name] is not True:
            message = f"{function}() got multiple values for argument {name!r}"
            raise TypeError(message)
        given[name] = value


def refuse(name: str, value: object, limit: str) -> NoReturn:
    """Raise the error for a value of a field that must be `limit`."""
    raise ArgumentError(f"{name} is {shown(value)}; it must be {limit}")
