"""Small quantised Hugging Face checkpoints, written with numpy by the published layout of each method.

Every linear module of a random model is quantised, the embedding, the norms and the head are not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from support.api.checkpoints import (
    encode,
    make_config,
    make_weights,
    write_tokenizer,
    write_typed_safetensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Typed = tuple[str, NDArray[Any]]
    #: Tensors of a module by suffix, and its values.
    Quantised = tuple[dict[str, Typed], Floats]

#: The output features of the eight nibbles of a word of an AWQ file.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Method:
    """The settings of a method in `config.json`, and its writer."""

    settings: dict[str, Any]
    quantise: Callable[[Floats], Quantised]
    description: str


def quantise_groups(
    weight: Floats, bits: int, group: int, *, symmetric: bool, lowest: int = 0
) -> tuple[NDArray[np.uint32], NDArray[np.float16], NDArray[np.uint32]]:
    """Unsigned codes [rows, columns], scales and zero points [rows, groups]; rounds to the nearest code."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // group, group)
    top = 2**bits - 1
    if symmetric:
        scales = np.abs(grouped).max(axis=2) / (top // 2)
        zeros = np.full(scales.shape, 2 ** (bits - 1), np.uint32)
    else:
        low, high = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
        scales = (high - low) / top
        zeros = np.clip(np.round(-low / scales), lowest, top).astype(np.uint32)
    scales = scales.astype(np.float16)
    codes = np.round(grouped / scales[:, :, None].astype(np.float32)) + zeros[:, :, None]
    return np.clip(codes, 0, top).astype(np.uint32).reshape(rows, columns), scales, zeros


def dequantise_groups(codes: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any]) -> Floats:
    """The values of codes: the scale times the difference of the code and the zero point."""
    group = codes.shape[1] // scales.shape[1]
    difference = codes.astype(np.float32) - np.repeat(zeros, group, axis=1).astype(np.float32)
    return np.repeat(scales, group, axis=1).astype(np.float32) * difference


def pack_words(codes: NDArray[np.uint32], bits: int) -> NDArray[np.int32]:
    """32-bit words of consecutive codes of the last axis, lowest bits first, padded with zeros."""
    count = 32 // bits
    padded = np.pad(codes, [(0, 0), (0, -codes.shape[1] % count)])
    shifts = np.arange(count, dtype=np.uint32) * bits
    words: NDArray[np.uint32] = np.bitwise_or.reduce(padded.reshape(len(codes), -1, count) << shifts, axis=2)
    packed: NDArray[np.int32] = words.view(np.int32)
    return packed


