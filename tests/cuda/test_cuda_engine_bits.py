"""On the emulated device, tokens and the bits of their logprobs depend on the request alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.api.checkpoints import make_config
from support.cuda import bits
from support.kernels import cuda
from support.kernels.emulator import run_program

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (make_config("llama", num_attention_heads=6, num_key_value_heads=2), {}),
    "mistral with a short window, bfloat16, int8 cache": (
        make_config("mistral", sliding_window=40, dtype="bfloat16", head_dim=128),
        {"kv_cache_dtype": "int8"},
    ),
    "llama with products of several splits, bfloat16": (
        make_config("llama", dtype="bfloat16", intermediate_size=2112),
        {},
    ),
    "qwen3, float16, uint4 cache": (
        make_config("qwen3", dtype="float16", head_dim=64),
        {"kv_cache_dtype": "uint4"},
    ),
    "llama, int4": (make_config("llama"), {"quantization": "int4"}),
    "llama, fp8": (make_config("llama"), {"quantization": "fp8"}),
    "qwen2 with dynamic rope and heads of 80, bfloat16": (
        make_config(
            "qwen2",
            dtype="bfloat16",
            head_dim=80,
            max_position_embeddings=60,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        ),
        {},
    ),
}
#: Models with `attention_decode_wide` for steps of few sequences.
WIDE_DECODE = (
    "mistral with a short window, bfloat16, int8 cache",
    "llama with products of several splits, bfloat16",
)
#: Models with `attention_prefill_warpgroup`.
WARPGROUP_PREFILL = WIDE_DECODE[:1]
#: The counter that shows that the engine has worked in this way.
COUNTERS = {
    "cache": "hits",
    "recompute": "preemptions",
    "swap": "swaps",
    "host cache": "host_hits",
    "speculation": "accepted",
}


@pytest.mark.rare
@pytest.mark.parametrize("model", MODELS)
def test_no_way_of_running_changes_a_bit(model: str) -> None:
    config, options = MODELS[model]
    trace = "1" if model in WIDE_DECODE else "0"
    ended = run_program(bits.compare, json.dumps(config), json.dumps(options), EMU_TRACE=trace)
    assert ended.findings == []
    assert ended.result.keys() == bits.WAYS.keys()
    for way, found in ended.result.items():
        assert found["differing"] == [], way
        assert set(found["tokens"]) == {bits.MAX_TOKENS}
        if counter := COUNTERS.get(way):
            assert found[counter] > 0, way
    if model in WIDE_DECODE and not cuda.ON_GPU:
        kernels = {line for line in ended.errors.splitlines() if line.startswith("kernel attention_decode_")}
        assert {kernel.startswith("kernel attention_decode_wide_") for kernel in kernels} == {False, True}
        has_warpgroups = "kernel attention_prefill_warpgroup_" in ended.errors
        assert has_warpgroups == (model in WARPGROUP_PREFILL)


@pytest.mark.rare
def test_kernels_without_wgmma_have_the_same_bits() -> None:
    arguments = map(json.dumps, MODELS[WARPGROUP_PREFILL[0]])
    ended = run_program(bits.compare_architectures, *arguments, EMU_TRACE="1")
    assert ended.findings == []
    best, other = ended.result["isas"]
    assert (other, ended.result["differing"]) == (best.removesuffix("a"), [])
    if not cuda.ON_GPU:
        before, after = ended.errors.split(bits.END_OF_BEST)
        for kernel in "kernel gemm_warpgroup_", "kernel attention_prefill_warpgroup_":
            assert (kernel in before, kernel in after) == (True, False)
