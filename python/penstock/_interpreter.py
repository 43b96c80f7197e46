"""Refuses to be imported in a sub-interpreter: the engine's threads attach to the main interpreter."""

from __future__ import annotations

import importlib
from contextlib import suppress


def _is_main() -> bool:
    """Whether this is the main interpreter, as far as this Python can tell."""
    for name in ("_interpreters", "_xxsubinterpreters"):
        with suppress(ImportError):
            interpreters = importlib.import_module(name)
            return bool(interpreters.get_current() == interpreters.get_main())
    return True


if not _is_main():
    _message = "penstock does not support sub-interpreters; import it in the main interpreter of a process"
    raise ImportError(_message, name="penstock")
