"""`convert`: writes packed weights, which an engine uses without loading them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import _core, _hub
from penstock._session import default_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._options import EngineOptions, Quantization, WeightDtype

__all__ = ["convert"]


def convert(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    quantization: Quantization | None = "auto",
    dtype: WeightDtype | None = "auto",
    threads: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Path:
    """Write a model with packed weights, which `Engine(output)` maps into memory instead of loading them.

    `model` is a path or a model of the Hugging Face hub. `output` becomes a directory with the
    files `model.penstock` and `weights.safetensors`, or one archive of both if its name ends with `.tar`.
    Returns its path. Nothing is left behind on failure.

    `quantization`, `dtype` and `threads` are those of `EngineConfig`. `overwrite` replaces a converted model.
    `progress(done, total)` is called with byte counts; an exception raised in it stops the conversion.

    Raises `ConfigError`, also if `output` exists, `ModelLoadError`, and `OSError` if the files cannot be
    written.
    """
    options: EngineOptions = {"quantization": quantization, "dtype": dtype, "threads": threads}
    config = _core.EngineConfig(**options)
    path = Path(os.path.expanduser(os.fspath(output)))  # noqa: PTH111 - never raises
    _core.check_output(path, overwrite=overwrite)
    files = _hub.find(os.fspath(model))
    _core.convert(files, path, config, default_host(), overwrite=overwrite, progress=progress)
    return path
