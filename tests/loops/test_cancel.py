"""Requests cancelled at any point and in any way leave no resources behind."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import pytest

import penstock
from support.api.engines import LONG, PROMPT, SHORT, assert_at_rest, check_stats, make_engine, resources

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

NUM_STREAMS = 1000
STATES = ("being admitted", "before a chunk", "in mid-stream", "at the end")


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    """An engine with few slots, so that most requests wait."""
    with make_engine(tiny_model, max_num_seqs=16, max_waiting=2000) as engine:
        yield engine


async def test_cancel_ends_a_stream_and_keeps_its_output(engine: penstock.Engine) -> None:
    whole = await engine.generate(PROMPT, LONG)
    request = await engine.start_request(PROMPT, LONG)
    first = await anext(request)
    request.cancel()
    request.cancel()
    rest = [chunk async for chunk in request]
    result = await request.result()
    assert (result.finish_reason, result.stop_reason, request.finish_reason) == (
        "cancelled",
        None,
        "cancelled",
    )
    tokens = first.token_ids + tuple(token for chunk in rest for token in chunk.token_ids)
    assert tokens == result.token_ids == whole.token_ids[: len(tokens)]
    assert result.text == whole.text[: len(result.text)]
    assert len(tokens) < 400
    await assert_at_rest(engine)


async def test_cancel_after_the_end_changes_nothing(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, SHORT)
    result = await request.result()
    request.cancel()
    assert await request.result() == result
    assert request.finish_reason == "length"


async def test_waiting_request_is_cancelled_before_it_runs(tiny_model: Path) -> None:
    async with make_engine(tiny_model, max_num_seqs=1) as engine:
        async with engine.stream(PROMPT, LONG) as running:
            await anext(running)
            waiting = await engine.start_request(PROMPT, LONG)
            assert engine.stats().waiting == 1
            waiting.cancel()
            result = await waiting.result()
            assert (result.finish_reason, result.token_ids, result.text) == ("cancelled", (), "")
            assert result.timings.first_token is None
            assert running.finish_reason is None
        await assert_at_rest(engine)


async def test_leaving_a_stream_block_for_any_reason_cancels_it(engine: penstock.Engine) -> None:
    async with engine.stream(PROMPT, LONG) as left:
        await anext(left)
    assert (await left.result()).finish_reason == "cancelled"
    with pytest.raises(ZeroDivisionError):
        async with engine.stream(PROMPT, LONG) as raised:
            raise ZeroDivisionError
    assert (await raised.result()).finish_reason == "cancelled"
    with anyio.CancelScope() as scope:
        async with engine.stream(PROMPT, LONG) as cancelled:
            scope.cancel()
            await cancelled.result()
    assert scope.cancelled_caught
    assert (await cancelled.result()).finish_reason == "cancelled"
    async with engine.stream(PROMPT, SHORT) as finished:
        await finished.result()
    assert finished.finish_reason == "length"
    await assert_at_rest(engine)


async def test_cancelled_generate_cancels_its_request(engine: penstock.Engine) -> None:
    before = engine.stats().requests_admitted
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.generate, PROMPT, LONG)
            while engine.stats().requests_admitted == before:
                await anyio.lowlevel.checkpoint()
            scope.cancel()
    await assert_at_rest(engine)


async def test_dropped_request_is_cancelled_with_a_warning(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, LONG)
    await anext(request)
    with pytest.warns(ResourceWarning, match="dropped before it finished"):
        del request
    await assert_at_rest(engine)


async def test_ended_request_is_dropped_without_warning(engine: penstock.Engine) -> None:
    unread = await engine.start_request(PROMPT, SHORT)
    await assert_at_rest(engine)
    cancelled = await engine.start_request(PROMPT, LONG)
    cancelled.cancel()
    del unread, cancelled
    await assert_at_rest(engine)


@pytest.mark.needs("proc")
async def test_thousand_streams_ended_in_every_way_leave_no_resources(engine: penstock.Engine) -> None:
    expected = await engine.generate(PROMPT, LONG)
    before = resources()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        streams = MixedStreams(engine, seed=7)
        await streams.run(NUM_STREAMS)
        assert streams.states.total() == NUM_STREAMS
        assert min(streams.states[state] for state in STATES) > NUM_STREAMS // 50, streams.states
        await assert_at_rest(engine)
        assert resources() == before
    assert (await engine.generate(PROMPT, LONG)).token_ids == expected.token_ids


class MixedStreams:
    """Many streams, each ended in its own way after a random number of received chunks."""

    def __init__(self, engine: penstock.Engine, seed: int) -> None:
        self.engine = engine
        self.chance = random.Random(seed)
        self.num_chunks = 0
        self.due: list[tuple[int, anyio.CancelScope]] = []
        self.states: Counter[str] = Counter()

    async def run(self, num_streams: int) -> None:
        """Run all streams concurrently; count the states in which they ended."""
        ways = (self.drop, self.leave, self.cancel, self.fail, self.be_cancelled, self.read_to_the_end)

        async def live(way: Callable[[], Awaitable[str]]) -> None:
            self.states[await way()] += 1

        async with anyio.create_task_group() as group:
            for way in self.chance.choices(ways, k=num_streams):
                group.start_soon(live, way)

    async def read(self, request: penstock.Request, num_chunks: int) -> str:
        """Read `num_chunks` chunks, cancel the scopes that are due, and return the state reached."""
        state = "before a chunk"
        for _ in range(num_chunks):
            try:
                await anext(request)
            except StopAsyncIteration:
                break
            state = "in mid-stream"
            self.num_chunks += 1
            while self.due and self.due[0][0] <= self.num_chunks:
                self.due.pop(0)[1].cancel()
        return state

    async def drop(self) -> str:
        """Drop the request, read or not."""
        length = self.chance.choice([1, 3, 30, 60])
        request = await self.engine.start_request([self.chance.randrange(200)] * length, LONG)
        return await self.read(request, self.chance.randrange(3))

    async def leave(self) -> str:
        """Leave the stream block."""
        async with self.engine.stream(PROMPT, LONG) as request:
            return await self.read(request, self.chance.randrange(3))

    async def cancel(self) -> str:
        """Cancel, then wait for the end."""
        request = await self.engine.start_request(PROMPT, LONG)
        state = await self.read(request, self.chance.randrange(3))
        request.cancel()
        assert (await request.result()).finish_reason == "cancelled"
        return state

    async def fail(self) -> str:
        """Raise an exception while reading."""
        with suppress(ZeroDivisionError):
            async with self.engine.stream(PROMPT, LONG) as request:
                await self.read(request, 1)
                raise ZeroDivisionError
        return "in mid-stream"

    async def be_cancelled(self) -> str:
        """Cancel the task at any point: during admission, waiting, leading, following or reading."""
        state = "being admitted"
        with anyio.CancelScope() as scope:
            if self.chance.random() < 0.3:
                scope.cancel()
            else:
                self.due.append((self.num_chunks + self.chance.randrange(200), scope))
                self.due.sort(key=lambda entry: entry[0])
            async with self.engine.stream(PROMPT, LONG) as request:
                state = "before a chunk"
                state = await self.read(request, 1)
                await self.read(request, 400)
        return state

    async def read_to_the_end(self) -> str:
        """Read to the end, then cancel."""
        request = await self.engine.start_request(PROMPT, SHORT)
        tokens = [token async for chunk in request for token in chunk.token_ids]
        assert len(tokens) == 8
        request.cancel()
        return "at the end"


async def test_request_is_cancelled_during_prefill(tiny_model: Path) -> None:
    async with make_engine(tiny_model, max_num_batched_tokens=64) as engine:
        num_in_time = 0
        while num_in_time < 10:
            async with engine.stream([1] * 480, LONG) as request:
                while (
                    stats := engine.stats()
                ).blocks_used == 0 and stats.requests_finished < stats.requests_admitted:
                    await anyio.lowlevel.checkpoint()
            result = await request.result()
            check_stats(engine)
            num_in_time += (result.finish_reason, result.token_ids) == ("cancelled", ())
        await assert_at_rest(engine)


@pytest.mark.needs("proc")
async def test_closed_engine_ends_many_concurrent_streams(tiny_model: Path) -> None:
    outcomes: list[str] = []

    async def stream(engine: penstock.Engine) -> None:
        try:
            async with engine.stream(PROMPT, LONG) as request:
                async for _chunk in request:
                    await engine.aclose()
            outcomes.append((await request.result()).finish_reason)
        except (penstock.OverloadedError, penstock.EngineStoppedError) as error:
            outcomes.append(type(error).__name__)

    async def run_streams() -> None:
        engine = make_engine(tiny_model, max_num_seqs=16, max_waiting=50)
        await engine.start()
        async with anyio.create_task_group() as group:
            for _ in range(200):
                group.start_soon(stream, engine)
        check_stats(engine)

    before = resources()
    await run_streams()
    assert len(outcomes) == 200
    assert set(outcomes) <= {"cancelled", "OverloadedError", "EngineStoppedError"}
    assert outcomes.count("cancelled") > 0
    assert resources() == before
