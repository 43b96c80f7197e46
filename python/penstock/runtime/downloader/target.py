"""The directory of a model on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ModelState", "model_directory", "model_state"]

#: `partial` is a download that was interrupted, or a model of which files are missing.
ModelState = Literal["absent", "downloading", "partial", "complete", "unknown"]


def model_directory(local_dir: Path, model_name: str) -> Path:
    """`local_dir/model_name`. Raises `InvalidArgumentError` if that is not below `local_dir`."""
    raise NotImplementedError


def model_state(directory: Path) -> tuple[ModelState, str | None]:
    """The state of a model's directory, and the kind of its source; None for other directories."""
    raise NotImplementedError
