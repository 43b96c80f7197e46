"""The stream of KV events in the process, on every event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

import penstock
from support.api.engines import make_engine
from support.api.kv_events import Blocks, update
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.loops]

PARAMS = penstock.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[penstock.Engine]:
    async with make_engine(tiny_model) as engine:
        yield engine


async def stored(stream: penstock.KvEventStream, num_blocks: int) -> list[object]:
    """The events up to the one with which so many blocks are stored."""
    events: list[object] = []
    async for event in stream:
        events.append(event)
        num_blocks -= len(event.block_hashes) if isinstance(event, penstock.BlockStored) else 0
        if num_blocks <= 0:
            break
    return events


async def test_stream_reports_stored_and_cleared_blocks(engine: penstock.Engine) -> None:
    stream = engine.kv_events()
    prompt = random_prompt(64)
    await engine.generate(prompt, PARAMS, cache_salt="mine")
    first, *events = await stored(stream, 4)
    assert first == penstock.AllBlocksCleared()
    [event] = events
    assert isinstance(event, penstock.BlockStored)
    assert list(event.token_ids) == list(prompt)
    assert (event.tier, event.cache_salt, event.adapter) == ("device", "mine", None)
    assert (event.parent_block_hash, event.block_size) == (None, 16)
    engine.reset_prefix_cache(cache_salt="mine")
    removed = await anext(stream)
    assert isinstance(removed, penstock.BlockRemoved)
    assert set(removed.block_hashes) == set(event.block_hashes)
    engine.reset_prefix_cache()
    assert await anext(stream) == penstock.AllBlocksCleared()


async def test_late_stream_begins_with_the_whole_cache(engine: penstock.Engine) -> None:
    early = engine.kv_events()
    for seed in range(3):
        await engine.generate(random_prompt(48, seed=seed), PARAMS)
    mirrors: list[Blocks] = [{}, {}]
    for mirror, stream in zip(mirrors, (early, engine.kv_events()), strict=True):
        update(mirror, await stored(stream, 9))
    assert mirrors[0] == mirrors[1]
    assert len(mirrors[0]) == 9


async def test_waiting_task_is_woken_and_cancelled(engine: penstock.Engine) -> None:
    stream = engine.kv_events()
    assert await anext(stream) == penstock.AllBlocksCleared()
    with anyio.move_on_after(0.01) as scope:
        await anext(stream)
    assert scope.cancelled_caught
    found: list[object] = []

    async def wait() -> None:
        found.append(await anext(stream))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await engine.generate(random_prompt(32), PARAMS)
    assert isinstance(found[0], penstock.BlockStored)


async def test_stream_ends_when_the_engine_sleeps(engine: penstock.Engine) -> None:
    stream = engine.kv_events()
    await engine.generate(random_prompt(32), PARAMS)
    hashes = [event.block_hashes for event in await stored(stream, 2) if hasattr(event, "block_hashes")]
    await engine.sleep()
    assert [event async for event in stream] == [penstock.AllBlocksCleared()]
    with pytest.raises(penstock.EngineStoppedError):
        engine.kv_events()
    await engine.wake()
    again = engine.kv_events()
    await engine.generate(random_prompt(32), PARAMS)
    found = [event.block_hashes for event in await stored(again, 2) if hasattr(event, "block_hashes")]
    assert found == hashes, "hashes are stable"
    await engine.aclose()
    assert [event async for event in again] == [penstock.AllBlocksCleared()]


async def test_engine_without_prefix_cache_has_no_events(tiny_model: Path) -> None:
    async with make_engine(tiny_model, prefix_cache=False) as engine:
        with pytest.raises(penstock.ConfigError, match="prefix_cache_ttl"):
            engine.kv_events()
