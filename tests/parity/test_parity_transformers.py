"""Parity with transformers in float32: families, shapes, rope scalings, config formats, dtypes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from support.api.checkpoints import encode, in_old_format, make_config, make_weights, write_checkpoint
from support.api.running import compute_logits, generate_greedily, random_prompt
from support.parity.compare import assert_close, assert_greedy
from support.parity.oracle import Oracle, load_oracle

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.oracle

NUM_TOKENS = 64


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


def heads(num: int, kv_heads: int, head_dim: int, **changes: Any) -> dict[str, Any]:
    return {
        "num_attention_heads": num,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": num * head_dim,
        **changes,
    }


SHAPES = {
    "llama": make_config("llama"),
    "llama with tied head": make_config("llama", tie_word_embeddings=True),
    "llama with biases everywhere": make_config("llama", attention_bias=True, mlp_bias=True),
    "llama of nine heads in threes": make_config("llama", **heads(9, 3, 64, tie_word_embeddings=True)),
    "llama of five heads and one key": make_config("llama", **heads(5, 1, 80)),
    "llama without groups": make_config("llama", **heads(3, 3, 96)),
    "llama of eight heads and one key": make_config("llama", **heads(8, 1, 128, intermediate_size=100)),
    "llama of odd widths": make_config("llama", **heads(7, 7, 32, intermediate_size=333, vocab_size=517)),
    "llama of one layer": make_config("llama", num_hidden_layers=1),
    "mistral": make_config("mistral"),
    "mistral with a short window": make_config("mistral", sliding_window=40),
    "mistral with a window of one block": make_config("mistral", sliding_window=16),
    "mistral with wider heads than its width": make_config("mistral", head_dim=64, sliding_window=33),
    "qwen2 with biases and tied head": make_config("qwen2", tie_word_embeddings=True),
    "qwen2 of fourteen heads": make_config("qwen2", **heads(14, 2, 64, tie_word_embeddings=True)),
    "qwen2 with windows in its upper layers": make_config(
        "qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=24, max_window_layers=2
    ),
    "qwen3 with norms of q and k": make_config("qwen3"),
    "qwen3 with wider heads than its width": make_config("qwen3", head_dim=128, tie_word_embeddings=True),
    "qwen3 with biases": make_config("qwen3", attention_bias=True),
}

# Each runs well past its trained length, where the scaling has an effect.
ROPES = {
    "a large theta": make_config("llama", **rope("default", rope_theta=1e6)),
    "linear": make_config("llama", **rope("linear", factor=4.0)),
    "yarn": make_config("llama", **rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "yarn with all its knobs": make_config(
        "qwen2",
        **rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            beta_fast=16.0,
            beta_slow=2.0,
            attention_factor=1.2,
        ),
    ),
    "yarn with mscale": make_config(
        "llama",
        **rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=0.8, mscale_all_dim=0.6),
    ),
    "llama3": make_config(
        "llama",
        **rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "dynamic": make_config("llama", max_position_embeddings=64, **rope("dynamic", factor=8.0)),
}


def check(checkpoint: Path, *, prompt_length: int = 150, relative: float = 1e-4, **config: Any) -> None:
    """Compare the logits of a prompt, then 64 greedy tokens and their logprobs, with transformers."""
    oracle = load_oracle(checkpoint)
    prompt = check_greedy(checkpoint, oracle, prompt_length, relative=relative, **config)
    ours = compute_logits(checkpoint, prompt, threads=2, chunk=64)
    assert_close(ours, oracle.logits(prompt), relative=relative)


def check_greedy(
    checkpoint: Path, oracle: Oracle, prompt_length: int, *, relative: float = 1e-4, **config: Any
) -> list[int]:
    """Compare greedy tokens and their logprobs; returns the prompt."""
    prompt, theirs = oracle.find_greedy(functools.partial(random_prompt, prompt_length), NUM_TOKENS)
    [result] = generate_greedily(
        checkpoint, [prompt], NUM_TOKENS, threads=2, max_num_batched_tokens=64, **config
    )
    assert result.finish_reason == "length"
    assert result.logprobs is not None
    assert_greedy(result.token_ids, result.logprobs, theirs, relative=relative)
    return prompt


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_greedy_tokens_match_transformers(name: str, tmp_path: Path) -> None:
    check(write_checkpoint(tmp_path, SHAPES[name]))


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("config_format", ["transformers 5", "transformers 4"])
@pytest.mark.parametrize("name", [name for name in ROPES if name != "dynamic"])
def test_rope_scaling_in_both_formats_matches_transformers(
    name: str, config_format: str, tmp_path: Path
) -> None:
    config = ROPES[name] if config_format == "transformers 5" else in_old_format(ROPES[name])
    check(write_checkpoint(tmp_path, config), prompt_length=300)


@pytest.mark.parametrize("config_format", ["transformers 5", "transformers 4"])
@pytest.mark.parametrize("name", ["linear", "yarn", "yarn with all its knobs"])
def test_overridden_rope_matches_transformers(name: str, config_format: str, tmp_path: Path) -> None:
    changed = ROPES[name] | {"max_position_embeddings": 1024}
    plain = changed | rope("default") | {"max_position_embeddings": 64}
    theirs = {key: changed[key] for key in ("rope_parameters", "max_position_embeddings")}
    if config_format == "transformers 4":
        # In this format, transformers loses `rope_theta` when `rope_scaling` is overridden.
        changed, plain = in_old_format(changed), in_old_format(plain)
    overrides = {key: value for key, value in changed.items() if plain[key] != value}
    oracle = load_oracle(write_checkpoint(tmp_path, plain), **theirs)
    check_greedy(tmp_path, oracle, 300, config_overrides=overrides, max_model_len=512)


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("prompt_length", [40, 300])
def test_dynamic_rope_follows_the_current_length(prompt_length: int, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, ROPES["dynamic"])
    oracle = load_oracle(checkpoint)
    make_prompt = functools.partial(random_prompt, prompt_length)
    prompt, theirs = oracle.find_greedy(make_prompt, NUM_TOKENS, by_step=True)
    [result] = generate_greedily(checkpoint, [prompt], NUM_TOKENS, threads=2)
    assert result.logprobs is not None
    assert_greedy(result.token_ids, result.logprobs, theirs)
    ours = compute_logits(checkpoint, prompt, threads=2, chunk=64)
    assert_close(ours, oracle.logits(prompt))


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_compute_as_in_float32(family: str, dtype: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, make_config(family, dtype=dtype))
    check(checkpoint, kv_cache_dtype="float32")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_input_embeddings_are_those_of_transformers(family: str, dtype: str, tmp_path: Path) -> None:
    config = make_config(family, dtype=dtype, tie_word_embeddings=True)
    checkpoint = write_checkpoint(tmp_path, config)
    prompt = random_prompt(70)
    with penstock.Engine(checkpoint, threads=2, max_num_batched_tokens=32) as engine:
        result = engine.blocking.generate(
            prompt, max_tokens=8, ignore_eos=True, temperature=0.0, output_embeddings="all"
        )
    ours = np.asarray(result.embeddings)
    assert_close(ours[: len(prompt)], load_oracle(checkpoint).embeddings(prompt), relative=1e-6)
    # The file has the bits of all rows.
    table = dict(make_weights(config, 0))["model.embed_tokens.weight"]
    if dtype == "bfloat16":
        table = (encode(table, dtype).astype(np.uint32) << 16).view(np.float32)
    assert ours.tobytes() == table[[*prompt, *result.token_ids[:-1]]].tobytes()


@pytest.mark.needs("hooks")
def test_sharded_checkpoint_loads_like_a_single_file(tmp_path: Path) -> None:
    check(write_checkpoint(tmp_path, make_config("qwen2"), shards=3))


def test_concurrent_prompts_match_transformers(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, make_config("qwen3"))
    oracle = load_oracle(checkpoint)
    found = [
        oracle.find_greedy(functools.partial(random_prompt, length), NUM_TOKENS)
        for length in (1, 2, 15, 16, 17, 63, 64, 65, 150, 256)
    ]
    results = generate_greedily(checkpoint, [prompt for prompt, _ in found], NUM_TOKENS, threads=2)
    for (_, theirs), result in zip(found, results, strict=True):
        assert result.logprobs is not None
        assert_greedy(result.token_ids, result.logprobs, theirs)
