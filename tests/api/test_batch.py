"""`generate_many`: any number of prompts, bounded requests, an error per prompt, nothing left behind."""

from __future__ import annotations

import gc
import itertools
import math
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from penstock import _core, _jobs
from penstock._session import Session
from support.api.engines import (
    LONG,
    PROMPT,
    SHORT,
    assert_at_rest,
    assert_at_rest_blocking,
    make_engine,
    resident_bytes,
    resources,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.loops]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_num_seqs=16) as engine:
        yield engine


def prompt(number: int) -> list[int]:
    return [1 + number % 100, 2 + number // 100, 3]


def texts(items: list[penstock.BatchItem]) -> list[str]:
    assert all(item.error is None for item in items)
    return [item.result.text for item in items if item.result is not None]


async def test_batch_returns_results_in_the_order_of_the_prompts(engine: penstock.Engine) -> None:
    prompts = [prompt(number) for number in range(60)]
    expected = [(await engine.generate(ids, SHORT)).text for ids in prompts]

    async def source() -> AsyncIterator[list[int]]:
        for ids in prompts:
            await anyio.lowlevel.checkpoint()
            yield ids

    for given in (prompts, iter(prompts), source()):
        items = [item async for item in engine.generate_many(given, SHORT)]
        assert [item.index for item in items] == list(range(60))
        assert texts(items) == expected
    items = list(engine.blocking.generate_many(iter(prompts), SHORT))
    assert texts(items) == expected
    await assert_at_rest(engine)


async def test_batch_takes_parameters_with_each_prompt(engine: penstock.Engine) -> None:
    num_taken = 0

    def params() -> Iterator[penstock.SamplingParams]:
        nonlocal num_taken
        for number in range(60):
            num_taken += 1
            yield SHORT.replace(max_tokens=1 + number % 7)

    prompts = [prompt(number) for number in range(60)]
    for ordered in (True, False):
        async with engine.generate_many(prompts, list(params()), ordered=ordered) as many:
            lengths = {item.index: len(item.result.token_ids) async for item in many if item.result}
        assert lengths == {number: 1 + number % 7 for number in range(60)}
    num_taken = 0
    with engine.blocking.generate_many(iter(prompts), params(), concurrency=2, max_tokens=3) as items:
        assert [len(text.token_ids) for text in (next(items).result,) if text] == [3]
        assert num_taken <= 8
        assert [item.index for item in items] == list(range(1, 60))
    await assert_at_rest(engine)


async def test_invalid_parameters_of_a_prompt_are_its_error(engine: penstock.Engine) -> None:
    params = [SHORT, SHORT.replace(n=3), SHORT]
    items = [item async for item in engine.generate_many([PROMPT] * 3, params, best_of=2)]
    assert [item.error is None for item in items] == [True, False, True]
    with pytest.raises(penstock.InvalidRequestError, match="best_of=2"):
        raise items[1].error or AssertionError


async def test_parameters_of_another_type_raise(engine: penstock.Engine) -> None:
    params: list[Any] = [SHORT, {"max_tokens": 3}]
    with pytest.raises(TypeError, match="expected SamplingParams, got dict"):
        _ = [item async for item in engine.generate_many([PROMPT] * 2, params)]
    await assert_at_rest(engine)


@pytest.mark.parametrize(("num_prompts", "num_params"), [(3, 2), (2, 3), (0, 1), (1, 0)])
async def test_unequal_numbers_of_prompts_and_parameters_raise(
    engine: penstock.Engine, num_prompts: int, num_params: int
) -> None:
    prompts, params = [PROMPT] * num_prompts, [SHORT] * num_params
    counts = rf"{num_params} parameters for {num_prompts} prompts"
    for call in (engine.generate_many, engine.stream_many):
        with pytest.raises(penstock.InvalidRequestError, match=counts):
            call(prompts, params)
        with pytest.raises(penstock.InvalidRequestError, match=r"params has .* parameters for .* prompts"):
            _ = [item async for item in call(iter(prompts), params)]
    await assert_at_rest(engine)


async def test_unordered_batch_returns_short_results_first(engine: penstock.Engine) -> None:
    prompts = [PROMPT, [1] * 508, PROMPT, [2] * 508]  # up to 512 tokens
    items = [item async for item in engine.generate_many(prompts, LONG, ordered=False)]
    assert {item.index for item in items[:2]} == {1, 3}
    assert {item.index for item in items[2:]} == {0, 2}


async def test_batch_has_an_error_for_each_bad_prompt(engine: penstock.Engine) -> None:
    prompts: list[Any] = [PROMPT, [], "x" * 100_000, [10_000], ["a", "b"], None, PROMPT]
    for ordered in (True, False):
        items = [item async for item in engine.generate_many(prompts, SHORT, ordered=ordered)]
        assert sorted(item.index for item in items) == list(range(7))
        for item in items:
            assert isinstance(item.error, penstock.InvalidRequestError) == (item.index not in (0, 6))
            assert (item.result is None) == (item.error is not None)
    blocking = list(engine.blocking.generate_many(prompts, SHORT))
    assert [item.error is None for item in blocking] == [True, *[False] * 5, True]


@pytest.mark.parametrize("method", ["generate_many", "stream_many"])
async def test_text_without_memory_is_the_error_of_its_item(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    submit = Session.submit

    def refuse(self: Session, prompt: Any, *arguments: Any) -> Any:
        if prompt == "large":
            raise penstock.OutOfMemoryError("the system refuses 340 bytes")
        return submit(self, prompt, *arguments)

    monkeypatch.setattr(Session, "submit", refuse)
    items = [item async for item in getattr(engine, method)(["a", "large", "b"], SHORT)]
    failed = [item for item in items if item.error is not None]
    assert [(item.index, type(item.error)) for item in failed] == [(1, penstock.OutOfMemoryError)]
    assert {item.index for item in items} == {0, 1, 2}


async def test_failing_processor_is_the_error_of_its_item(engine: penstock.Engine) -> None:
    def fail(tokens: Any, _logits: object) -> None:
        if tokens[0] == 2:
            raise ZeroDivisionError

    items = [item async for item in engine.generate_many([[1], [2], [3]], SHORT, logits_processors=[fail])]
    assert [type(item.error) for item in items] == [type(None), penstock.GenerationError, type(None)]


async def test_batch_takes_prompts_as_it_needs_them(engine: penstock.Engine) -> None:
    num_taken = 0

    def source() -> Iterator[list[int]]:
        nonlocal num_taken
        while True:
            num_taken += 1
            yield prompt(num_taken)

    async with engine.generate_many(source(), SHORT, concurrency=3) as items:
        for number in range(20):
            assert (await anext(items)).index == number
            assert num_taken <= number + 12
    await assert_at_rest(engine)


@pytest.mark.needs("proc")
async def test_memory_of_a_long_batch_is_flat(engine: penstock.Engine) -> None:
    params = penstock.SamplingParams(max_tokens=1, ignore_eos=True)
    memory = num_items = 0
    async for _item in engine.generate_many((prompt(number) for number in range(5000)), params):
        num_items += 1
        if num_items == 1000:
            memory = resident_bytes()
    assert num_items == 5000
    assert resident_bytes() - memory < 10 << 20


async def test_batch_waits_where_single_calls_are_refused(tiny_model: Path) -> None:
    async with make_engine(tiny_model, max_num_seqs=1, max_waiting=1) as engine:
        prompts = [prompt(number) for number in range(10)]
        async with engine.stream(PROMPT, LONG) as first, engine.stream(PROMPT, LONG) as second:
            for ordered in (True, False):
                many = engine.generate_many(prompts, SHORT, concurrency=8, ordered=ordered)
                first.cancel()
                second.cancel()
                assert len(texts([item async for item in many])) == 10
        items = list(engine.blocking.generate_many(prompts, SHORT, concurrency=8))
        assert len(texts(items)) == 10


async def test_async_prompts_are_taken_while_an_item_is_missing(engine: penstock.Engine) -> None:
    num_taken = 0

    async def source() -> AsyncGenerator[list[int], None]:
        nonlocal num_taken
        while True:
            await anyio.lowlevel.checkpoint()
            num_taken += 1
            yield prompt(num_taken)

    params = (SHORT.replace(max_tokens=1 if number else 400) for number in itertools.count())
    async with aclosing(source()) as prompts, engine.generate_many(prompts, params, concurrency=3) as items:
        assert (await anext(items)).index == 0
        assert num_taken == 12
    await assert_at_rest(engine)


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize("method", ["generate_many", "stream_many"])
async def test_batch_pauses_while_the_engine_has_no_room(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch, method: str, *, is_blocking: bool
) -> None:
    submit = Session.submit
    num_refused = 0

    def refuse(self: Session, *arguments: Any) -> Any:
        nonlocal num_refused
        if num_refused < 3:
            num_refused += 1
            raise penstock.OverloadedError("no room")
        return submit(self, *arguments)

    monkeypatch.setattr(Session, "submit", refuse)
    begin = time.monotonic()
    if is_blocking:
        items = list(getattr(engine.blocking, method)([PROMPT] * 3, SHORT))
    else:
        items = [item async for item in getattr(engine, method)([PROMPT] * 3, SHORT)]
    assert time.monotonic() - begin >= 3 * 0.02
    assert {item.index for item in items if item.error is None} == {0, 1, 2}


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize("error", [penstock.OverloadedError, penstock.GenerationError])
async def test_refused_beam_search_does_not_delay_a_drain(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], *, is_blocking: bool
) -> None:
    def begin(job: _jobs.Job, search: _core.BeamSearch, _port: _core.Port) -> None:
        job._search = search
        message = "the first step was refused"
        raise error(message)

    monkeypatch.setattr(_jobs.Job, "begin", begin)
    prompts: list[Any] = [["not", "one prompt"], PROMPT]
    params = penstock.SamplingParams(max_tokens=4, num_beams=2)
    async with make_engine(tiny_model) as engine:
        if is_blocking:
            items = engine.blocking.generate_many(prompts, params)
            first = next(items)
        else:
            many = engine.generate_many(prompts, params)
            first = await anext(many)
        assert first.index == 0  # the batch waits for its reader, with the second prompt refused
        with anyio.fail_after(20):
            await engine.aclose(drain=math.inf)


@pytest.mark.parametrize("options", [{"best_of": 3, "n": 2, "seed": 1}, {"num_beams": 3}])
async def test_batch_of_selected_outputs_equals_single_calls(
    engine: penstock.Engine, options: dict[str, Any]
) -> None:
    params = penstock.SamplingParams(max_tokens=6, **options)
    prompts = [prompt(number) for number in range(8)]
    expected = [(await engine.generate(ids, params)).text for ids in prompts]
    assert texts([item async for item in engine.generate_many(prompts, params)]) == expected
    assert texts(list(engine.blocking.generate_many(prompts, params))) == expected


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_batch_looks_only_at_jobs_that_have_ended(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch, *, is_blocking: bool
) -> None:
    num_looks = 0
    poll = _jobs.Job.poll

    def counted(job: _jobs.Job, port: _core.Port) -> penstock.Result | None:
        nonlocal num_looks
        num_looks += 1
        return poll(job, port)

    monkeypatch.setattr(_jobs.Job, "poll", counted)
    prompts = [prompt(number) for number in range(60)]
    if is_blocking:
        items = list(engine.blocking.generate_many(prompts, LONG, max_tokens=40, concurrency=30))
    else:
        many = engine.generate_many(prompts, LONG, max_tokens=40, concurrency=30)
        items = [item async for item in many]
    assert len(texts(items)) == 60
    assert num_looks <= 60 * 2  # once when it starts, once when it has ended


async def test_batch_that_is_dropped_leaves_no_watch(engine: penstock.Engine) -> None:
    pump = engine._pump()
    many = engine.generate_many([prompt(number) for number in range(60)], LONG)
    await anext(many)
    assert pump.watches
    del many
    gc.collect()
    assert not pump.watches
    await assert_at_rest(engine)


async def test_batches_and_streams_share_an_event_loop(engine: penstock.Engine) -> None:
    counts: list[int] = []

    async def run_batch() -> None:
        prompts = (prompt(number) for number in range(50))
        params = penstock.SamplingParams(max_tokens=6, temperature=0, num_beams=1 + len(counts) % 2)
        counts.append(len([item async for item in engine.generate_many(prompts, params)]))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(run_batch)
            group.start_soon(engine.generate, PROMPT, LONG)
    assert counts == [50] * 4
    await assert_at_rest(engine)


@pytest.mark.needs("proc")
async def test_batch_that_is_left_cancels_what_runs(engine: penstock.Engine) -> None:
    prompts = [prompt(number) for number in range(100)]
    await assert_at_rest(engine)
    before = resources()
    async for _item in engine.generate_many(prompts, LONG):
        break
    async with engine.generate_many(prompts, LONG) as items:
        await anext(items)
    with pytest.raises(StopAsyncIteration):
        await anext(items)
    closed = engine.generate_many(prompts, LONG)
    await anext(closed)
    await closed.aclose()
    await closed.aclose()
    with anyio.CancelScope() as scope:
        async for _item in engine.generate_many(prompts, LONG):
            scope.cancel()
    assert scope.cancelled_caught
    with pytest.raises(ZeroDivisionError):
        async for _item in engine.generate_many(1 // number for number in range(1, -1, -1)):  # type: ignore[misc]
            pass
    del items, closed
    gc.collect()
    await assert_at_rest(engine)
    assert resources() == before


def test_blocking_batch_that_is_left_cancels_what_runs(engine: penstock.Engine) -> None:
    prompts = [prompt(number) for number in range(100)]
    with engine.blocking.generate_many(prompts, LONG) as items:
        next(items)
    for _item in engine.blocking.generate_many(prompts, LONG):
        break
    assert_at_rest_blocking(engine)


async def test_closed_engine_ends_a_batch(tiny_model: Path) -> None:
    for is_blocking in (False, True):
        engine = make_engine(tiny_model)
        await engine.start()
        if is_blocking:
            items = engine.blocking.generate_many([PROMPT] * 500, LONG)
            next(items)
            engine.close()
            with pytest.raises(penstock.EngineStoppedError):
                list(items)
        else:
            batch = engine.generate_many([PROMPT] * 500, LONG)
            await anext(batch)
            await engine.aclose()
            with pytest.raises(penstock.EngineStoppedError):
                _ = [item async for item in batch]


async def test_invalid_arguments_of_a_batch_are_refused_at_once(engine: penstock.Engine) -> None:
    for concurrency in (0, True, 1.5):
        with pytest.raises(penstock.InvalidRequestError, match="concurrency"):
            engine.generate_many([PROMPT], SHORT, concurrency=concurrency)  # type: ignore[arg-type]
    for params in ("greedy", {"max_tokens": 3}, 1):
        with pytest.raises(TypeError, match="expected SamplingParams"):
            engine.generate_many([PROMPT], params)  # type: ignore[arg-type]
    for prompts in ("one text", None, {"role": "user"}):
        with pytest.raises(penstock.InvalidRequestError, match="iterable of prompts"):
            engine.generate_many(prompts, SHORT)
    with pytest.raises(penstock.InvalidRequestError, match="temperature"):
        engine.generate_many([PROMPT], temperature=-1)
