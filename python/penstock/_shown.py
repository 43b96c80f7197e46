"""`shown`: a value of a user in an error message."""

from __future__ import annotations

import reprlib

__all__ = ["shown"]


def shown(value: object) -> str:
    """The value, shortened if it is long, or its type if it has no text. Raises no error."""
    try:
        return reprlib.repr(value)
    except Exception:  # noqa: BLE001 - Python limits the digits and the levels; `__repr__` is the user's
        return f"a value of the type {type(value).__name__}"
