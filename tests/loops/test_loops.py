"""One engine with many event loops and threads; the shared wait of the tasks of one loop."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from penstock._pump import Pump
from support.api.engines import (
    BACKENDS,
    LONG,
    PROMPT,
    SHORT,
    assert_at_rest,
    assert_at_rest_blocking,
    make_engine,
    resources,
    run_in_threads,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import penstock


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.mark.needs("proc")
def test_loops_of_all_kinds_share_an_engine(engine: penstock.Engine) -> None:
    expected = [
        engine.blocking.generate(PROMPT, LONG, max_tokens=40, seed=seed).token_ids for seed in range(16)
    ]
    answers: list[dict[int, tuple[int, ...]]] = []

    def serve(how: dict[str, Any]) -> None:
        mine: dict[int, tuple[int, ...]] = {}

        async def ask(seed: int) -> None:
            async with engine.stream(PROMPT, LONG, max_tokens=40, seed=seed) as request:
                mine[seed] = tuple([token async for chunk in request for token in chunk.token_ids])

        async def main() -> None:
            async with anyio.create_task_group() as group:
                for seed in range(16):
                    group.start_soon(ask, seed)

        anyio.run(main, **how)
        answers.append(mine)

    for how in BACKENDS:
        serve(how)  # resources that a kind of loop opens once per process are open now
    answers.clear()
    before = resources()
    run_in_threads(serve, BACKENDS * 2)
    assert len(answers) == 6
    for mine in answers:
        assert [mine[seed] for seed in range(16)] == expected
    assert_at_rest_blocking(engine)
    assert resources() == before


@pytest.mark.needs("proc")
def test_consecutive_loops_use_an_engine_neither_opened(engine: penstock.Engine) -> None:
    before = resources()
    for how in BACKENDS * 2:
        anyio.run(assert_at_rest, engine, **how)
    assert resources() == before


def test_engine_opened_on_one_loop_closes_on_another(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    anyio.run(engine.start, backend="asyncio")
    anyio.run(assert_at_rest, engine, backend="trio")
    anyio.run(engine.aclose, backend="trio")


@pytest.mark.needs("proc")
def test_loop_that_ends_with_open_requests_leaves_no_resources(engine: penstock.Engine) -> None:
    async def abandon() -> None:
        requests = [await engine.start_request(PROMPT, LONG) for _ in range(5)]
        await anext(requests[0])
        for request in requests:
            request.cancel()

    before = resources()
    for how in BACKENDS:
        anyio.run(abandon, **how)
        assert_at_rest_blocking(engine)
    assert resources() == before


@pytest.mark.anyio
async def test_request_of_another_loop_cannot_be_read(engine: penstock.Engine) -> None:
    async with engine.stream(PROMPT, LONG) as request:
        errors: list[str] = []

        def read_elsewhere() -> None:
            async def main() -> None:
                try:
                    async for _chunk in request:
                        pass
                except RuntimeError as error:
                    errors.append(str(error))

            anyio.run(main)

        await anyio.to_thread.run_sync(read_elsewhere)
    assert len(errors) == 1
    assert "another event loop" in errors[0]


@pytest.mark.anyio
async def test_task_awaiting_a_result_is_not_woken_per_token(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[int] = []
    drains = 0

    class Spy:
        """A port that records the request ids it returns."""

        def __init__(self, port: Any) -> None:
            self.port = port

        def drain(self) -> list[int]:
            nonlocal drains
            drains += 1
            news = list(self.port.drain())
            named.extend(news)
            return news

    async with engine.stream(PROMPT, LONG) as request:
        monkeypatch.setattr(request._pump, "port", Spy(request._pump.port))
        await request.result()
        monkeypatch.undo()
    assert drains > 20
    assert named.count(request.id) == 1


@pytest.mark.anyio
async def test_leader_can_leave_at_any_time(engine: penstock.Engine) -> None:
    """The leader is cancelled repeatedly while other tasks follow; the followers get all of their output."""
    expected = (await engine.generate(PROMPT, LONG)).token_ids
    answers: list[tuple[int, ...]] = []

    async def follow() -> None:
        request = await engine.start_request(PROMPT, LONG)
        answers.append(tuple([token async for chunk in request for token in chunk.token_ids]))

    async def lead_and_leave() -> None:
        async with engine.stream(PROMPT, LONG) as request:
            for _ in range(100):
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as group:
                        group.start_soon(request.result)
                        await anyio.lowlevel.checkpoint()
                        scope.cancel()

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(lead_and_leave)
        for _ in range(5):
            group.start_soon(follow)
    assert answers == [expected] * 5
    await assert_at_rest(engine)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_wait_behind_a_leader_of_a_stopped_loop_raises(backend: str) -> None:
    loop = asyncio.new_event_loop()

    async def lead() -> tuple[Pump, asyncio.Task[bool]]:
        pump = Pump()
        task = asyncio.ensure_future(pump.wait(1, lambda: False))
        with anyio.fail_after(20):
            while not pump._has_leader:
                await anyio.lowlevel.checkpoint()
        return pump, task

    pump, task = loop.run_until_complete(lead())

    async def follow() -> None:
        await pump.wait(2, lambda: False)

    with pytest.raises(RuntimeError, match="request 2 was started on another event loop"):
        anyio.run(follow, backend=backend)
    assert not pump._followers
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


@pytest.mark.anyio
async def test_pump_never_leaves_followers_without_a_leader() -> None:
    """Random waits, wake-ups and cancellations on a bare pump; a waiting task implies a leader."""
    pump = Pump()
    chance = random.Random(3)
    ready: set[int] = set()
    scopes: dict[int, anyio.CancelScope] = {}

    async def wait(number: int) -> None:
        with anyio.CancelScope() as scope:
            scopes[number] = scope
            await pump.wait(number, lambda: number in ready)
        del scopes[number]

    async def settle() -> None:
        for _ in range(6):
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        for turn in range(300):
            match chance.choice(["wait", "wait", "cancel", "satisfy"]):
                case "wait":
                    group.start_soon(wait, turn)
                case "cancel" if scopes:
                    for number in chance.sample(sorted(scopes), chance.randint(1, len(scopes))):
                        scopes[number].cancel()
                case "satisfy" if scopes:
                    # Output without a wake-up: the next leader must find it by itself.
                    ready.update(chance.sample(sorted(scopes), 1))
                    for key in list(pump._followers):
                        pump._wake(key)
            await settle()
            assert pump._has_leader or not pump._followers
        for scope in list(scopes.values()):
            scope.cancel()
    assert not pump._has_leader
    assert not pump._followers


@pytest.mark.anyio
async def test_short_and_long_requests_end_independently(engine: penstock.Engine) -> None:
    done: list[int] = []

    async def ask(max_tokens: int) -> None:
        result = await engine.generate(PROMPT, LONG, max_tokens=max_tokens)
        assert len(result.token_ids) == max_tokens
        done.append(max_tokens)

    async with anyio.create_task_group() as group:
        for max_tokens in (200, 1, 100, 2, 50, 3):
            group.start_soon(ask, max_tokens)
    assert sorted(done) == [1, 2, 3, 50, 100, 200]
    assert (await engine.generate(PROMPT, SHORT)).finish_reason == "length"
