"""Prompts with a common prefix share its blocks; no output changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import bits_of, bytes_of_blocks, check_stats, make_engine
from support.api.running import random_prompt

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 16
PROMPT = random_prompt(150)
#: Number of full blocks before the last token, which is always computed.
CACHED = (len(PROMPT) - 1) // BLOCK * BLOCK
PARAMS = penstock.SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, logprobs=True)
CHECKPOINTS = {
    "llama": make_config("llama", num_attention_heads=6, num_key_value_heads=2),
    "mistral with a short window": make_config("mistral", sliding_window=40, dtype="bfloat16"),
    "qwen3": make_config("qwen3", dtype="float16", head_dim=80),
}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "uint4"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_cache_hit_gives_the_bits_of_a_miss(name: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", CHECKPOINTS[name])
    with make_engine(checkpoint, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=64) as engine:
        miss = engine.blocking.generate(PROMPT, PARAMS)
        hit = engine.blocking.generate(PROMPT, PARAMS)
        alone = engine.blocking.generate(PROMPT, PARAMS.replace(use_prefix_cache=False))
        check_stats(engine)
    assert (miss.usage.cached_tokens, alone.usage.cached_tokens) == (0, 0)
    assert (hit.usage.cached_tokens, hit.usage.cached_host_tokens) == (CACHED, 0)
    assert bits_of(miss) == bits_of(hit) == bits_of(alone)


def test_cached_tokens_are_known_with_the_first_token(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        engine.blocking.generate(PROMPT, PARAMS)
        with engine.blocking.stream(PROMPT, PARAMS.replace(max_tokens=300)) as request:
            next(request)
            assert (request.finish_reason, request.usage.cached_tokens) == (None, CACHED)


def test_generated_tokens_are_cached(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        first = engine.blocking.generate(PROMPT, PARAMS)
        longer = [*PROMPT, *first.token_ids, 7, 8, 9]
        second = engine.blocking.generate(longer, PARAMS)
    # The last generated token is never computed, so it is not cached.
    computed = len(PROMPT) + len(first.token_ids) - 1
    assert second.usage.cached_tokens == computed // BLOCK * BLOCK
    assert second.usage.cached_tokens > len(PROMPT)


def test_requests_that_arrive_together_compute_a_prompt_once(tiny_model: Path) -> None:
    prompts = [[*PROMPT, token] for token in range(8)]
    with make_engine(tiny_model, max_num_batched_tokens=64) as engine:
        items = list(engine.blocking.generate_many(prompts, PARAMS))
        computed = engine.stats().prompt_tokens
        uncached = PARAMS.replace(use_prefix_cache=False)
        alone = [engine.blocking.generate(prompt, uncached) for prompt in prompts]
    results = [item.result for item in items if item.result]
    assert computed == len(prompts[0]) + 7 * (len(prompts[0]) - CACHED)
    assert sorted(result.usage.cached_tokens for result in results) == [0] + 7 * [CACHED]
    assert [bits_of(result) for result in results] == [bits_of(result) for result in alone]


def test_stats_separate_cached_from_computed_tokens(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        engine.blocking.generate(PROMPT, PARAMS)
        before = engine.stats()
        engine.blocking.generate(PROMPT, PARAMS)
        after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPT) - CACHED
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == CACHED
    assert (before.prefix_hit_rate, after.prefix_hit_rate) == (0.0, CACHED / (2 * len(PROMPT)))
    assert after.blocks_used == 0
    assert after.blocks_cached >= CACHED // BLOCK


def test_different_salts_share_no_blocks(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:

        def cached(**options: Any) -> int:
            return engine.blocking.generate(PROMPT, max_tokens=1, **options).usage.cached_tokens

        assert [cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [0, 0, 0]
        assert [cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [CACHED] * 3


def test_request_can_opt_out_of_the_cache(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:

        def cached(**options: Any) -> int:
            return engine.blocking.generate(PROMPT, max_tokens=1, **options).usage.cached_tokens

        assert [cached(use_prefix_cache=False), cached(), cached(use_prefix_cache=False)] == [0, 0, 0]
        assert cached() == CACHED


@pytest.mark.parametrize(
    "options", [{"prefix_cache": False}, {"prefix_cache_ttl": 1e-6}], ids=["off", "expired"]
)
def test_engine_without_cache_or_with_zero_ttl_has_no_hits(tiny_model: Path, options: dict[str, Any]) -> None:
    with make_engine(tiny_model, **options) as engine:
        usages = [engine.blocking.generate(PROMPT, max_tokens=1).usage for _ in range(3)]
        assert [usage.cached_tokens for usage in usages] == [0, 0, 0]
        assert engine.stats().prefix_hit_tokens == 0


@pytest.mark.anyio
async def test_reset_removes_all_blocks_and_leaves_requests_running(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine:
        expected = await engine.generate(PROMPT, PARAMS)
        request = await engine.start_request(PROMPT, PARAMS)
        await anext(aiter(request))
        engine.reset_prefix_cache()
        assert bits_of(await request.result()) == bits_of(expected)
        assert (await engine.generate(PROMPT, PARAMS, cache_salt="fresh")).usage.cached_tokens == 0
        engine.reset_prefix_cache()
        again = await engine.generate(PROMPT, PARAMS)
        assert again.usage.cached_tokens == 0
        assert bits_of(again) == bits_of(expected)


@pytest.mark.anyio
async def test_reset_of_a_salt_removes_only_its_blocks(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine:
        for salt in (None, "a", "b"):
            await engine.generate(PROMPT, PARAMS, cache_salt=salt)
        engine.reset_prefix_cache(cache_salt="a")
        engine.reset_prefix_cache(cache_salt="unknown")
        for salt, cached in ((None, CACHED), ("a", 0), ("b", CACHED)):
            assert (await engine.generate(PROMPT, PARAMS, cache_salt=salt)).usage.cached_tokens == cached
        check_stats(engine)
        for bad in ("", "x" * 1025, 3):
            with pytest.raises(penstock.InvalidRequestError, match="cache_salt"):
                engine.reset_prefix_cache(cache_salt=bad)  # type: ignore[arg-type]


def test_reset_of_a_closed_engine_raises(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    with pytest.raises(penstock.EngineStoppedError):
        engine.reset_prefix_cache()
    with engine:
        pass
    with pytest.raises(penstock.EngineStoppedError):
        engine.reset_prefix_cache()


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_later_turn_computes_at_most_a_block_before_its_tokens(tiny_model: Path, block_size: int) -> None:
    """Also if the earlier turn was cancelled; its last token is never computed."""
    with make_engine(tiny_model, block_size=block_size, kv_cache_blocks=256) as engine:
        for length in (1, block_size - 1, block_size, block_size + 1, 150):
            for num_read in (None, 1, 40):
                salt = f"{length} {num_read}"
                prompt = random_prompt(length, seed=length)
                with engine.blocking.stream(prompt, PARAMS, max_tokens=150, cache_salt=salt) as request:
                    history = [*prompt]
                    while (chunk := next(request, None)) is not None:
                        history += chunk.token_ids
                        if num_read is not None and len(history) >= length + num_read:
                            request.cancel()
                    assert num_read is None or request.finish_reason in ("cancelled", "length")
                message = random_prompt(5, seed=length + 1)
                result = engine.blocking.generate([*history, *message], PARAMS, cache_salt=salt)
                assert result.usage.cached_tokens == (len(history) - 1) // block_size * block_size
                assert len(history) + 5 - result.usage.cached_tokens <= 5 + block_size


@pytest.mark.anyio
async def test_many_salts_are_reset_one_by_one(tiny_model: Path) -> None:
    async with make_engine(tiny_model, kv_cache_blocks=4000) as engine:
        salts = [f"session {number}" for number in range(1000)]
        params = [penstock.SamplingParams(max_tokens=1, cache_salt=salt) for salt in salts]
        prompt = random_prompt(40)
        async for item in engine.generate_many([prompt] * 1000, params):
            assert item.error is None
        assert engine.stats().blocks_cached == 2000
        for number, salt in enumerate(salts):
            if number % 100 != 0:
                engine.reset_prefix_cache(cache_salt=salt)
        cached = [item async for item in engine.generate_many([prompt] * 10, params[::100])]
        assert [item.result.usage.cached_tokens for item in cached if item.result] == [32] * 10
        assert engine.stats().blocks_cached == 20
        check_stats(engine)


@pytest.mark.anyio
async def test_ten_turn_chat_computes_only_new_tokens(tiny_model: Path) -> None:
    """Each turn adds a message; everything before it was cached in earlier turns, up to a full block."""
    async with make_engine(tiny_model) as engine:
        history: list[int] = []
        for turn in range(10):
            message = random_prompt(23, seed=turn)
            before = engine.stats().prompt_tokens
            prompt = [*history, *message]
            result = await engine.generate(prompt, PARAMS.replace(max_tokens=17, seed=turn))
            computed = engine.stats().prompt_tokens - before
            assert computed == len(prompt) - result.usage.cached_tokens
            # Computed: the message, the last output token (not cached), and the last partial block.
            assert computed <= len(message) + 1 + BLOCK
            history = [*prompt, *result.token_ids]
        assert len(history) == 10 * 40


def test_dynamic_rope_shares_only_length_independent_blocks(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = make_config("qwen2", max_position_embeddings=100, rope_parameters=rope)
    checkpoint = write_checkpoint(tmp_path / "model", config)
    short, long = PROMPT[:90], [*PROMPT, *random_prompt(100, seed=1)]
    with make_engine(checkpoint) as engine, make_engine(checkpoint, prefix_cache=False) as fresh:

        def compare(prompt: list[int]) -> int:
            result, expected = (some.blocking.generate(prompt, PARAMS) for some in (engine, fresh))
            assert bits_of(result) == bits_of(expected)
            return result.usage.cached_tokens

        # Beyond the trained length, the rotation of the keys depends on the length of the prompt.
        assert [compare(long), compare(PROMPT), compare(short)] == [0, 0, 0]
        assert [compare(long), compare(PROMPT), compare(short)] == [0, 0, 80]


@pytest.mark.anyio
async def test_concurrent_requests_share_one_prefix(tiny_model: Path) -> None:
    prompts = [[*PROMPT, *random_prompt(20, seed=seed)] for seed in range(24)]
    async with make_engine(tiny_model, prefix_cache=False) as engine:
        expected = [await engine.generate(prompt, PARAMS) for prompt in prompts]
    results: dict[int, penstock.Result] = {}
    async with make_engine(tiny_model, max_num_seqs=8) as engine:

        async def ask(index: int) -> None:
            results[index] = await engine.generate(prompts[index], PARAMS)

        await engine.generate(PROMPT, max_tokens=1)
        async with anyio.create_task_group() as group:
            for index in range(len(prompts)):
                group.start_soon(ask, index)
        check_stats(engine)
    assert [bits_of(results[index]) for index in range(24)] == [bits_of(result) for result in expected]
    assert all(results[index].usage.cached_tokens >= CACHED for index in range(24))


def test_host_tier_keeps_blocks_evicted_from_the_cache(tiny_model: Path) -> None:
    """Two prompts that do not fit into the cache together, in turn: the second time both are on the host."""
    block_bytes = bytes_of_blocks(tiny_model, 1)
    with make_engine(tiny_model) as engine:
        expected = [engine.blocking.generate(random_prompt(300, seed=seed), PARAMS) for seed in (1, 2)]
    sizes = {"max_model_len": 360, "kv_cache_bytes": 25 * block_bytes, "host_cache_bytes": 100 * block_bytes}
    with make_engine(tiny_model, **sizes) as engine:
        results = [engine.blocking.generate(random_prompt(300, seed=seed), PARAMS) for seed in (1, 2, 1, 2)]
        check_stats(engine)
        stats = engine.stats()
    assert [bits_of(result) for result in results] == [bits_of(result) for result in expected] * 2
    # Recomputing this model's blocks takes longer than copying them, on any machine.
    assert all(result.usage.cached_host_tokens > 100 for result in results[2:])
    assert stats.prefix_host_hit_tokens == sum(result.usage.cached_host_tokens for result in results)
