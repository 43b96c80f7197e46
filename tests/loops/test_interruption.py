"""Opening and closing, interrupted at every wait: the engine's threads end and its memory is freed.

Each wait is interrupted in two ways: by a cancel scope, and by the native cancellation of `asyncio`, which
AnyIO's shielded scopes do not block.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from penstock import _hub
from support.api.engines import (
    LONG,
    PROMPT,
    assert_at_rest,
    engine_threads,
    make_engine,
    resident_bytes,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from pathlib import Path

#: More suspensions than any path through `start` or `aclose` has.
MANY_SUSPENSIONS = 100


class Interrupted:
    """Awaits a coroutine, and calls `interrupt` before its n-th suspension, counted from 1."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], n: int, interrupt: Callable[[], object]) -> None:
        self.coroutine = coroutine
        self.countdown = n
        self.interrupt = interrupt

    def __await__(self) -> Generator[Any, Any, None]:
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                awaited = self.coroutine.throw(error) if error else self.coroutine.send(value)
            except StopIteration:
                return
            self.countdown -= 1
            if self.countdown == 0:
                self.interrupt()
            value = error = None
            try:
                value = yield awaited
            except BaseException as raised:  # noqa: BLE001 - rethrown into the coroutine
                error = raised


async def interrupt(coroutine: Coroutine[Any, Any, None], n: int, how: str) -> bool:
    """Interrupt `coroutine` at its n-th suspension; false if it ended earlier."""
    if how == "scope":
        with anyio.CancelScope() as scope:
            interrupted = Interrupted(coroutine, n, scope.cancel)
            await interrupted
    else:

        async def run() -> None:
            await interrupted

        interrupted = Interrupted(coroutine, n, lambda: task.cancel())  # noqa: PLW0108 - no task yet
        task = asyncio.get_running_loop().create_task(run())
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
    return interrupted.countdown <= 0


LOOPS = {"asyncio": ("asyncio", {"use_uvloop": False}), "uvloop": ("asyncio", {"use_uvloop": True})}


@pytest.fixture(
    params=[
        *[
            pytest.param((*LOOPS[name], how), id=f"{name}-{how}")
            for name in LOOPS
            for how in ("scope", "native")
        ],
        pytest.param(("trio", {}, "scope"), id="trio-scope"),
    ]
)
def interruption(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any], str]:
    """An event loop and a way of interrupting a task on it."""
    interruption: tuple[str, dict[str, Any], str] = request.param
    return interruption


@pytest.fixture
def anyio_backend(interruption: tuple[str, dict[str, Any], str]) -> tuple[str, dict[str, Any]]:
    return interruption[:2]


@pytest.fixture
def how(interruption: tuple[str, dict[str, Any], str]) -> str:
    return interruption[2]


@pytest.mark.needs("proc")
@pytest.mark.anyio
async def test_opening_can_be_interrupted_at_every_wait(tiny_model: Path, how: str) -> None:
    memory = 0
    for n in range(1, MANY_SUSPENSIONS):
        engine = make_engine(tiny_model)
        if not await interrupt(engine.start(), n, how):
            await engine.aclose()
            break
        if "open" in repr(engine):  # the interruption came too late to stop it
            await engine.aclose()
        wait_until(lambda: not engine_threads())
        with pytest.raises(penstock.EngineStoppedError, match="closed"):
            await engine.start()
        del engine
        memory = memory or resident_bytes()
    assert n > 3
    # An engine of this model uses 30 MB.
    assert resident_bytes() - memory < 20 << 20


@pytest.mark.needs("proc")
@pytest.mark.anyio
async def test_closing_can_be_interrupted_at_every_wait(tiny_model: Path, how: str) -> None:
    memory = 0
    for n in range(1, MANY_SUSPENSIONS):
        engine = make_engine(tiny_model)
        await engine.start()
        request = await engine.start_request(PROMPT, LONG)
        was_interrupted = await interrupt(engine.aclose(), n, how)
        wait_until(lambda: not engine_threads())
        assert (await request.result()).finish_reason == "cancelled"
        del engine, request
        memory = memory or resident_bytes()
        if not was_interrupted:
            break
    assert n > 1  # closing waits once
    assert resident_bytes() - memory < 20 << 20


@pytest.mark.needs("proc")
@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["fetching", "loading"])
async def test_interruption_stops_opening_immediately(
    tiny_model: Path, how: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, release = threading.Event(), threading.Event()
    num_reports = 0

    def hold() -> None:
        has_begun.set()
        assert release.wait(20)

    def fetch(_model: str, _files: object) -> str:
        if stage == "fetching":
            hold()
        return str(tiny_model)

    def progress(_done: int, _total: int) -> None:
        nonlocal num_reports
        num_reports += 1
        hold()

    monkeypatch.setattr(_hub, "resolve", fetch)
    engine = make_engine(tiny_model, progress=progress)
    scope = anyio.CancelScope()

    async def start() -> None:
        with scope:
            await engine.start()

    async with anyio.create_task_group() as group:
        if how == "scope":
            group.start_soon(start)
        else:
            task = asyncio.get_running_loop().create_task(engine.start())
        while not has_begun.is_set():
            await anyio.lowlevel.checkpoint()
        if how == "scope":
            scope.cancel()
        else:
            task.cancel()
            await asyncio.wait([task])  # it does not wait for the thread
            assert task.cancelled()
        release.set()
    wait_until(lambda: not engine_threads())
    assert num_reports == (stage == "loading")
    with pytest.raises(penstock.EngineStoppedError, match="closed"):
        await engine.start()


@pytest.mark.anyio
async def test_interruption_does_not_affect_other_engines(tiny_model: Path, how: str) -> None:
    async with make_engine(tiny_model) as other, other.stream(PROMPT, LONG) as request:
        engine = make_engine(tiny_model)
        await engine.start()
        await interrupt(engine.aclose(), 1, how)
        assert (await request.result()).finish_reason == "length"
        await assert_at_rest(other)
