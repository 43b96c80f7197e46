"""More requests than the KV cache can hold: preemption, priority, interruption, rejection."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

import penstock
from support.api.engines import bits_of, bytes_of_blocks, check_stats, make_engine
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_LEN = 128
BLOCKS_OF_ONE = MAX_LEN // 16


def favour(token_ids: Sequence[int], logits: penstock.Tensor) -> None:
    """A logits processor that depends on all tokens so far."""
    np.asarray(logits)[sum(token_ids) % 512] += 4.0


def requests(count: int) -> list[tuple[list[int], penstock.SamplingParams]]:
    """Prompts and parameters with random but reproducible lengths."""
    chance = random.Random(5)
    drawn = []
    for seed in range(count):
        num_prompt = chance.randint(1, 80)
        max_tokens = chance.randint(1, MAX_LEN - num_prompt)
        processors = [favour] if seed % 4 == 0 else []
        params = penstock.SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0,
            seed=seed,
            ignore_eos=True,
            logprobs=True,
            logits_processors=processors,
        )
        drawn.append((random_prompt(num_prompt, seed=seed), params))
    return drawn


async def serve(engine: penstock.Engine, count: int) -> list[penstock.Result]:
    """Run all requests concurrently; the chunks of each agree with its result."""
    results: dict[int, penstock.Result] = {}

    async def ask(index: int, prompt: list[int], params: penstock.SamplingParams) -> None:
        async with engine.stream(prompt, params) as request:
            seen = [token async for chunk in request for token in chunk.token_ids]
            results[index] = await request.result()
        assert tuple(seen) == results[index].token_ids

    async with anyio.create_task_group() as group:
        for index, (prompt, params) in enumerate(requests(count)):
            group.start_soon(ask, index, prompt, params)
    check_stats(engine)
    return [results[index] for index in range(count)]


async def press(engine: penstock.Engine, count: int) -> list[penstock.Result]:
    """The same as `serve`, repeated if the requests arrived too slowly to cause a preemption."""
    for _ in range(20):
        results = await serve(engine, count)
        if engine.stats().preemptions > 0:
            return results
    pytest.fail("there was no pressure")


@pytest.mark.anyio
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
async def test_cache_for_4_serves_64_requests_with_the_same_bits(
    tiny_model: Path, preemption_mode: str, *, prefix_cache: bool
) -> None:
    sizes = {"max_model_len": MAX_LEN, "max_num_seqs": 16}
    async with make_engine(tiny_model, prefix_cache=False, **sizes) as engine:
        expected = await serve(engine, 64)
        assert engine.stats().preemptions == 0
    async with make_engine(
        tiny_model,
        kv_cache_bytes=bytes_of_blocks(tiny_model, 4 * BLOCKS_OF_ONE),
        preemption_mode=preemption_mode,
        prefix_cache=prefix_cache,
        **sizes,
    ) as engine:
        assert engine.info.num_blocks == 4 * BLOCKS_OF_ONE
        pressed = await press(engine, 64)
        assert (engine.stats().swaps > 0) == (preemption_mode == "swap")
    assert [bits_of(result) for result in pressed] == [bits_of(result) for result in expected]


@pytest.mark.anyio
async def test_interrupted_requests_keep_output_and_free_memory(tiny_model: Path) -> None:
    sizes = {"max_model_len": MAX_LEN, "max_num_seqs": 16}
    async with make_engine(tiny_model, prefix_cache=False, **sizes) as engine:
        expected = await serve(engine, 64)
    async with make_engine(
        tiny_model,
        kv_cache_bytes=bytes_of_blocks(tiny_model, 4 * BLOCKS_OF_ONE),
        preemption_mode="interrupt",
        prefix_cache=False,
        **sizes,
    ) as engine:
        results = await press(engine, 64)
        assert engine.stats().blocks_used == 0
        # The engine holds nothing of them.
        again = await engine.generate(*requests(1)[0])
    assert bits_of(again) == bits_of(expected[0])
    reasons = {result.finish_reason for result in results}
    assert reasons == {"interrupted", "length"}
    for result, whole in zip(results, expected, strict=True):
        length = len(result.token_ids)
        assert result.token_ids == whole.token_ids[:length]
        assert result.logprobs == (whole.logprobs or ())[:length]
        assert (result.finish_reason == "interrupted") == (length < len(whole.token_ids))
        assert result.usage.completion_tokens == length


@pytest.mark.anyio
async def test_longest_victims_keep_output_and_free_memory(tiny_model: Path) -> None:
    """Ten requests of 96 tokens, more or less, over memory for three."""
    prompts = [random_prompt(8 + index, seed=index) for index in range(10)]
    params = penstock.SamplingParams(max_tokens=80, ignore_eos=True, temperature=1.0, seed=3)
    async with make_engine(tiny_model, prefix_cache=False) as engine:
        whole = [await engine.generate(prompt, params) for prompt in prompts]
    async with make_engine(
        tiny_model,
        prefix_cache=False,
        kv_cache_blocks=20,
        preemption_mode="interrupt",
        preemption_victim="longest",
    ) as engine:
        for _ in range(20):  # until the requests arrive fast enough to need more memory
            items = [item async for item in engine.generate_many(prompts, params, concurrency=10)]
            if engine.stats().finished_interrupted > 0:
                break
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_reserved) == (0, 0, 0, 0)
    results = [item.result for item in items if item.result is not None]
    reasons = [result.finish_reason for result in results]
    assert reasons.count("interrupted") == stats.finished_interrupted > 0
    assert reasons.count("length") == 10 - reasons.count("interrupted") > 0
    for result, expected in zip(results, whole, strict=True):
        assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        assert (result.finish_reason == "length") == (len(result.token_ids) == 80)
        assert result.usage.completion_tokens == len(result.token_ids)


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_victim_without_interruption_is_a_conflict(tiny_model: Path, preemption_mode: str) -> None:
    with pytest.raises(penstock.ConfigError, match="left out when preemption_mode is not interrupt") as error:
        make_engine(tiny_model, preemption_mode=preemption_mode, preemption_victim="longest")
    assert (error.value.field, error.value.value) == ("preemption_victim", "longest")
    make_engine(tiny_model, preemption_mode="interrupt", preemption_victim="longest")
    with pytest.raises(penstock.ConfigError, match="one of 'newest', 'longest'"):
        make_engine(tiny_model, preemption_mode="interrupt", preemption_victim="oldest")


@pytest.mark.anyio
async def test_urgent_requests_are_served_first(demo_model: Path) -> None:
    """One slot, occupied while the others arrive; then the lowest priority number runs first."""
    ended: list[int] = []
    async with make_engine(demo_model, max_num_seqs=1) as engine:

        async def wait(request: penstock.Request) -> None:
            await request.result()
            ended.append(request.params.priority)

        params = penstock.SamplingParams(max_tokens=3, ignore_eos=True)
        async with anyio.create_task_group() as group:
            first = await engine.start_request("One", params, max_tokens=100, priority=-9)
            for priority in (5, 3, -2, 0):
                group.start_soon(wait, await engine.start_request("Two", params, priority=priority))
            first.cancel()
    assert ended == [-2, 0, 3, 5]


@pytest.mark.anyio
async def test_urgent_request_preempts_a_lower_priority_one(demo_model: Path) -> None:
    params = penstock.SamplingParams(max_tokens=50, temperature=1.0, seed=1, ignore_eos=True, logprobs=True)
    prompt = random_prompt(30)
    async with make_engine(demo_model, max_num_seqs=1) as engine:
        expected = await engine.generate(prompt, params)
        patient = await engine.start_request(prompt, params, priority=1)
        await anext(aiter(patient))
        urgent = await engine.generate(prompt, params, max_tokens=5)
        assert patient.finish_reason is None
        assert urgent.token_ids == expected.token_ids[:5]
        assert bits_of(await patient.result()) == bits_of(expected)
        assert engine.stats().preemptions == 1


def test_request_that_can_never_fit_is_rejected_with_numbers(tiny_model: Path) -> None:
    size = bytes_of_blocks(tiny_model, 4)
    with (
        make_engine(tiny_model, kv_cache_bytes=size) as engine,
        pytest.raises(penstock.InvalidRequestError, match="at most 63 ids"),
    ):
        engine.blocking.generate(random_prompt(70), max_tokens=1)


@pytest.mark.anyio
async def test_full_waiting_queue_rejects_and_keeps_the_accepted(demo_model: Path) -> None:
    """A model large enough that the first request still runs when the last arrives."""
    async with make_engine(demo_model, max_num_seqs=1, max_waiting=2) as engine:
        params = penstock.SamplingParams(max_tokens=4, ignore_eos=True)
        running = await engine.start_request("One", params, max_tokens=100)
        waiting = [await engine.start_request("Two", params) for _ in range(2)]
        with pytest.raises(penstock.OverloadedError, match="2"):
            await engine.start_request("Three", params)
        running.cancel()
        assert [len((await request.result()).token_ids) for request in waiting] == [4, 4]
