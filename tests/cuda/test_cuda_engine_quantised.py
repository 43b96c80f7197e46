"""Quantised models on the emulated device have the logits of their values, within rounded operands."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.api.checkpoints import make_config, write_checkpoint, write_safetensors
from support.api.quantised import METHODS, write_quantised
from support.api.running import random_prompt
from support.cuda import quantised
from support.cuda.quantised import INTEGER_ACTIVATIONS
from support.kernels import cuda
from support.kernels.emulator import run_program
from support.marks import rare_except
from support.parity.oracle import load_rounded

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator

#: Types of GGUF files, quantised checkpoints, and quantisation when a model is loaded; with a format that
#: matrices then have on the device.
MODELS = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "int4"),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), "int5"),
    "Q6_K": "int6",
    **dict.fromkeys(("Q8_0", "IQ4_NL"), "int8"),
    **dict.fromkeys(("file: gptq", "file: awq", "file: w4a16", "file: w4a16-zero-points"), "int4"),
    **dict.fromkeys(("file: gptq-8-bit", "file: w8a16", "file: w8a8"), "int8"),
    **dict.fromkeys(("int4", "w4a16"), "int4"),
    **dict.fromkeys(("int8", "w8a16"), "int8"),
    **dict.fromkeys(("file: fp8", "file: fp8-square-blocks", "fp8"), "fp8"),
}
#: The devices with the least shared memory, and without products of 8-bit floats.
LEAST = "86"
#: Of the logits, by the type of activations: they have 3, 8 and 7 or more bits.
MOST_ERROR = {"fp8": 0.15, "bfloat16": 0.02, "int8": 0.04}


#: The models of each gate: every number of bits, every type of activations, files of each kind.
OWN = ("Q4_K", "Q5_0", "Q6_K", "file: awq", "file: w8a8", "int4", "w8a16", "fp8")


@functools.cache
def compare(names: tuple[str, ...]) -> dict[str, Any]:
    ended = run_program(quantised.compare, *names)
    assert ended.findings == []
    result: dict[str, Any] = ended.result
    return result


def found_of(name: str) -> dict[str, Any]:
    """The comparison of a model; all models of each gate, and all others, share a process."""
    names = OWN if name in OWN else tuple(each for each in MODELS if each not in OWN)
    found: dict[str, Any] = compare(names)[name]
    return found


@pytest.mark.parametrize("name", rare_except(MODELS, *OWN))
def test_quantised_model_has_the_logits_of_its_values(name: str) -> None:
    found = found_of(name)
    assert MODELS[name] in found["formats"]
    activations = "int8" if name in INTEGER_ACTIVATIONS else "fp8" if "fp8" in name else "bfloat16"
    assert found["activations"] == [activations]
    assert 1e-5 < found["error"] < MOST_ERROR[activations], found
    assert found["is_same"]


def test_matrix_of_columns_without_kernels_is_not_quantised() -> None:
    ended = run_program(quantised.odd_columns, "int4", "w4a16")
    assert ended.findings == []
    for name, (error, message) in ended.result.items():
        assert error < MOST_ERROR["int8" if name == "int4" else "bfloat16"], name
        assert "matrix model.layers.0.mlp.down_proj.weight is " in message, name


def test_layers_with_other_attention_divide_a_prompt_alike() -> None:
    ended = run_program(quantised.mixed_layers, EMU_TRACE="1")
    assert ended.findings == []
    assert min(ended.result) > 1e-5
    assert max(ended.result) < MOST_ERROR["bfloat16"]
    if not cuda.ON_GPU:
        for end in "warpgroup_bf16_int8_128", "f32_int8":
            assert f"kernel attention_prefill_{end}" in ended.errors


@pytest.mark.rare
def test_old_devices_have_no_fp8_activations() -> None:
    ended = run_program(quantised.compare, "fp8", EMU_ARCH=LEAST)
    assert ended.findings == []
    assert ended.result["fp8"]["activations"] == ["bfloat16"]
    assert 1e-5 < ended.result["fp8"]["error"] < MOST_ERROR["bfloat16"]


@pytest.mark.rare
@pytest.mark.parametrize("name", ["int4", "w4a16"])
def test_large_products_use_warpgroups_where_they_exist(name: str) -> None:
    for architecture, has_warpgroups in (("90", True), (LEAST, False)):
        ended = run_program(quantised.has_same_logits_in_chunks, name, EMU_TRACE="1", EMU_ARCH=architecture)
        assert ended.result is True
        kernels = {line for line in ended.errors.splitlines() if line.startswith("kernel gemm_warpgroup_")}
        assert any("_code4_" in kernel for kernel in kernels) == has_warpgroups, architecture


@pytest.mark.oracle
@pytest.mark.parametrize(("method", "group"), [("fp8", 0), ("fp8-square-blocks", 64)])
def test_fp8_activations_are_those_of_rounded_inputs(method: str, group: int, tmp_path: Path) -> None:
    values = write_quantised(tmp_path / method, METHODS[method])
    plain = write_checkpoint(tmp_path / "plain", make_config("llama"))
    write_safetensors(plain / "model.safetensors", values, "float32")
    expected = load_rounded(plain, group).logits(random_prompt(17)).rows
    ended = run_program(quantised.rounded_logits, tmp_path, method)
    assert ended.findings == []
    found = np.array(ended.result)
    errors = np.sqrt(np.mean((found - expected) ** 2, axis=1) / np.var(expected, axis=1))
    # A value between two numbers may be rounded to either, which later layers multiply.
    assert np.median(errors) < 1e-3
    assert errors.max() < 0.15


@pytest.mark.parametrize(
    "name",
    rare_except(
        [name for name in MODELS if name in INTEGER_ACTIVATIONS],
        *(name for name in OWN if name in INTEGER_ACTIVATIONS),
    ),
)
def test_products_of_integers_are_those_of_the_cpu(name: str) -> None:
    # An activation between two integers may be rounded to either, which later layers multiply.
    differences = found_of(name)["differences"]
    assert min(differences) < 1e-6
    assert max(differences) < 0.02


@pytest.mark.rare
def test_quantised_steps_access_only_their_own_memory() -> None:
    names = ("Q4_K", "Q6_K", "file: w8a8", "file: awq")
    assert run_program(quantised.compare, *names, checked=True).findings == []
