"""Code of the documents, with a local model in place of the one that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._hub_aliases import default_alias

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["with_model"]


def with_model(code: str, model: Path) -> str:
    """The code with this path in place of the models of the examples."""
    for name in ("path/to/model", default_alias()):
        code = code.replace(f'"{name}"', repr(str(model)))
    return code
