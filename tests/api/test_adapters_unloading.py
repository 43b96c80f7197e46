"""Adapters in use: swapping between host and device, and unloading while requests run."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

import penstock
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config
from support.api.engines import assert_at_rest, bits_of, make_engine
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.loops]

CONFIG = make_config("llama")
PROMPT = random_prompt(30)
PARAMS = penstock.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=True)
#: More tokens than a result queue holds: the request does not end until it is read.
LONG = PARAMS.replace(max_tokens=450)
#: Of `adapter_folders`.
NUM_FOLDERS = 12


@pytest.fixture
async def engine(tiny_model: Path, adapter_folders: list[Path]) -> AsyncIterator[penstock.Engine]:
    """Two adapters, `a` and `b`, in an engine for four."""
    async with make_engine(tiny_model, max_adapters=4) as engine:
        await engine.load_adapter("a", adapter_folders[0])
        await engine.load_adapter("b", adapter_folders[1])
        yield engine


async def run(engine: penstock.Engine, adapter: str | None, params: penstock.SamplingParams = PARAMS) -> Any:
    return bits_of(await engine.generate(PROMPT, params, adapter=adapter))


async def start(engine: penstock.Engine, adapter: str) -> penstock.Request:
    """A request that runs, and does not end until it is read."""
    request = await engine.start_request(PROMPT, LONG, adapter=adapter)
    await anext(aiter(request))
    return request


async def settle() -> None:
    """Let the tasks that were started run until they wait."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


def on_device(engine: penstock.Engine) -> set[str]:
    return {name for name, adapter in engine.adapters.items() if adapter.on_device}


# ---- swapping


async def test_least_recently_used_adapter_leaves_the_device(
    tiny_model: Path, adapter_folders: list[Path]
) -> None:
    names = [f"adapter {index}" for index in range(NUM_FOLDERS)]
    async with make_engine(tiny_model, max_adapters=NUM_FOLDERS, prefix_cache=False) as engine:
        for name, folder in zip(names, adapter_folders, strict=True):
            await engine.load_adapter(name, folder)
        expected = {name: await run(engine, name) for name in names}
        assert on_device(engine) == set(names)
    assert len({output[:2] for output in expected.values()}) == NUM_FOLDERS
    limits = {"max_adapters": 3, "max_cpu_adapters": NUM_FOLDERS, "prefix_cache": False}
    async with make_engine(tiny_model, **limits) as engine:
        assert (engine.info.max_adapters, engine.info.max_cpu_adapters) == (3, NUM_FOLDERS)
        for name, folder in zip(names, adapter_folders, strict=True):
            await engine.load_adapter(name, folder)
        assert on_device(engine) == set()
        recent: list[str] = []
        for name in [*names, *reversed(names), names[4], names[9], names[4], names[1], names[9]]:
            assert await run(engine, name) == expected[name]
            recent = [*[other for other in recent if other != name][-2:], name]
            assert on_device(engine) == set(recent), name


async def test_running_adapter_stays_on_the_device(tiny_model: Path, adapter_folders: list[Path]) -> None:
    async with make_engine(tiny_model, max_adapters=2, max_cpu_adapters=4) as engine:
        for name, folder in zip("abcd", adapter_folders, strict=False):
            await engine.load_adapter(name, folder)
        whole = await run(engine, "a", LONG)
        request = await start(engine, "a")
        for name in "bcdbcd":
            await run(engine, name)
            assert on_device(engine) == {"a", name}
            assert engine.adapters["a"].running == 1
        assert bits_of(await request.result()) == whole
        assert engine.adapters["a"].running == 0


