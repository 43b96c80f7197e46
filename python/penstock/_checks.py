"""Checks of arguments, before the core reads them: its errors for other types do not name the argument."""

from __future__ import annotations

import os

from penstock._shown import shown
from penstock.errors import InvalidRequestError

__all__ = ["check_adapter_name", "check_flag", "check_path", "invalid"]


def invalid(name: str, value: object, limit: str) -> InvalidRequestError:
    """The error for the value of an argument."""
    message = f"{name}={shown(value)} is not allowed: it must be {limit}"
    return InvalidRequestError(message, name, value, limit)


def check_flag(name: str, value: object) -> None:
    """Refuse what is no `bool`."""
    if not isinstance(value, bool):
        raise invalid(name, value, "True or False")


def check_path(name: str, value: object) -> None:
    """Refuse what is no path."""
    if not isinstance(value, (str, os.PathLike)):
        raise invalid(name, value, "a path")


def check_adapter_name(name: object) -> None:
    """Refuse what the core cannot read; it checks the length."""
    if not isinstance(name, str) or any("\ud800" <= character <= "\udfff" for character in name):
        raise invalid("name", name, "text without lone surrogates")
