"""Slow, abandoned and failing readers affect only their own requests; hundreds read concurrently."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import pytest

import penstock
from support.api.engines import LONG, PROMPT, SHORT, assert_at_rest, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import penstock

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


async def test_concurrent_streams_256_each_get_their_own_output(engine: penstock.Engine) -> None:
    alone = {
        seed: (await engine.generate(PROMPT, LONG, max_tokens=40, seed=seed)).token_ids for seed in range(4)
    }
    answers: dict[int, list[int]] = {}

    async def stream(seed: int) -> None:
        tokens = answers[seed] = []
        async for chunk in await engine.start_request(PROMPT, LONG, max_tokens=40, seed=seed):
            tokens.extend(chunk.token_ids)

    async with anyio.create_task_group() as group:
        for seed in range(256):
            group.start_soon(stream, seed)
    assert [len(tokens) for tokens in answers.values()] == [40] * 256
    assert len({tuple(tokens) for tokens in answers.values()}) > 250
    for seed, tokens in alone.items():
        assert tuple(answers[seed]) == tokens
    await assert_at_rest(engine)


async def test_stalled_reader_pauses_only_its_own_request(engine: penstock.Engine) -> None:
    expected = await engine.generate(PROMPT, LONG)
    async with engine.stream(PROMPT, LONG) as slow:
        first = await anext(slow)
        # Other requests keep the port of the event loop busy, so only the slow reader's ring fills up.
        while engine.stats().paused == 0:
            assert (await engine.generate(PROMPT, SHORT)).finish_reason == "length"
        assert engine.stats().running == 1
        assert slow.finish_reason is None
        tokens = list(first.token_ids)
        async for chunk in slow:
            tokens += chunk.token_ids
        assert tuple(tokens) == expected.token_ids
    await assert_at_rest(engine)


async def test_slow_reader_gets_missed_output_in_few_chunks(engine: penstock.Engine) -> None:
    async with engine.stream(PROMPT, LONG) as slow:
        while engine.stats().paused == 0:
            await engine.generate(PROMPT, SHORT)
        chunk = await anext(slow)
        assert len(chunk.token_ids) > 100
        assert chunk.text == engine.decode(chunk.token_ids)[: len(chunk.text)]
    await assert_at_rest(engine)


async def test_paused_request_can_be_cancelled_or_collected(engine: penstock.Engine) -> None:
    expected = await engine.generate(PROMPT, LONG)
    cancelled = await engine.start_request(PROMPT, LONG)
    collected = await engine.start_request(PROMPT, LONG)
    while engine.stats().paused < 2:
        await engine.generate(PROMPT, SHORT)
    cancelled.cancel()
    assert (await cancelled.result()).finish_reason == "cancelled"
    assert (await collected.result()).token_ids == expected.token_ids
    await assert_at_rest(engine)


async def test_failing_reader_cancels_only_its_own_request(engine: penstock.Engine) -> None:
    results: list[penstock.Result] = []

    async def fail() -> None:
        with suppress(ZeroDivisionError):
            async with engine.stream(PROMPT, LONG) as request:
                await anext(request)
                raise ZeroDivisionError

    async def collect() -> None:
        results.append(await engine.generate(PROMPT, LONG))

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(fail)
            group.start_soon(collect)
    assert [result.finish_reason for result in results] == ["length"] * 10
    assert len({result.token_ids for result in results}) == 1
    await assert_at_rest(engine)


async def test_abandoned_requests_do_not_block_others(tiny_model: Path) -> None:
    async with make_engine(tiny_model, max_num_seqs=4) as engine:
        dead = [await engine.start_request(PROMPT, LONG) for _ in range(4)]
        while engine.stats().paused < 4:
            await anyio.lowlevel.checkpoint()
        for request in dead:
            request.cancel()
        assert (await engine.generate(PROMPT, SHORT)).finish_reason == "length"
        await assert_at_rest(engine)


async def test_unread_requests_make_room_and_end_at_max_paused(tiny_model: Path) -> None:
    async with make_engine(tiny_model, max_num_seqs=1, max_waiting=1, max_paused=1) as engine:
        expected = await engine.generate(PROMPT, LONG)
        unread = []
        for num_ended in range(3):
            unread.append(await engine.start_request(PROMPT, LONG))
            while engine.stats().paused < 1 or engine.stats().finished_unread < num_ended:
                await anyio.lowlevel.checkpoint()
        assert engine.stats().running + engine.stats().waiting == 1
        assert (await engine.generate(PROMPT, SHORT)).finish_reason == "length"
        results = [await request.result() for request in unread]
        assert sorted(result.finish_reason for result in results) == ["length", "unread", "unread"]
        for result in results:
            num_tokens = len(result.token_ids)
            assert num_tokens > 0
            assert (num_tokens == 400) == (result.finish_reason == "length")
            assert result.token_ids == expected.token_ids[:num_tokens]
        await assert_at_rest(engine)


async def test_slow_reader_does_not_block_the_event_loop(engine: penstock.Engine) -> None:
    num_turns = num_chunks = 0
    is_done = False

    async def turn() -> None:
        nonlocal num_turns
        while not is_done:
            num_turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(turn)
        while num_chunks < 50:
            async with engine.stream(PROMPT, LONG) as request:
                async for _chunk in request:
                    num_chunks += 1
                    # Blocks the loop until the next chunk has arrived, so this task never waits for a chunk.
                    before = engine.stats()
                    while (now := engine.stats()).generation_tokens == before.generation_tokens:
                        if now.running == now.paused:
                            break
        is_done = True
    assert num_turns >= num_chunks


async def test_many_concurrent_result_calls_all_complete(engine: penstock.Engine) -> None:
    results: list[penstock.Result] = []

    async def collect(seed: int) -> None:
        results.append(await engine.generate(PROMPT, LONG, max_tokens=20, seed=seed))

    async with anyio.create_task_group() as group:
        for seed in range(256):
            group.start_soon(collect, seed)
    assert sorted(result.seed for result in results) == list(range(256))
    assert {len(result.token_ids) for result in results} == {20}
    await assert_at_rest(engine)
