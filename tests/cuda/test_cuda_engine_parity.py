"""The CUDA backend computes as the CPU backend and as transformers do, on the emulated device."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.api.checkpoints import make_config, write_checkpoint
from support.cuda import parity
from support.kernels.emulator import needs_demo, run_program
from support.parity.compare import assert_close, assert_greedy
from support.parity.oracle import load_oracle

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator

Case = tuple[dict[str, Any], dict[str, Any]]


def case(family: str, options: dict[str, Any] | None = None, **changes: Any) -> Case:
    """A configuration of a model, and options of the engine."""
    return make_config(family, **changes), options or {}


def rope(kind: str, **parameters: Any) -> Case:
    """A model with scaled rotations, of which prompts pass the trained length."""
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **parameters}
    return case("llama", rope_parameters=parameters, max_position_embeddings=512)


FLOAT32: dict[str, Case] = {
    "llama": case("llama"),
    "llama with a tied head": case("llama", tie_word_embeddings=True),
    "llama with biases": case("llama", attention_bias=True, mlp_bias=True),
    "llama of three heads per key": case(
        "llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=96
    ),
    "llama of one key": case("llama", num_attention_heads=5, num_key_value_heads=1),
    "llama without groups": case("llama", num_attention_heads=3, num_key_value_heads=3),
    "llama of one layer": case("llama", num_hidden_layers=1),
    "llama of odd widths": case("llama", vocab_size=517, intermediate_size=333),
    "llama with log-n attention": case("llama", use_logn_attn=True, seq_length=40),
    "mistral": case("mistral"),
    "mistral with a short window": case("mistral", sliding_window=40),
    "mistral with a window of one block": case("mistral", sliding_window=16),
    "qwen2": case("qwen2", tie_word_embeddings=True),
    "qwen2 with windows in its upper layers": case(
        "qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=24, max_window_layers=2
    ),
    "qwen3": case("qwen3"),
    "qwen3 with biases": case("qwen3", attention_bias=True, head_dim=64, tie_word_embeddings=True),
    "linear rope": rope("linear"),
    "yarn": rope("yarn", original_max_position_embeddings=64),
    "llama 3's rope": rope(
        "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "dynamic rope": case(
        "llama",
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0},
    ),
    "blocks of 32": case("llama", {"block_size": 32}),
    **{f"heads of {size}": case("llama", head_dim=size) for size in (8, 24, 72, 128, 256)},
    "gguf of float32": ({"gguf": "F32", "architecture": "qwen3"}, {}),
}

#: The largest difference of logits, relative to the largest one. Values near a tie are rounded in two ways.
ROUNDED = {"float16": 5e-4, "bfloat16": 4e-3, "int8": 1e-2, "uint4": 5e-2}
KV_TYPES = {
    f"{kind}, heads of {size}": case("llama", {"kv_cache_dtype": kind}, head_dim=size)
    for kind in ROUNDED
    for size in (32, 80)
}

#: Operands have the type of the weights, and the CPU's are float32. The emulated device has float16's
#: attention for heads of 64 only.
HALVES = {"bfloat16": 3e-2, "float16": 4e-3}
WEIGHTS: dict[str, Case] = {
    **{
        f"{dtype}, {family}": case(family, dtype=dtype, head_dim=64)
        for dtype in HALVES
        for family in ("llama", "mistral", "qwen2", "qwen3")
    },
    "bfloat16, heads of 32": case("llama", dtype="bfloat16", head_dim=32),
    **{
        f"bfloat16, heads of {size}": case("llama", dtype="bfloat16", head_dim=size) for size in (72, 80, 256)
    },
    **{
        f"bfloat16, int8 cache, heads of {size}": case(
            "llama", {"kv_cache_dtype": "int8"}, dtype="bfloat16", head_dim=size
        )
        for size in (64, 128, 256)
    },
    "bfloat16, float32 cache": case("llama", {"kv_cache_dtype": "float32"}, dtype="bfloat16"),
    "float16, uint4 cache": case("qwen3", {"kv_cache_dtype": "uint4"}, dtype="float16", head_dim=64),
    "bfloat16, gguf": ({"gguf": "BF16", "architecture": "llama"}, {}),
    "float16, gguf": ({"gguf": "F16", "architecture": "qwen2"}, {}),
}


def differences(cases: dict[str, Case]) -> dict[str, Any]:
    ended = run_program(parity.compare, json.dumps(cases))
    assert ended.findings == []
    found: dict[str, Any] = ended.result
    assert found.keys() == cases.keys()
    return found


@pytest.fixture(scope="module")
def float32() -> dict[str, Any]:
    return differences(FLOAT32)


@pytest.fixture(scope="module")
def kv_types() -> dict[str, Any]:
    return differences(KV_TYPES)


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    return differences(WEIGHTS)


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_has_the_tokens_and_values_of_the_cpu(name: str, float32: dict[str, Any]) -> None:
    for result in float32[name]:
        assert result.pop("same_tokens") == result.pop("tokens") == parity.PARAMS.max_tokens
        assert result.pop("embeddings") == 0.0
        assert max(result.values()) < 1e-4, result


@pytest.mark.parametrize("name", KV_TYPES)
def test_kv_type_has_the_values_of_the_cpu(name: str, kv_types: dict[str, Any]) -> None:
    for result in kv_types[name]:
        assert result["same_tokens"] > 0
        assert result["logits"] < ROUNDED[name.partition(",")[0]], result
    # The cache is not of float32.
    assert max(result["logits"] for result in kv_types[name]) > 1e-6


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_16_bits_have_nearly_the_values_of_the_cpu(name: str, weights: dict[str, Any]) -> None:
    limit = ROUNDED["uint4"] if "uint4" in name else HALVES[name.partition(",")[0]]
    for result in weights[name]:
        assert result["embeddings"] == 0.0
        assert result["logits"] < limit, result
        assert result["hidden_states"] < limit, result


@pytest.mark.rare
@needs_demo
def test_real_model_has_the_answer_of_the_cpu() -> None:
    ended = run_program(parity.answer_demo, EMU_MEMORY=str(1 << 30))
    assert ended.findings == []
    ours, theirs = ended.result
    assert len(ours["token_ids"]) == 6
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=0.1)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_answers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    windows = {"sliding_window": 40} if family == "mistral" else {}
    checkpoint = write_checkpoint(tmp_path / "model", make_config(family, **windows))
    file = tmp_path / "answers.npz"
    assert run_program(parity.write_answers, checkpoint, 150, file).findings == []
    ours = np.load(file)
    oracle, prompt, token_ids = load_oracle(checkpoint), ours["prompt"].tolist(), ours["token_ids"].tolist()
    greedy = oracle.greedy(prompt, len(token_ids))
    assert_greedy(token_ids, ours["logprobs"].tolist(), greedy)
    assert_close(ours["logits"], oracle.logits([*prompt, *greedy.token_ids[:-1]]))
