"""A program that compares quantised models on the CUDA device with their values in float32 on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from support.checkpoints import make_config, write_checkpoint
from support.ggufs import TYPES, VOCABULARY, write_gguf
from support.quantised import METHODS, write_quantised
from support.running import compute_logits, random_prompt

#: Prompts of one token, of a block and a bit, and of two chunks: products of all kernels.
LENGTHS = (1, 17, 100)
SIZES: dict[str, Any] = {"max_model_len": 160, "max_num_batched_tokens": 96, "max_num_seqs": 4, "threads": 1}
PARAMS = penstock.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, output_logits="all")
#: Quantisation when a model is loaded, and the CPU's name of the same codes with float32 activations.
SAME_CODES = {"int4": "w4a16", "int8": "w8a16", "w4a16": "w4a16", "w8a16": "w8a16", "fp8": "fp8"}


def write_model(folder: Path, name: str) -> tuple[Path, int]:
    """A GGUF file of a type, a quantised checkpoint, or a plain one; and the size of its vocabulary."""
    if name in TYPES:
        write_gguf(folder / "model.gguf", TYPES[name])
        return folder / "model.gguf", VOCABULARY
    if name.startswith("file: "):
        write_quantised(folder, METHODS[name.removeprefix("file: ")])
    else:
        write_checkpoint(folder, make_config("llama"))
    return folder, 256


def compare(*names: str) -> dict[str, dict[str, Any]]:
    """For each model, the formats of its matrices on the device, and the largest error of its logits."""
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model, vocabulary = write_model(Path(folder), name)
            options = {"quantization": name if name in SAME_CODES else "auto"}
            prompts = [random_prompt(length, vocabulary_size=vocabulary, seed=length) for length in LENGTHS]
            with penstock.Engine(model, device="cuda", **SIZES | options) as engine:
                items = list(engine.blocking.generate_many(prompts, PARAMS))
                formats = sorted({info.format for info in engine.info.weight_formats})
            errors = []
            for prompt, item in zip(prompts, items, strict=True):
                assert item.result is not None, item
                logits = np.asarray(item.result.logits)[: len(prompt)]
                exact = compute_logits(model, prompt, quantization=SAME_CODES.get(name, "none"))
                errors.append(float(np.sqrt(np.mean((logits - exact) ** 2) / np.var(exact))))
        found[name] = {"formats": formats, "error": max(errors)}
    return found
