"""`stream_many`: the chunks of any number of prompts, interleaved, with nothing left behind."""

from __future__ import annotations

import gc
import json
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from support.api.engines import (
    LONG,
    PROMPT,
    SHORT,
    assert_at_rest,
    assert_at_rest_blocking,
    make_engine,
    resources,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.loops]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_num_seqs=16) as engine:
        yield engine


def prompt(number: int) -> list[int]:
    return [1 + number % 100, 2 + number // 100, 3]


def outputs(items: Iterable[penstock.BatchChunk]) -> dict[tuple[int, int], tuple[list[int], str]]:
    """The tokens and the text of each choice of each prompt; checks the order of the items of a prompt."""
    found: dict[tuple[int, int], tuple[list[int], str]] = {}
    num_tokens: dict[int, int] = {}
    ended: set[tuple[int, int]] = set()
    for item in items:
        assert item.error is None
        assert item.chunk is not None
        assert item.usage is not None
        key = item.index, item.chunk.index
        assert key not in ended
        tokens, text = found.get(key, ([], ""))
        found[key] = [*tokens, *item.chunk.token_ids], text + item.chunk.text
        num_tokens[item.index] = num_tokens.get(item.index, 0) + len(item.chunk.token_ids)
        assert item.usage.completion_tokens >= num_tokens[item.index]
        if item.chunk.finish_reason is not None:
            ended.add(key)
    assert ended == found.keys()
    return found


@pytest.mark.parametrize("n", [1, 3])
async def test_chunks_of_a_batch_are_those_of_single_calls(engine: penstock.Engine, n: int) -> None:
    prompts = [prompt(number) for number in range(40)]
    params = [SHORT.replace(max_tokens=4 + number % 9, n=n) for number in range(40)]
    expected = {}
    for index, ids in enumerate(prompts):
        for choice in (await engine.generate(ids, params[index])).choices:
            expected[index, choice.index] = list(choice.token_ids), choice.text

    async def source() -> AsyncIterator[list[int]]:
        for ids in prompts:
            await anyio.lowlevel.checkpoint()
            yield ids

    for given in (prompts, iter(prompts), source()):
        items = [item async for item in engine.stream_many(given, iter(params))]
        assert outputs(items) == expected
    assert outputs(engine.blocking.stream_many(iter(prompts), params, concurrency=3)) == expected
    await assert_at_rest(engine)


async def test_usage_of_a_chunk_counts_its_tokens(engine: penstock.Engine) -> None:
    counts = dict.fromkeys(range(6), 0)
    async for item in engine.stream_many([PROMPT] * 6, LONG, max_tokens=50):
        assert item.chunk is not None
        assert item.usage is not None
        counts[item.index] += len(item.chunk.token_ids)
        assert item.usage.prompt_tokens == len(PROMPT)
        assert item.usage.completion_tokens == counts[item.index]
    assert set(counts.values()) == {50}


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_chunks_of_running_prompts_are_interleaved(
    engine: penstock.Engine, *, is_blocking: bool
) -> None:
    prompts = [prompt(number) for number in range(8)]
    if is_blocking:
        items = list(engine.blocking.stream_many(prompts, LONG))
    else:
        items = [item async for item in engine.stream_many(prompts, LONG)]
    assert len(outputs(items)) == 8
    first_end = next(item for item in items if item.chunk and item.chunk.finish_reason)
    assert {item.index for item in items[: items.index(first_end)]} >= set(range(8)) - {first_end.index}


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_slow_reader_sees_every_prompt_in_turn(engine: penstock.Engine, *, is_blocking: bool) -> None:
    """Each prompt has new output whenever the reader returns, so one prompt alone could keep it busy."""
    seen: list[int] = []
    num_admitted = engine.stats().requests_admitted + 4

    def all_are_paused() -> bool:
        stats = engine.stats()
        return stats.requests_admitted == num_admitted and stats.running + stats.waiting == stats.paused

    def read(item: penstock.BatchChunk) -> bool:
        seen.append(item.index)
        wait_until(all_are_paused)
        return len(seen) == 7  # in turn: at most 3, and 4; one after another: 3, 2 and 2

    prompts, params = [prompt(number) for number in range(4)], LONG.replace(unread="pause")
    if is_blocking:
        with engine.blocking.stream_many(prompts, params) as blocking_items:
            for item in blocking_items:
                if read(item):
                    break
    else:
        async with engine.stream_many(prompts, params) as items:
            async for item in items:
                if read(item):
                    break
    assert set(seen) == {0, 1, 2, 3}
    await assert_at_rest(engine)


async def test_unread_stream_of_a_batch_pauses_its_requests(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine:
        async with engine.stream_many([prompt(number) for number in range(3)], LONG) as items:
            first = await anext(items)
            wait_until(lambda: engine.stats().paused == 3)
            rest = [item async for item in items]
        assert all(len(tokens) == 400 for tokens, _text in outputs([first, *rest]).values())


async def test_stream_of_a_batch_has_an_error_for_bad_prompts(engine: penstock.Engine) -> None:
    prompts: list[Any] = [PROMPT, [], "x" * 100_000, [10_000], ["a", "b"], None, PROMPT]
    for items in (
        [item async for item in engine.stream_many(prompts, SHORT)],
        list(engine.blocking.stream_many(prompts, SHORT)),
    ):
        errors = {item.index for item in items if isinstance(item.error, penstock.InvalidRequestError)}
        assert errors == {1, 2, 3, 4, 5}
        assert len(outputs(item for item in items if item.error is None)) == 2
        bad = next(item for item in items if item.error)
        assert (bad.chunk, bad.usage) == (None, None)
        assert json.loads(json.dumps(bad.to_dict()))["error"] == str(bad.error)
        good = next(item for item in items if item.chunk)
        assert json.loads(json.dumps(good.to_dict()))["usage"]["prompt_tokens"] == len(PROMPT)


async def test_request_that_fails_ends_with_its_error(engine: penstock.Engine) -> None:
    def fail(tokens: Any, _logits: object) -> None:
        if tokens[0] == 2 and len(tokens) > 3:
            raise ZeroDivisionError

    many = engine.stream_many([[1], [2], [3]], SHORT, logits_processors=[fail])
    items = [item async for item in many]
    failed = [item for item in items if item.index == 1]
    assert isinstance(failed[-1].error, penstock.GenerationError)
    assert all(item.error is None for item in failed[:-1])
    assert len(outputs(item for item in items if item.index != 1)) == 2


async def test_batch_of_streams_takes_prompts_as_needed(engine: penstock.Engine) -> None:
    num_taken = num_ended = 0

    def source() -> Iterator[list[int]]:
        nonlocal num_taken
        while True:
            num_taken += 1
            yield prompt(num_taken)

    async with engine.stream_many(source(), SHORT, concurrency=3) as items:
        async for item in items:
            num_ended += item.chunk is not None and item.chunk.finish_reason is not None
            assert num_taken <= num_ended + 3
            if num_ended == 20:
                break
    await assert_at_rest(engine)


async def test_streams_of_a_batch_wait_for_a_full_engine(tiny_model: Path) -> None:
    async with make_engine(tiny_model, max_num_seqs=1, max_waiting=1) as engine:
        prompts = [prompt(number) for number in range(10)]
        async with engine.stream(PROMPT, LONG) as first, engine.stream(PROMPT, LONG) as second:
            many = engine.stream_many(prompts, SHORT, concurrency=8)
            first.cancel()
            second.cancel()
            assert len(outputs([item async for item in many])) == 10
        assert len(outputs(engine.blocking.stream_many(prompts, SHORT, concurrency=8))) == 10


@pytest.mark.parametrize("options", [{"best_of": 3}, {"num_beams": 3}])
async def test_selected_outputs_are_refused_in_streams(
    engine: penstock.Engine, options: dict[str, Any]
) -> None:
    for call in (engine.stream_many, engine.blocking.stream_many):
        with pytest.raises(penstock.InvalidRequestError, match="generate_many"):
            call([PROMPT], max_tokens=4, **options)
    params = [SHORT, penstock.SamplingParams(max_tokens=4, **options)]
    items = [item async for item in engine.stream_many([PROMPT] * 2, params)]
    (error,) = (item.error for item in items if item.index == 1)
    assert isinstance(error, penstock.InvalidRequestError)


@pytest.mark.needs("proc")
async def test_streams_of_a_batch_that_is_left_are_cancelled(engine: penstock.Engine) -> None:
    prompts = [prompt(number) for number in range(100)]
    await assert_at_rest(engine)
    before = resources()
    pump = engine._pump()
    async for _item in engine.stream_many(prompts, LONG):
        break
    async with engine.stream_many(prompts, LONG) as items:
        await anext(items)
    with pytest.raises(StopAsyncIteration):
        await anext(items)
    closed = engine.stream_many(prompts, LONG)
    await anext(closed)
    await closed.aclose()
    await closed.aclose()
    with anyio.CancelScope() as scope:
        async for _item in engine.stream_many(prompts, LONG):
            scope.cancel()
    assert scope.cancelled_caught
    with pytest.raises(ZeroDivisionError):
        async for _item in engine.stream_many([1 // number] for number in range(1, -1, -1)):
            pass
    del items, closed
    gc.collect()
    assert not pump.watches
    await assert_at_rest(engine)
    assert resources() == before


def test_blocking_streams_that_are_left_are_cancelled(engine: penstock.Engine) -> None:
    prompts = [prompt(number) for number in range(100)]
    with engine.blocking.stream_many(prompts, LONG) as items:
        next(items)
    for _item in engine.blocking.stream_many(prompts, LONG):
        break
    assert_at_rest_blocking(engine)


async def test_closed_engine_ends_the_streams_of_a_batch(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine:
        batch = engine.stream_many([PROMPT] * 500, LONG)
        await anext(batch)
        await engine.aclose()
        with pytest.raises(penstock.EngineStoppedError):
            _ = [item async for item in batch]


async def test_streams_of_batches_share_an_event_loop(engine: penstock.Engine) -> None:
    async def run_batch() -> None:
        items = [item async for item in engine.stream_many((prompt(number) for number in range(30)), SHORT)]
        assert len(outputs(items)) == 30

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(run_batch)
            group.start_soon(engine.generate, PROMPT, LONG)
    assert threading.active_count() < 50
    await assert_at_rest(engine)


async def test_cancel_of_a_batch_ends_its_requests(engine: penstock.Engine) -> None:
    batch = engine.stream_many([PROMPT] * 40, LONG, concurrency=4)
    ends: dict[int, str] = {}
    async for item in batch:
        if not ends:
            batch.cancel()
        assert item.chunk is not None
        if item.chunk.finish_reason is not None:
            ends[item.index] = item.chunk.finish_reason
    assert ends == dict.fromkeys(range(4), "cancelled")
    await assert_at_rest(engine)


def test_cancel_of_one_prompt_leaves_the_others(engine: penstock.Engine) -> None:
    batch = engine.blocking.generate_many([PROMPT] * 3, [LONG, LONG.replace(max_tokens=9), LONG])
    threads = [threading.Thread(target=batch.cancel, args=(index,)) for index in (0, 2)]
    for thread in threads:
        thread.start()
    results = [item.result for item in batch]
    for thread in threads:
        thread.join()
    assert [result and result.finish_reason for result in results] == ["cancelled", "length", "cancelled"]
    assert_at_rest_blocking(engine)
