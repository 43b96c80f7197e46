"""Random LoRA adapters in PEFT's layout, written with numpy, without torch, and merged checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from support.api.checkpoints import (
    encode,
    make_weights,
    tensor_shapes,
    write_safetensors,
    write_tokenizer,
    write_typed_safetensors,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from support.api.checkpoints import Floats

    Typed = tuple[str, NDArray[Any]]

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


#: The prefix that PEFT gives to the names of modules.
PREFIX = "base_model.model."


def write_adapter(
    directory: Path,
    model: dict[str, Any],
    *,
    rank: int = 8,
    modules: Sequence[str] = MODULES,
    seed: int = 0,
    dtype: str = "float32",
    **changes: Any,
) -> Path:
    """Write an adapter of `modules` for a model of this configuration; returns `directory`.

    Its updates are about as large as the weights, so an output without it, or with a wrong scale, differs.
    `changes` are entries of `adapter_config.json`.
    """
    config = {"target_modules": list(modules), "r": rank, "lora_alpha": rank}
    tensors = make_tensors(model, rank=rank, modules=modules, seed=seed, dtype=dtype)
    return write_adapter_files(directory, config | changes, tensors)


def write_adapter_files(directory: Path, config: dict[str, Any], tensors: dict[str, Typed]) -> Path:
    """Write a configuration with the fields of `config`, and any tensors; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    common = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(common | config))
    write_typed_safetensors(directory / "adapter_model.safetensors", tensors)
    return directory


def make_tensors(
    model: dict[str, Any],
    *,
    rank: int = 8,
    modules: Sequence[str] = MODULES,
    seed: int = 0,
    dtype: str = "float32",
) -> dict[str, Typed]:
    """The tensors of an adapter, each with its dtype as safetensors files name it."""
    name_of_type = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    return {
        f"{PREFIX}{name}.lora_{part}.weight": (name_of_type, encode(values, dtype))
        for name, pair in make_updates(model, rank, modules, seed).items()
        for part, values in zip("AB", pair, strict=True)
    }


def make_updates(
    model: dict[str, Any], rank: int, modules: Sequence[str], seed: int
) -> dict[str, tuple[Floats, Floats]]:
    """A and B of each module."""
    generator = np.random.default_rng(seed)
    updates = {}
    for name, shape in tensor_shapes(model):
        module = name.removesuffix(".weight")
        if module == name or module.rpartition(".")[2] not in modules:
            continue
        rows, columns = shape
        a = generator.standard_normal((rank, columns), dtype=np.float32) / np.float32(columns**0.5)
        b = generator.standard_normal((rows, rank), dtype=np.float32) / np.float32(rank**0.5)
        updates[module] = (a, b)
    return updates


def write_merged(
    directory: Path,
    model: dict[str, Any],
    *,
    rank: int = 8,
    modules: Sequence[str] = MODULES,
    seed: int = 0,
    scale: float = 1.0,
    model_seed: int = 0,
) -> Path:
    """Write the float32 checkpoint of `write_checkpoint` with an adapter merged into its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    updates = make_updates(model, rank, modules, seed)
    tensors = {}
    for name, values in make_weights(model, model_seed):
        a, b = updates.get(name.removesuffix(".weight"), (None, None))
        delta = 0.0 if a is None or b is None else scale * (b.astype(np.float64) @ a.astype(np.float64))
        tensors[name] = (values + delta).astype(np.float32)
    (directory / "config.json").write_text(json.dumps(model))
    write_safetensors(directory / "model.safetensors", tensors, "float32")
    write_tokenizer(directory, model["vocab_size"])
    return directory
