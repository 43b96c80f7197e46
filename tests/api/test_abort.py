"""`engine.abort`: the end of a request by its id, from any task or thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import anyio
import pytest

from support.api.engines import (
    LONG,
    PROMPT,
    SHORT,
    Gate,
    assert_at_rest,
    assert_at_rest_blocking,
    make_engine,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import penstock


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.mark.anyio
@pytest.mark.loops
async def test_aborted_request_ends_as_after_cancel(engine: penstock.Engine) -> None:
    gate = Gate()
    request = await engine.start_request(PROMPT, LONG, logits_processors=[gate])
    assert engine.abort(request.id)
    gate.opened.set()
    result = await request.result()
    assert result.finish_reason == request.finish_reason == "cancelled"
    assert len(result.token_ids) < 400
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_unknown_and_ended_ids_are_no_error(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, SHORT)
    await request.result()
    assert not engine.abort(request.id)
    assert not engine.abort(request.id + 1000)
    assert request.finish_reason == "length"


@pytest.mark.anyio
async def test_waiting_request_can_be_aborted(tiny_model: Path) -> None:
    async with make_engine(tiny_model, max_num_seqs=1) as engine:
        async with engine.stream(PROMPT, LONG, logits_processors=[gate := Gate()]) as running:
            waiting = await engine.start_request(PROMPT, SHORT)
            assert engine.abort(waiting.id)
            gate.opened.set()
            assert (await waiting.result()).token_ids == ()
            assert running.finish_reason != "cancelled"
        await assert_at_rest(engine)


@pytest.mark.anyio
async def test_request_of_another_loop_and_thread_is_aborted(engine: penstock.Engine) -> None:
    started, ids, reasons = threading.Event(), list[int](), list[str]()
    gate = Gate()

    async def read() -> None:
        async with engine.stream(PROMPT, LONG, logits_processors=[gate]) as request:
            ids.append(request.id)
            started.set()
            reasons.append((await request.result()).finish_reason)

    thread = threading.Thread(target=anyio.run, args=(read,))
    thread.start()
    await anyio.to_thread.run_sync(started.wait)
    assert engine.abort(ids[0])
    gate.opened.set()
    await anyio.to_thread.run_sync(thread.join)
    assert reasons == ["cancelled"]


def test_blocking_request_is_aborted_by_its_id(engine: penstock.Engine) -> None:
    request = engine.blocking.start_request(PROMPT, LONG, logits_processors=[gate := Gate()])
    assert engine.abort(request.id)
    gate.opened.set()
    assert request.result().finish_reason == "cancelled"
    assert_at_rest_blocking(engine)
