"""Short names of models, which `models.toml` lists."""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["aliases", "default_alias", "nearest_alias"]


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))


def aliases() -> dict[str, str]:
    """The name on the hub of each alias, from the smallest model to the largest."""
    models: dict[str, str] = _table()["models"]
    return models


def default_alias() -> str:
    """The alias of the model that `penstock chat` offers."""
    name: str = _table()["default"]
    return name


def nearest_alias(name: str) -> str | None:
    """The alias most like a name, or like the last part of a name on the hub; None if none is like it."""
    last = name.rpartition("/")[2].lower()
    found = difflib.get_close_matches(last, aliases(), n=1, cutoff=0.7)
    return found[0] if found else None
