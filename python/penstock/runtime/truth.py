"""Values of variables and options that are true or false."""

from __future__ import annotations

__all__ = ["truth_of"]

_VALUES = {
    **dict.fromkeys(("1", "on", "yes", "true"), True),
    **dict.fromkeys(("0", "off", "no", "false"), False),
}


def truth_of(text: str) -> bool | None:
    """Whether AIBrix reads the text as true; None for a text that is neither true nor false."""
    return _VALUES.get(text.strip().lower())
