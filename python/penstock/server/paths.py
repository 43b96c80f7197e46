"""Paths of routes, and paths of files that requests name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["forms_of", "within"]


def forms_of(path: str) -> tuple[str, ...]:
    """The forms of a route's path, which is the same with a slash at its end.

    A redirect to one form could lose the body or the key. The form with the slash is first: a parameter at
    the end of a path may have any text.
    """
    return (path,) if path.endswith("/") else (f"{path}/", path)


def within(path: str | Path, roots: Iterable[Path]) -> Path | None:
    """The path without links and dots, if it is one of these folders or below."""
    try:
        found = Path(path).resolve()
        return found if any(found.is_relative_to(root.resolve()) for root in roots) else None
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a NUL
        return None