async def test_waiting_adapters_get_their_turn(tiny_model: Path, adapter_folders: list[Path]) -> None:
    """Room for one adapter, a long prompt in chunks, requests of the base, and three other adapters."""
    limits = {"max_adapters": 1, "max_cpu_adapters": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    ended: list[str | None] = []
    async with make_engine(tiny_model, **limits) as engine:
        for name, folder in zip("abcd", adapter_folders, strict=False):
            await engine.load_adapter(name, folder)

        async def ask(name: str | None, prompt: list[int]) -> None:
            await engine.generate(prompt, PARAMS, adapter=name)
            ended.append(name)

        async with anyio.create_task_group() as group:
            for index in range(40):
                group.start_soon(ask, ("a", None, "b", "c", "d")[index % 5], random_prompt(1 + 5 * index))
        assert len(ended) == 40
        await assert_at_rest(engine)


async def test_counts_are_those_of_the_requests(tiny_model: Path, adapter_folders: list[Path]) -> None:
    async with make_engine(tiny_model, max_adapters=1, max_num_seqs=2) as engine:
        await engine.load_adapter("a", adapter_folders[0])
        requests = [await start(engine, "a") for _ in range(2)]
        waiting = await engine.start_request(PROMPT, LONG, adapter="a", n=3)
        assert (engine.adapters["a"].running, engine.adapters["a"].waiting) == (2, 3)
        for request in [*requests, waiting]:
            request.cancel()
        await assert_at_rest(engine)
        assert (engine.adapters["a"].running, engine.adapters["a"].waiting) == (0, 0)


# ---- unloading


async def test_unload_waits_for_open_requests(engine: penstock.Engine, adapter_folders: list[Path]) -> None:
    whole = await run(engine, "a", LONG)
    request = await start(engine, "a")
    is_unloaded = anyio.Event()

    async def unload() -> None:
        await engine.unload_adapter("a")
        is_unloaded.set()

    async with anyio.create_task_group() as group:
        group.start_soon(unload)
        await settle()
        assert not is_unloaded.is_set()
        # The name is free at once, and other adapters can be loaded and unloaded.
        with pytest.raises(penstock.AdapterNotFoundError, match="the loaded adapters are b"):
            await run(engine, "a")
        await engine.load_adapter("c", adapter_folders[2])
        await engine.unload_adapter("b")
        await engine.load_adapter("a", adapter_folders[3])
        assert (await run(engine, "a"))[0] != whole[0][:8]
        assert not is_unloaded.is_set()
        assert bits_of(await request.result()) == whole
    assert is_unloaded.is_set()
    assert list(engine.adapters) == ["a", "c"]


async def test_unload_waits_for_all_requests_of_the_adapter(engine: penstock.Engine) -> None:
    """The end or the cancellation of one of two requests does not free the adapter under the other."""
    whole = await run(engine, "a", LONG)
    first, second, third = [await start(engine, "a") for _ in range(3)]
    is_unloaded = anyio.Event()

    async def unload() -> None:
        await engine.unload_adapter("a")
        is_unloaded.set()

    async with anyio.create_task_group() as group:
        group.start_soon(unload)
        first.cancel()
        assert (await first.result()).finish_reason == "cancelled"
        assert bits_of(await second.result()) == whole
        await run(engine, "b")
        assert not is_unloaded.is_set()
        assert bits_of(await third.result()) == whole


async def test_forced_unload_ends_the_requests_with_a_reason(engine: penstock.Engine) -> None:
    whole = await run(engine, "b", LONG)
    own = [await start(engine, "a") for _ in range(3)]
    other = await start(engine, "b")
    await engine.unload_adapter("a", force=True)
    for request in own:
        with pytest.raises(penstock.GenerationError, match='adapter "a" was unloaded'):
            await request.result()
    assert bits_of(await other.result()) == whole
    await assert_at_rest(engine)


async def test_forced_unload_ends_waiting_requests(tiny_model: Path, adapter_folders: list[Path]) -> None:
    async with make_engine(tiny_model, max_adapters=2, max_num_seqs=1) as engine:
        await engine.load_adapter("a", adapter_folders[0])
        await engine.load_adapter("b", adapter_folders[1])
        running = await start(engine, "b")
        waiting = await engine.start_request(PROMPT, PARAMS, adapter="a", n=2)
        await engine.unload_adapter("a", force=True)
        with pytest.raises(penstock.GenerationError, match='adapter "a" was unloaded'):
            await waiting.result()
        assert running.finish_reason is None
        running.cancel()
        await assert_at_rest(engine)


async def test_force_ends_the_wait_of_another_unload(engine: penstock.Engine) -> None:
    request = await start(engine, "a")
    async with anyio.create_task_group() as group:
        group.start_soon(engine.unload_adapter, "a")
        await settle()
        await engine.unload_adapter("a", force=True)
    with pytest.raises(penstock.GenerationError, match='adapter "a" was unloaded'):
        await request.result()
    with pytest.raises(penstock.AdapterNotFoundError):
        await engine.unload_adapter("a")


async def test_force_ends_requests_of_the_named_adapter_only(
    engine: penstock.Engine, adapter_folders: list[Path]
) -> None:
    """The second adapter of the name is unloaded by force; the first waits for its request."""
    request = await start(engine, "a")
    async with anyio.create_task_group() as group:
        group.start_soon(engine.unload_adapter, "a")
        await settle()
        await engine.load_adapter("a", adapter_folders[2])
        await engine.unload_adapter("a", force=True)
        assert request.finish_reason is None
        request.cancel()
    assert list(engine.adapters) == ["b"]


async def test_cancelled_unload_ends_only_the_wait(engine: penstock.Engine) -> None:
    whole = await run(engine, "a", LONG)
    request = await start(engine, "a")
    async with anyio.create_task_group() as group:
        group.start_soon(engine.unload_adapter, "a")
        await settle()
        group.cancel_scope.cancel()
    assert list(engine.adapters) == ["b"]
    assert bits_of(await request.result()) == whole
    await assert_at_rest(engine)


async def test_unload_of_a_closed_engine_ends(tiny_model: Path, adapter_folders: list[Path]) -> None:
    engine = make_engine(tiny_model, max_adapters=1)
    await engine.start()
    await engine.load_adapter("a", adapter_folders[0])
    request = await start(engine, "a")
    async with anyio.create_task_group() as group:
        group.start_soon(engine.unload_adapter, "a")
        await settle()
        await engine.aclose()
    assert request.finish_reason is not None


async def test_unload_during_a_drain_ends(tiny_model: Path, adapter_folders: list[Path]) -> None:
    engine = make_engine(tiny_model, max_adapters=1)
    await engine.start()
    await engine.load_adapter("a", adapter_folders[0])
    whole = await run(engine, "a", LONG)
    request = await start(engine, "a")
    found = []

    async def read() -> None:
        found.append(bits_of(await request.result()))

    async with anyio.create_task_group() as group:
        group.start_soon(engine.unload_adapter, "a")
        await settle()
        group.start_soon(read)
        await engine.aclose(drain=20)
    assert found == [whole]


async def test_memory_of_an_unloaded_adapter_is_free(tiny_model: Path, adapter_folders: list[Path]) -> None:
    """Room for one adapter: a hundred take it in turn."""
    async with make_engine(tiny_model, max_adapters=1, prefix_cache=False) as engine:
        expected = []
        for folder in adapter_folders[:4]:
            await engine.load_adapter("a", folder)
            expected.append(await run(engine, "a"))
            await engine.unload_adapter("a")
        for index in range(100):
            await engine.load_adapter("a", adapter_folders[index % 4])
            assert await run(engine, "a") == expected[index % 4]
            await engine.unload_adapter("a")
        assert engine.adapters == {}
        await assert_at_rest(engine)


async def test_adapters_of_many_sizes_share_the_memory(tiny_model: Path, tmp_path: Path) -> None:
    """Adapters of three sizes: those on the device are never larger than their memory."""
    sizes = {"s": 4, "m": 8, "l": 16}
    places = {
        f"{size}{index}": write_adapter(tmp_path / f"{size}{index}", CONFIG, rank=rank, seed=index)
        for size, rank in sizes.items()
        for index in range(4)
    }
    async with make_engine(tiny_model, max_adapters=12, max_adapter_rank=16, prefix_cache=False) as engine:
        for name, place in places.items():
            await engine.load_adapter(name, place)
        expected = {name: await run(engine, name) for name in places}
        bytes_of = {name: adapter.bytes for name, adapter in engine.adapters.items()}
    memory = bytes_of["l0"] + bytes_of["m0"] + 2 * bytes_of["s0"]
    limits: dict[str, Any] = {"max_adapters": 12, "max_adapter_rank": 16, "adapter_cache_bytes": memory}
    async with make_engine(tiny_model, prefix_cache=False, **limits) as engine:
        for name, place in places.items():
            await engine.load_adapter(name, place)
        order = ["s0", "m0", "s1", "s2", "m1", "l0", "s3", "m2", "s0", "l1", "m3", "l2", "l3", "s1"]
        request = await start(engine, "s0")
        for name in order * 3:
            assert await run(engine, name) == expected[name], name
            loaded = on_device(engine)
            assert {"s0", name} <= loaded
            assert sum(bytes_of[other] for other in loaded) <= memory
        request.cancel()


@pytest.mark.parametrize("max_adapters", [1, 3])
async def test_storm_of_loads_never_mixes_adapters(
    max_adapters: int, tiny_model: Path, adapter_folders: list[Path]
) -> None:
    """Names change their adapters all the time; each output is that of one of the adapters of the name."""
    own = {"a": (0, 1), "b": (2, 3)}
    params = PARAMS.replace(max_tokens=20)
    expected: dict[int, Any] = {}
    limits = {"max_adapters": max_adapters, "max_cpu_adapters": 40, "max_num_seqs": 8}
    async with make_engine(tiny_model, **limits) as engine:
        for index in range(4):
            await engine.load_adapter("alone", adapter_folders[index], replace=True)
            expected[index] = await run(engine, "alone", params)
        await engine.unload_adapter("alone")
        base = await run(engine, None, params)

        async def change(name: str) -> None:
            for number in range(20):
                folder = adapter_folders[own[name][number % 2]]
                await engine.load_adapter(name, folder, replace=number % 4 != 3)
                if number % 4 == 2:
                    await engine.unload_adapter(name, force=number % 8 == 2)
            await engine.load_adapter(name, adapter_folders[own[name][0]], replace=True)

        async def ask(name: str) -> None:
            missing = 6
            while missing > 0:
                with suppress(penstock.AdapterNotFoundError, penstock.GenerationError):  # it was unloaded
                    found = await run(engine, name, params)
                    assert found in [expected[index] for index in own[name]]
                    missing -= 1
                assert await run(engine, None, params) == base

        async with anyio.create_task_group() as group:
            for name in own:
                group.start_soon(change, name)
                for _ in range(4):
                    group.start_soon(ask, name)
        assert [await run(engine, name, params) for name in own] == [expected[0], expected[2]]
        await assert_at_rest(engine)
        assert {name: adapter.running for name, adapter in engine.adapters.items()} == {"a": 0, "b": 0}
