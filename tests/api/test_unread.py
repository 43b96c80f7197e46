"""Requests that are polled, read with a timeout, left unread, or awaited by several tasks or threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import anyio
import pytest

import penstock
from support.api.engines import LONG, PROMPT, SHORT, Gate, assert_at_rest, make_engine, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.loops


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


def fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.anyio
@pytest.mark.parametrize("n", [1, 3])
async def test_unread_output_is_kept_without_a_pause(engine: penstock.Engine, n: int) -> None:
    expected = await engine.generate(PROMPT, LONG, n=n, logprobs=True)
    request = await engine.start_request(PROMPT, LONG, n=n, logprobs=True, unread="keep")
    while engine.stats().running:  # no task waits for output: no event leaves the result queues
        assert engine.stats().paused == 0
        await anyio.lowlevel.checkpoint()
    chunks = [request.poll() for _ in range(n)]
    tokens = {chunk.index: chunk.token_ids for chunk in chunks if chunk is not None}
    assert tokens == {choice.index: choice.token_ids for choice in expected.choices}
    assert request.poll() is None
    assert request.finish_reason == "length"
    assert (await request.result()).choices == expected.choices
    await assert_at_rest(engine)


def test_unread_output_is_kept_for_a_blocking_request(engine: penstock.Engine) -> None:
    expected = engine.blocking.generate(PROMPT, LONG)
    request = engine.blocking.start_request(PROMPT, LONG, unread="keep")
    wait_until(lambda: engine.stats().running == 0)
    assert request.finish_reason == "length"
    (chunk,) = request
    assert (chunk.token_ids, chunk.text) == (expected.token_ids, expected.text)


@pytest.mark.anyio
async def test_unread_option_with_another_word_is_refused(engine: penstock.Engine) -> None:
    with pytest.raises(penstock.InvalidRequestError, match=r"unread='drop' .*one of 'pause', 'keep'"):
        await engine.start_request(PROMPT, unread="drop")  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_poll_returns_every_chunk_and_never_waits(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, LONG, n=2)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    reasons: list[str] = []
    while len(reasons) < 2:
        if chunk := request.poll():
            tokens[chunk.index] += chunk.token_ids
            reasons += [chunk.finish_reason] if chunk.finish_reason else []
        else:
            await anyio.lowlevel.checkpoint()
    assert request.poll() is None
    assert reasons == ["length", "length"]
    assert request.finish_reason == "length"
    result = await request.result()
    assert tokens == {choice.index: list(choice.token_ids) for choice in result.choices}
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_poll_of_a_failed_request_raises(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, LONG, logits_processors=[fail])
    while request.finish_reason is None:
        await anyio.lowlevel.checkpoint()
    with pytest.raises(penstock.GenerationError, match="ZeroDivisionError"):
        request.poll()


@pytest.mark.anyio
async def test_poll_while_a_task_reads_raises(engine: penstock.Engine) -> None:
    gate = Gate()
    async with engine.stream(PROMPT, SHORT, logits_processors=[gate]) as request:
        assert request.poll() is None
        async with anyio.create_task_group() as group:
            group.start_soon(anext, request)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="only one reader at a time"):
                request.poll()
            gate.opened.set()
        assert (await request.result()).finish_reason == "length"


@pytest.mark.anyio
async def test_several_tasks_await_one_result(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, LONG)
    results = []

    async def wait() -> None:
        results.append(await request.result())

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(wait)
        num_read = sum([len(chunk.token_ids) async for chunk in request])
    assert num_read == 400
    assert results == [await request.result()] * 8


def test_several_threads_wait_for_one_result(engine: penstock.Engine) -> None:
    gate = Gate()
    request = engine.blocking.start_request(PROMPT, LONG, logits_processors=[gate])
    with ThreadPoolExecutor(9) as pool:
        waiting = [pool.submit(request.result) for _ in range(8)]
        chunks = pool.submit(list, request)
        gate.opened.set()
        assert sum(len(chunk.token_ids) for chunk in chunks.result()) == 400
        results = [future.result() for future in waiting]
    assert results == [request.result()] * 8


def test_read_with_a_timeout_loses_no_output(engine: penstock.Engine) -> None:
    gate = Gate()
    request = engine.blocking.start_request(PROMPT, SHORT, logits_processors=[gate])
    for timeout in (0, 0.01):
        with pytest.raises(
            TimeoutError, match=rf"request {request.id} has no new output after .*it continues"
        ):
            request.read(timeout=timeout)
    with pytest.raises(TimeoutError, match=r"has not finished after 0\.01 seconds"):
        request.result(timeout=0.01)
    for bad in (-1, float("nan"), "1", True):
        with pytest.raises(penstock.InvalidRequestError, match="number of seconds from 0") as caught:
            request.result(timeout=bad)  # type: ignore[arg-type]
        assert caught.value.field == "timeout"
    gate.opened.set()
    chunks = list(iter(lambda: request.read(timeout=float("inf")), None))
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    assert tokens == request.result(timeout=60).token_ids
    assert len(tokens) == 8
    assert request.read() is None


def test_read_of_a_failed_request_raises(engine: penstock.Engine) -> None:
    request = engine.blocking.start_request(PROMPT, SHORT, logits_processors=[fail])
    with pytest.raises(penstock.GenerationError, match="ZeroDivisionError"):
        request.read()


def test_waiting_thread_that_times_out_leaves_others_waiting(engine: penstock.Engine) -> None:
    gate = Gate()
    request = engine.blocking.start_request(PROMPT, SHORT, logits_processors=[gate])
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(request.result, timeout) for timeout in (0.01, None)]
        with pytest.raises(TimeoutError):
            waiting[0].result()
        gate.opened.set()
        assert waiting[1].result().finish_reason == "length"
