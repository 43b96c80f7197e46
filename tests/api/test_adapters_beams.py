"""Beam searches with adapters: a search keeps its adapter until it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

import penstock
from penstock._core import Port
from support.api.engines import assert_at_rest, make_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from penstock import _core

pytestmark = pytest.mark.anyio

PROMPT = "to be"
SEARCH = penstock.SamplingParams(num_beams=3, n=3, max_tokens=12, ignore_eos=True, adapter="a")
GREEDY = penstock.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture
async def engine(tiny_model: Path, adapter_folders: list[Path]) -> AsyncIterator[penstock.Engine]:
    """Two adapters, `a` and `b`."""
    async with make_engine(tiny_model, max_adapters=2, max_cpu_adapters=3) as engine:
        await engine.load_adapter("a", adapter_folders[0])
        await engine.load_adapter("b", adapter_folders[1])
        yield engine


def begin(engine: penstock.Engine, params: penstock.SamplingParams = SEARCH) -> _core.BeamSearch:
    """A search that has made no step."""
    return engine._session.search_beams(PROMPT, params)


async def step(search: _core.BeamSearch) -> None:
    port = Port()
    requests = search.start_step(port)
    while not all(request.has_ended() for request in requests):
        await anyio.wait_readable(port.fileno())
        port.drain()
    results = [request.result() for request in requests]
    search.advance([result for result in results if result is not None])


async def finish(search: _core.BeamSearch) -> list[tuple[int, ...]]:
    """Make all steps; returns the outputs."""
    while search.is_running:
        await step(search)
    search.close()
    return [choice.token_ids for choice in search.result().choices]


async def outputs(engine: penstock.Engine, name: str) -> list[Any]:
    """The outputs of a search that nothing disturbs."""
    result = await engine.generate(PROMPT, SEARCH.replace(adapter=name))
    return [choice.token_ids for choice in result.choices]


async def settle() -> None:
    """Let the tasks that were started run until they wait."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


async def test_unload_waits_for_a_beam_search(engine: penstock.Engine) -> None:
    expected = await outputs(engine, "a")
    search = begin(engine)
    await step(search)
    is_unloaded = anyio.Event()

    async def unload() -> None:
        await engine.unload_adapter("a")
        is_unloaded.set()

    async with anyio.create_task_group() as group:
        group.start_soon(unload)
        await settle()
        with pytest.raises(penstock.AdapterNotFoundError):
            begin(engine)
        await step(search)
        assert not is_unloaded.is_set()
        assert await finish(search) == expected
    await assert_at_rest(engine)


async def test_replaced_adapter_computes_a_search_to_its_end(
    engine: penstock.Engine, adapter_folders: list[Path]
) -> None:
    expected = [await outputs(engine, "a"), await outputs(engine, "b")]
    assert expected[0] != expected[1]
    search = begin(engine)
    await step(search)
    await engine.load_adapter("a", adapter_folders[1], replace=True)
    await step(search)
    assert await outputs(engine, "a") == expected[1], "new requests have the new one"
    assert await finish(search) == expected[0]
    await assert_at_rest(engine)


def close(search: _core.BeamSearch) -> None:
    search.close()


def drop(search: _core.BeamSearch) -> None:
    del search


@pytest.mark.parametrize("end", [close, drop])
async def test_search_that_is_given_up_frees_its_adapter(
    engine: penstock.Engine, end: Callable[[_core.BeamSearch], None]
) -> None:
    searches = [begin(engine)]
    await step(searches[0])
    async with anyio.create_task_group() as group:
        group.start_soon(engine.unload_adapter, "a")
        await settle()
        assert await engine.generate(PROMPT, GREEDY, adapter="b")
        end(searches.pop())
    await assert_at_rest(engine)


async def test_cancelled_search_frees_its_adapter(engine: penstock.Engine) -> None:
    params = SEARCH.replace(max_tokens=400)
    async with anyio.create_task_group() as group, anyio.create_task_group() as searching:
        searching.start_soon(engine.generate, PROMPT, params)
        while engine.adapters["a"].running == 0:
            await anyio.lowlevel.checkpoint()
        group.start_soon(engine.unload_adapter, "a")
        await settle()
        searching.cancel_scope.cancel()
    await assert_at_rest(engine)


async def test_forced_unload_ends_a_search_between_its_steps(engine: penstock.Engine) -> None:
    search = begin(engine)
    await step(search)
    await engine.unload_adapter("a", force=True)
    message = 'adapter "a" is not loaded; 1 other adapters are loaded'
    with pytest.raises(penstock.AdapterNotFoundError, match=message) as caught:
        await step(search)
    error = caught.value
    assert (error.field, error.value, error.limit) == ("adapter", "a", "one of the 1 loaded adapters")
    search.close()
    await assert_at_rest(engine)


async def test_forced_unload_ends_a_search(engine: penstock.Engine) -> None:
    errors: list[penstock.PenstockError] = []

    async def run() -> None:
        try:
            await engine.generate(PROMPT, SEARCH, max_tokens=400)
        except penstock.PenstockError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        while engine.adapters["a"].running == 0:
            await anyio.lowlevel.checkpoint()
        await engine.unload_adapter("a", force=True)
    (error,) = errors
    assert isinstance(error, (penstock.GenerationError, penstock.AdapterNotFoundError))
    assert 'adapter "a"' in str(error)
    await assert_at_rest(engine)


async def test_drain_finishes_a_search_of_an_unloaded_adapter(engine: penstock.Engine) -> None:
    expected = await outputs(engine, "a")
    search = begin(engine)
    found: list[Any] = []

    async def read() -> None:
        found.extend(await finish(search))

    async with anyio.create_task_group() as group:
        group.start_soon(engine.unload_adapter, "a")
        await settle()
        group.start_soon(read)
        await engine.aclose(drain=20)
    assert found == expected
