"""Matrices that compressed-tensors compresses, and the values that it reads from them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from support.parity.oracle import import_torch
from support.parity.stored import TYPES, store

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS, COLUMNS, BLOCK = 64, 128, 64


class Compressed(NamedTuple):
    """A compressed matrix."""

    #: By suffix: types with the names of safetensors, and values.
    tensors: dict[str, tuple[str, NDArray[Any]]]
    #: The value of `quantization_config`.
    settings: dict[str, Any]
    values: NDArray[np.float32]


def compress(name: str, settings: dict[str, Any], *, rounds_inputs: bool) -> Compressed:
    """A random matrix in the format `name`, quantised with `settings`."""
    inputs: dict[str, Any] = {"name": name, "settings": settings, "rounds_inputs": rounds_inputs}
    result = store().recall("compressed tensors", inputs, lambda: compute(**inputs))
    tensors = {
        suffix: (kind, result[f"tensor {suffix}"].reshape(-1).view(TYPES[kind]).reshape(shape))
        for suffix, (kind, shape) in result["tensors"].items()
    }
    return Compressed(tensors, result["settings"], result["values"])


def compute(name: str, settings: dict[str, Any], *, rounds_inputs: bool) -> dict[str, Any]:
    """The parts of the matrix as bytes, and its values."""
    torch = import_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

    activations = QuantizationArgs(num_bits=8, strategy="token", dynamic=True) if rounds_inputs else None
    arguments = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=activations)
    weight = torch.from_numpy(np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32))
    blocks = weight.view(ROWS // BLOCK, BLOCK, COLUMNS // BLOCK, BLOCK)
    grouped = {
        "group": lambda: weight.view(ROWS, -1, 32),
        "channel": lambda: weight.view(ROWS, 1, COLUMNS),
        "tensor": lambda: weight.view(1, 1, -1),
        "block": lambda: blocks.transpose(1, 2).reshape(ROWS // BLOCK, COLUMNS // BLOCK, -1),
    }[settings["strategy"]]()
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
    if settings["strategy"] == "tensor":
        scale, zero = scale.view(1), zero.view(1)
    state = {"weight": weight, "weight_scale": scale}
    if not arguments.symmetric:
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(name)
    compressed = compressor.compress(state, scheme)
    names = {
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int8: "I8",
        torch.uint8: "U8",
    }
    parts = {suffix: part.clone(memory_format=torch.contiguous_format) for suffix, part in compressed.items()}
    return {
        "tensors": {suffix: [names[part.dtype], list(part.shape)] for suffix, part in parts.items()},
        **{f"tensor {suffix}": part.view(torch.uint8).numpy() for suffix, part in parts.items()},
        "settings": {
            "quant_method": "compressed-tensors",
            "format": name,
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme.model_dump(mode="json")},
        },
        "values": compressor.decompress(dict(compressed), scheme)["weight"].numpy(),
    }
