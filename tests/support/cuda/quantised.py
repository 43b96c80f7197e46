"""A program that compares quantised models on the CUDA device with their values in float32 on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from support.api.checkpoints import make_config, write_checkpoint
from support.api.ggufs import TYPES, VOCABULARY, write_gguf
from support.api.quantised import METHODS, write_quantised
from support.api.running import compute_logits, random_prompt

#: Prompts of one token, of a block and a bit, and of two chunks: products of several kernels.
LENGTHS = (1, 17, 100)
SIZES: dict[str, Any] = {"max_model_len": 160, "max_num_batched_tokens": 96, "max_num_seqs": 4, "threads": 1}
PARAMS = penstock.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, output_logits="all")
#: Quantisation when a model is loaded, and the CPU's name of the same codes with float32 activations.
SAME_CODES = {"int4": "w4a16", "int8": "w8a16", "w4a16": "w4a16", "w8a16": "w8a16", "fp8": "fp8"}

#: Models of which products have 8-bit integers for activations.
INTEGER_ACTIVATIONS = {*TYPES, "file: w8a8", "int4", "int8"}


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
    """For each model, the formats of its matrices on the device, and the errors of its logits.

    `error` is the largest against the CPU with float32 activations. `differences` are those against the CPU
    with the same activations, if they are integers, and attention in float32: other values would have other
    integers. `is_same` says whether the model has the same logits after it was converted, which packs it for
    the CPU.
    """
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model, vocabulary = write_model(Path(folder), name)
            quantization: Any = name if name in SAME_CODES else "auto"
            prompts = [random_prompt(length, vocabulary_size=vocabulary, seed=length) for length in LENGTHS]
            logits, formats, activations = logits_of(model, prompts, quantization)
            converted = Path(folder) / "converted"
            penstock.convert(model, converted, quantization=quantization)
            again = logits_of(converted, prompts)
            is_same = (formats, activations) == again[1:] and all(map(np.array_equal, logits, again[0]))
            error = max(errors(model, prompts, logits, SAME_CODES.get(name, "none")))
            differences = []
            if name in INTEGER_ACTIVATIONS:
                logits, *_ = logits_of(model, prompts, quantization, kv_cache_dtype="float32")
                differences = errors(model, prompts, logits, quantization)
        found[name] = {
            "formats": formats,
            "activations": activations,
            "error": error,
            "differences": differences,
            "is_same": is_same,
        }
    return found


def has_same_logits_in_chunks(name: str) -> bool:
    """Whether a prompt with products of many tiles has the same logits in one step and in chunks."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), make_config("llama", intermediate_size=512))
        found = [
            logits_of(model, [random_prompt(128)], name, max_num_batched_tokens=budget)[0]
            for budget in (128, 48)
        ]
    return all(map(np.array_equal, *found))


def mixed_layers() -> list[float]:
    """The largest error of the logits of a float32 model with one quantised layer: the first, or the last.

    The attention of the layers has different kernels, which read the same division of a prompt. It depends on
    the kernels that were used before: the warm-up uses those of one layer.
    """
    prompts = [random_prompt(150)]  # two steps
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), make_config("llama", head_dim=128))
        for plain in "*.layers.1.*", "*.layers.0.*":
            quantization = {"type": "w4a16", "layers": {plain: "none"}}
            logits, formats, _ = logits_of(model, prompts, quantization, kv_cache_dtype="int8")
            assert "float32" in formats
            found.append(max(errors(model, prompts, logits, quantization)))
    return found


def odd_columns(*names: str) -> dict[str, list[Any]]:
    """For each quantisation, results of a model with a matrix of columns that no quantised kernel reads.

    They are the error of the logits against the CPU, which has that matrix and activations in float32; and
    the message of the converted model.
    """
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder) / "model", make_config("llama", intermediate_size=188))
        for name in names:
            quantization: Any = name
            logits, *_ = logits_of(model, prompts, quantization)
            expected = {"type": SAME_CODES[name], "layers": {"*.down_proj": "none"}}
            error = max(errors(model, prompts, logits, expected))
            converted = Path(folder) / name
            penstock.convert(model, converted, quantization=quantization)
            message = ""
            try:
                logits_of(converted, prompts)
            except penstock.ModelLoadError as raised:
                message = str(raised)
            found[name] = [error, message]
    return found


def errors(
    model: Path, prompts: list[list[int]], logits: list[np.ndarray[Any, Any]], quantization: Any
) -> list[float]:
    """The relative errors of logits, by prompt, against those of the CPU."""
    expected = [compute_logits(model, prompt, quantization=quantization) for prompt in prompts]
    pairs = zip(logits, expected, strict=True)
    return [float(np.sqrt(np.mean((found - exact) ** 2) / np.var(exact))) for found, exact in pairs]


def logits_of(
    model: Path, prompts: list[list[int]], quantization: Any = "auto", **options: Any
) -> tuple[list[np.ndarray[Any, Any]], list[str], list[str]]:
    """The logits of prompts on CUDA, the formats of weights, and the activations of quantised ones."""
    with penstock.Engine(model, device="cuda", quantization=quantization, **SIZES | options) as engine:
        results = [item.result for item in engine.blocking.generate_many(prompts, PARAMS)]
        infos = engine.info.weight_formats
    formats = sorted({info.format for info in infos})
    activations = sorted(
        {info.activations for info in infos if not info.format.startswith(("float", "bfloat"))}
    )
    pairs = zip(results, prompts, strict=True)
    return (
        [np.asarray(result.logits)[: len(prompt)] for result, prompt in pairs if result],
        formats,
        activations,
    )


def rounded_logits(folder: str, method: str) -> list[Any]:
    """The logits of a prompt with a quantised file on the device, with attention in float32."""
    [logits], _, _ = logits_of(Path(folder) / method, [random_prompt(17)], kv_cache_dtype="float32")
    return list(logits.tolist())
