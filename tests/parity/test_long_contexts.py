"""Options that change attention beyond the trained length: log-n scaled queries, and rope scalings."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.checkpoints import in_old_format, make_config, write_checkpoint
from support.api.engines import bits_of, make_engine
from support.api.running import compute_logits, generate_greedily, random_prompt
from support.parity.compare import assert_close, assert_greedy
from support.parity.oracle import load_oracle, load_scaled

if TYPE_CHECKING:
    from pathlib import Path

LOGN: dict[str, Any] = {"use_logn_attn": True, "seq_length": 40}
GREEDY = penstock.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), make_config("llama"))


def test_logn_attention_changes_only_long_sequences(llama: Path) -> None:
    short, long = random_prompt(16), random_prompt(40)
    with make_engine(llama) as plain, make_engine(llama, config_overrides=LOGN) as logn:
        for prompt, is_same in ((short, True), (long, False)):
            results = [bits_of(engine.blocking.generate(prompt, GREEDY)) for engine in (plain, logn)]
            assert (results[0] == results[1]) == is_same


def test_logn_attention_has_the_same_bits_with_cached_blocks(llama: Path) -> None:
    prompt = random_prompt(150)
    for chunk in (16, 512):
        with make_engine(
            llama, config_overrides=LOGN, max_num_batched_tokens=chunk, max_num_seqs=8
        ) as engine:
            first, second = (engine.blocking.generate(prompt, GREEDY) for _ in range(2))
            assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 144)
            assert bits_of(first) == bits_of(second)


def test_logn_attention_in_the_file_equals_the_override(llama: Path, tmp_path: Path) -> None:
    edited = write_checkpoint(tmp_path, make_config("llama", **LOGN))
    with make_engine(llama, config_overrides=LOGN) as one, make_engine(edited) as other:
        results = [bits_of(engine.blocking.generate(random_prompt(60), GREEDY)) for engine in (one, other)]
    assert results[0] == results[1]


@pytest.mark.parametrize("overrides", [{"use_logn_attn": 1}, {"use_logn_attn": True, "seq_length": 1}])
def test_invalid_logn_attention_is_an_error(llama: Path, overrides: dict[str, Any]) -> None:
    field, value = list(overrides.items())[-1]
    with pytest.raises(penstock.ConfigError, match=rf"{field}.*{value}"):
        make_engine(llama, config_overrides=overrides).blocking.start()


@pytest.mark.needs("hooks")
@pytest.mark.oracle
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logn_attention_matches_scaled_queries_in_transformers(family: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, make_config(family, **LOGN))
    oracle = load_scaled(checkpoint, family, LOGN["seq_length"])
    prompt, theirs = oracle.find_greedy(functools.partial(random_prompt, 150), 64)
    assert_close(compute_logits(checkpoint, prompt, threads=2, chunk=64), oracle.logits(prompt))
    [result] = generate_greedily(checkpoint, [prompt], 64, threads=2, max_num_batched_tokens=64)
    assert result.logprobs is not None
    assert_greedy(result.token_ids, result.logprobs, theirs)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_overridden_rope_scaling_raises_the_maximum_length(
    kind: str, tmp_path: Path, *, is_old: bool
) -> None:
    config = make_config("llama")
    checkpoint = write_checkpoint(tmp_path, in_old_format(config) if is_old else config)
    name = "rope_scaling" if is_old else "rope_parameters"
    options = {"config_overrides": {name: {"rope_type": kind, "factor": 2.5}}, "kv_cache_blocks": 200}
    with make_engine(checkpoint, **options) as engine:
        assert engine.info.max_model_len == 1280
    with make_engine(checkpoint, max_model_len=1280, **options) as engine:
        params = GREEDY.replace(max_tokens=200)
        result = engine.blocking.generate(random_prompt(600), params)
        assert (len(result.token_ids), result.finish_reason) == (200, "length")
        assert engine.blocking.generate(random_prompt(1279), params).finish_reason == "length"
    for given in (None, options["config_overrides"]):
        limit = 1280 if given else 512
        cause = rf"{limit}.*factor=2.5" if given else f"{limit}"
        with pytest.raises(penstock.ConfigError, match=f"max_model_len={limit + 1} .*{cause}") as caught:
            make_engine(checkpoint, max_model_len=limit + 1, config_overrides=given).blocking.start()
        assert caught.value.field == "max_model_len"


@pytest.mark.oracle
def test_overridden_dynamic_rope_matches_transformers(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, make_config("llama", max_position_embeddings=64))
    overrides = {"rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}}
    oracle = load_oracle(checkpoint, **overrides)
    prompt, theirs = oracle.find_greedy(functools.partial(random_prompt, 300), 64, by_step=True)
    options: dict[str, Any] = {"config_overrides": overrides, "max_model_len": 512}
    [result] = generate_greedily(checkpoint, [prompt], 64, threads=2, **options)
    assert result.logprobs is not None
    assert_greedy(result.token_ids, result.logprobs, theirs)
