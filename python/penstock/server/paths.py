"""Paths that requests name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["within"]


def within(path: str | Path, roots: Iterable[Path]) -> Path | None:
    """The path without links and dots, if it is one of these folders or below."""
    try:
        found = Path(path).resolve()
        return found if any(found.is_relative_to(root.resolve()) for root in roots) else None
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a NUL
        return None
