"""Quantised models on the emulated device have the logits of their values, within rounded operands."""

from __future__ import annotations

from typing import Any

import pytest

from support import cuda_quantised
from support.cuda_quantised import INTEGER_ACTIVATIONS
from support.emulator import run_program

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


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    ended = run_program(cuda_quantised.compare, *MODELS)
    assert ended.findings == []
    result: dict[str, Any] = ended.result
    return result


@pytest.mark.parametrize("name", MODELS)
def test_quantised_model_has_the_logits_of_its_values(name: str, found: dict[str, Any]) -> None:
    assert MODELS[name] in found[name]["formats"]
    limit = 0.04 if name in INTEGER_ACTIVATIONS else 0.02
    assert 1e-5 < found[name]["error"] < limit, found[name]
    assert found[name]["is_same"]


@pytest.mark.parametrize("name", [name for name in MODELS if name in INTEGER_ACTIVATIONS])
def test_products_of_integers_are_those_of_the_cpu(name: str, found: dict[str, Any]) -> None:
    # An activation between two integers may be rounded to either, which later layers multiply.
    assert min(found[name]["differences"]) < 1e-6
    assert max(found[name]["differences"]) < 0.02


def test_quantised_steps_access_only_their_own_memory() -> None:
    names = ("Q4_K", "Q6_K", "file: w8a8", "file: awq")
    assert run_program(cuda_quantised.compare, *names, checked=True).findings == []
