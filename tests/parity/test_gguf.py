"""GGUF files of every weight type: parity with the `gguf` package and with transformers."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

import penstock
from support import hooks
from support.api.ggufs import HEADS, KV_HEADS, TYPES, VOCABULARY, write_gguf
from support.api.running import compute_logits, generate_greedily, perplexity, random_prompt
from support.parity.compare import assert_close, assert_greedy
from support.parity.oracle import load_oracle
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PUBLISHED = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def published(name: str) -> str:
    """The Hugging Face name of a GGUF tensor."""
    if inside := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name):
        return f"model.layers.{inside[1]}.{PUBLISHED[inside[2]]}.{inside[3]}"
    return PUBLISHED[name]


def read(file: Path, name: str) -> NDArray[np.float32]:
    return np.frombuffer(hooks.tensor(str(file), name), dtype="<f4")


def halves_apart(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of q or k with rotation pairs half a head apart; in Llama GGUF files the pairs are adjacent."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("kind", TYPES)
def test_every_weight_type_matches_the_gguf_package(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    expected = write_gguf(file, TYPES[kind])
    for name, values in expected.items():
        if "attn_q." in name or "attn_k." in name:
            ours = halves_apart(values, HEADS if "attn_q." in name else KV_HEADS)
        else:
            ours = values
        np.testing.assert_array_equal(read(file, published(name)), ours.ravel(), err_msg=name)


@pytest.mark.needs("hooks")
def test_demo_model_tensors_match_the_gguf_package(demo_model: Path) -> None:
    kinds = set()
    for tensor in gguf.GGUFReader(demo_model).tensors[:12]:
        kinds.add(tensor.tensor_type.name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            values = halves_apart(values, 9 if "attn_q" in tensor.name else 3)
        np.testing.assert_array_equal(read(demo_model, published(tensor.name)), values.ravel())
    assert kinds == {"F32", "Q8_0", "Q4_1"}


@pytest.mark.parametrize("kind", TYPES)
def test_default_dtype_is_that_of_the_file_or_bfloat16(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", TYPES[kind])
    with penstock.Engine(tmp_path / "model.gguf", threads=1) as engine:
        assert engine.info.dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
        assert engine.info.kv_cache_dtype == engine.info.dtype


@pytest.mark.needs("hooks", "sources")
@pytest.mark.rare
def test_dequantised_weights_in_bfloat16_halve_the_memory(demo_model: Path) -> None:
    with penstock.Engine(demo_model, quantization="none") as engine:
        memory = engine.info.memory.weights
        token_ids = engine.encode((ROOT / "LICENSE").read_text())[:600]
    with penstock.Engine(demo_model, dtype="float32", quantization="none") as engine:
        assert engine.info.memory.weights > 1.99 * memory
    exact, rounded = (
        perplexity(compute_logits(demo_model, token_ids, dtype=dtype, threads=2), token_ids)
        for dtype in ("float32", "bfloat16")
    )
    assert abs(rounded / exact - 1) < 0.003


@pytest.mark.needs("hooks")
@pytest.mark.oracle
@pytest.mark.parametrize("kind", TYPES)
def test_model_of_every_weight_type_matches_transformers(kind: str, tmp_path: Path) -> None:
    check(tmp_path / "model.gguf", kind, "llama")


@pytest.mark.needs("hooks")
@pytest.mark.oracle
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_gguf_architectures_match_transformers(architecture: str, tmp_path: Path) -> None:
    check(tmp_path / "model.gguf", "Q8_0", architecture)


def check(file: Path, kind: str, architecture: str) -> None:
    write_gguf(file, TYPES[kind], architecture=architecture)
    oracle = load_oracle(file)
    make_prompt = functools.partial(random_prompt, 100, vocabulary_size=VOCABULARY)
    prompt, greedy = oracle.find_greedy(make_prompt, 64)
    theirs = oracle.logits(prompt)
    assert theirs.rows.std() > 1, "flat logits would hide an error"
    assert_close(compute_logits(file, prompt, threads=2), theirs)
    [result] = generate_greedily(file, [prompt], 64, threads=2, dtype="float32", quantization="none")
    assert result.logprobs is not None
    assert_greedy(result.token_ids, result.logprobs, greedy)


def test_config_overrides_have_the_names_of_transformers_4(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, TYPES["F32"])
    prompt = random_prompt(40, vocabulary_size=VOCABULARY)
    overrides = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    [plain] = generate_greedily(file, [prompt], 4, threads=1)
    [scaled] = generate_greedily(file, [prompt], 4, threads=1, config_overrides=overrides)
    assert plain.logprobs != scaled.logprobs
    with pytest.raises(penstock.ConfigError, match="rope_parametres has no effect"):
        generate_greedily(file, [prompt], 4, config_overrides={"rope_parametres": {"factor": 4.0}})