def _gptq(
    bits: int, group: int, *, minus: int, symmetric: bool, reorder: bool = False
) -> Callable[[Floats], Quantised]:
    def quantise(weight: Floats) -> Quantised:
        order = (
            np.random.default_rng(1).permutation(weight.shape[1]) if reorder else np.arange(weight.shape[1])
        )
        codes, scales, zeros = quantise_groups(weight[:, order], bits, group, symmetric=symmetric, lowest=1)
        values = dequantise_groups(codes, scales, zeros)[:, np.argsort(order)]
        index = (np.arange(weight.shape[1]) // group)[np.argsort(order)]
        codes = codes[:, np.argsort(order)]
        tensors: dict[str, Typed] = {
            "qweight": ("I32", np.ascontiguousarray(pack_words(codes, bits).T)),
            "qzeros": ("I32", pack_words(zeros.T - np.uint32(minus), bits)),
            "scales": ("F16", np.ascontiguousarray(scales.T)),
            "g_idx": ("I32", index.astype(np.int32)),
        }
        return tensors, values

    return quantise


def _awq(group: int) -> Callable[[Floats], Quantised]:
    def reordered(codes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return codes.reshape(len(codes), -1, 8)[:, :, AWQ_ORDER].reshape(codes.shape)

    def quantise(weight: Floats) -> Quantised:
        codes, scales, zeros = quantise_groups(weight, 4, group, symmetric=False)
        tensors: dict[str, Typed] = {
            "qweight": ("I32", pack_words(reordered(codes.T), 4)),
            "qzeros": ("I32", pack_words(reordered(zeros.T), 4)),
            "scales": ("F16", np.ascontiguousarray(scales.T)),
        }
        return tensors, dequantise_groups(codes, scales, zeros)

    return quantise


def _compressed_words(bits: int, group: int, *, symmetric: bool) -> Callable[[Floats], Quantised]:
    def quantise(weight: Floats) -> Quantised:
        codes, scales, zeros = quantise_groups(weight, bits, group or weight.shape[1], symmetric=symmetric)
        tensors: dict[str, Typed] = {
            "weight_packed": ("I32", pack_words(codes, bits)),
            "weight_scale": ("F16", scales),
            "weight_shape": ("I64", np.array(weight.shape, np.int64)),
        }
        if not symmetric:
            tensors["weight_zero_point"] = ("I32", np.ascontiguousarray(pack_words(zeros.T, bits).T))
        return tensors, dequantise_groups(codes, scales, zeros)

    return quantise


def _compressed_int8(weight: Floats) -> Quantised:
    codes, scales, zeros = quantise_groups(weight, 8, weight.shape[1], symmetric=True)
    signed = codes.astype(np.int32) - 128
    scale = ("BF16", encode(scales.astype(np.float32), "bfloat16"))
    rounded = (scale[1].astype(np.uint32) << np.uint32(16)).view(np.float32)
    return {"weight": ("I8", signed.astype(np.int8)), "weight_scale": scale}, dequantise_groups(
        codes, rounded, zeros
    )


def float8_values() -> Floats:
    """The value of every E4M3 code."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values[codes & 127 == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


def _fp8(rows: int, columns: int, suffix: str) -> Callable[[Floats], Quantised]:
    table = float8_values()[:127]

    def quantise(weight: Floats) -> Quantised:
        height, width = rows or len(weight), columns or weight.shape[1]
        padded = np.pad(weight, [(0, -len(weight) % height), (0, -weight.shape[1] % width)])
        blocks = padded.reshape(len(padded) // height, height, padded.shape[1] // width, width)
        scales = (np.abs(blocks).max(axis=(1, 3)) / table[-1]).astype(np.float32)
        full = np.repeat(np.repeat(scales, height, axis=0), width, axis=1)[: len(weight), : weight.shape[1]]
        target = np.abs(weight) / full
        above = np.clip(np.searchsorted(table, target), 1, len(table) - 1)
        nearest = np.where(target - table[above - 1] < table[above] - target, above - 1, above)
        values = np.sign(weight) * table[nearest] * full
        codes = (nearest + 128 * (weight < 0)).astype(np.uint8)
        return {"weight": ("F8_E4M3", codes), suffix: ("F32", scales)}, values.astype(np.float32)

    return quantise


def _compressed(inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}

METHODS = {
    "gptq": Method(GPTQ, _gptq(4, 32, minus=1, symmetric=False), "GPTQ, 4 bits, groups of 32"),
    "gptq-v2": Method(
        GPTQ | {"checkpoint_format": "gptq_v2"},
        _gptq(4, 32, minus=0, symmetric=False),
        "GPTQ, 4 bits, groups of 32",
    ),
    "gptq-8-bit": Method(
        GPTQ | {"bits": 8, "group_size": 64, "sym": True},
        _gptq(8, 64, minus=1, symmetric=True),
        "GPTQ, 8 bits, groups of 64",
    ),
    "gptq-act-order": Method(
        GPTQ | {"desc_act": True},
        _gptq(4, 32, minus=1, symmetric=False, reorder=True),
        "GPTQ, 4 bits, groups of 32",
    ),
    "awq": Method(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
        _awq(64),
        "AWQ, 4 bits, groups of 64",
    ),
    "w4a16": Method(
        _compressed(num_bits=4, type="int", strategy="group", group_size=64, symmetric=True),
        _compressed_words(4, 64, symmetric=True),
        "compressed-tensors, int4, groups of 64",
    ),
    "w4a16-zero-points": Method(
        _compressed(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
        _compressed_words(4, 32, symmetric=False),
        "compressed-tensors, int4, groups of 32",
    ),
    "w8a16": Method(
        _compressed(num_bits=8, type="int", strategy="channel", symmetric=True),
        _compressed_words(8, 0, symmetric=True),
        "compressed-tensors, int8, a scale for each row",
    ),
    "w8a8": Method(
        _compressed(INT8_TOKENS, num_bits=8, type="int", strategy="channel"),
        _compressed_int8,
        "compressed-tensors, int8, a scale for each row, int8 activations",
    ),
    "fp8": Method(
        _compressed({"num_bits": 8, "type": "float"}, num_bits=8, type="float", strategy="channel"),
        _fp8(1, 0, "weight_scale"),
        "compressed-tensors, float8, a scale for each row, fp8 activations",
    ),
    "fp8-blocks": Method(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [64, 48]},
        _fp8(64, 48, "weight_scale_inv"),
        "FP8, blocks of 64x48",
    ),
    "fp8-square-blocks": Method(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
        _fp8(64, 64, "weight_scale_inv"),
        "FP8, blocks of 64x64",
    ),
}


def write_quantised(directory: Path, method: Method, *, seed: int = 0) -> dict[str, Floats]:
    """Write a Llama checkpoint that is quantised with `method`; returns the values of every tensor."""
    directory.mkdir(parents=True, exist_ok=True)
    config = make_config("llama")
    tensors: dict[str, Typed] = {}
    expected = {}
    for name, values in make_weights(config, seed):
        if name.endswith("_proj.weight"):
            parts, expected[name] = method.quantise(values)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        else:
            tensors[name] = ("F32", values)
            expected[name] = values
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": method.settings}))
    write_typed_safetensors(directory / "model.safetensors", tensors)
    write_tokenizer(directory, config["vocab_size"])
    return expected
