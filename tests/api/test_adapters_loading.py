"""Loading adapters: joined and cancelled loads, progress, sleep, close and forks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

import penstock
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config
from support.api.engines import bits_of, make_engine, wait_until
from support.api.running import random_prompt

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.loops

CONFIG = make_config("llama")
PROMPT = random_prompt(30)
PARAMS = penstock.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=True)


class Gate:
    """A progress callback that blocks the loading thread until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        """Wait in the loading thread."""
        self.calls.append((done, total))
        self.reached.set()
        assert self.opened.wait(20)

    async def reach(self) -> None:
        """Wait until a load has begun."""
        assert await anyio.to_thread.run_sync(self.reached.wait, 20)


def output(engine: penstock.Engine, adapter: str | None) -> Any:
    return bits_of(engine.blocking.generate(PROMPT, PARAMS, adapter=adapter))


# ---- properties and progress


def test_adapter_has_its_properties(
    engine: penstock.Engine, adapter_folders: list[Path], tmp_path: Path
) -> None:
    found = engine.blocking.load_adapter("first", adapter_folders[0])
    assert (found.name, found.path, found.base_model) == ("first", str(adapter_folders[0]), "base")
    assert (found.rank, found.num_modules) == (8, 14)
    assert (found.on_device, found.running, found.waiting) == (False, 0, 0)
    small = write_adapter(tmp_path, CONFIG, rank=3, modules=("q_proj",), base_model_name_or_path=None)
    other = engine.blocking.load_adapter("small", small)
    assert (other.rank, other.num_modules, other.base_model) == (3, 2, None)
    assert list(engine.adapters) == ["first", "small"]
    assert engine.adapters["first"] == found
    output(engine, "first")
    assert engine.adapters["first"].on_device


@pytest.mark.anyio
async def test_progress_counts_to_the_total(engine: penstock.Engine, adapter_folders: list[Path]) -> None:
    calls: list[tuple[int, int]] = []
    await engine.load_adapter("a", adapter_folders[0], progress=lambda *numbers: calls.append(numbers))
    done, totals = zip(*calls, strict=True)
    assert list(done) == sorted(done)
    assert len(set(totals)) == 1
    assert (done[0], done[-1]) == (0, totals[0])
    assert totals[0] == engine.adapters["a"].bytes


@pytest.mark.anyio
@pytest.mark.parametrize("last", [False, True])
async def test_exception_of_progress_ends_the_load(
    engine: penstock.Engine, adapter_folders: list[Path], *, last: bool
) -> None:
    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if not last or done == total:
            raise StopError

    with pytest.raises(StopError):
        await engine.load_adapter("a", adapter_folders[0], progress=stop)
    with pytest.raises(StopError):
        engine.blocking.load_adapter("a", adapter_folders[0], progress=stop)
    assert engine.adapters == {}
    assert (await engine.load_adapter("a", adapter_folders[0])).name == "a"


def test_interruption_in_progress_ends_the_load(engine: penstock.Engine, adapter_folders: list[Path]) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.blocking.load_adapter("a", adapter_folders[0], progress=interrupt)
    assert engine.adapters == {}


# ---- concurrent loads


@pytest.mark.anyio
async def test_loads_of_the_same_files_join(engine: penstock.Engine, adapter_folders: list[Path]) -> None:
    gate, found = Gate(), []

    async def load(progress: Any) -> None:
        found.append(await engine.load_adapter("a", adapter_folders[0], progress=progress))

    others: list[tuple[int, int]] = []
    async with anyio.create_task_group() as group:
        group.start_soon(load, gate)
        await gate.reach()
        for _ in range(5):
            group.start_soon(load, lambda *numbers: others.append(numbers))
        assert engine.adapters == {}
        gate.opened.set()
    assert others == []
    assert [adapter.name for adapter in found] == ["a"] * 6
    assert list(engine.adapters) == ["a"]


@pytest.mark.anyio
async def test_one_of_two_loads_with_other_files_is_a_conflict(
    engine: penstock.Engine, adapter_folders: list[Path]
) -> None:
    errors = []

    async def load(folder: Path) -> None:
        try:
            await engine.load_adapter("a", folder)
        except penstock.AdapterConflictError as error:
            errors.append(str(error))

    async with anyio.create_task_group() as group:
        for folder in adapter_folders[:2]:
            group.start_soon(load, folder)
    [loaded] = engine.adapters.values()
    assert errors == [
        f'adapter "a" is loaded from {loaded.path} with other contents; unload it, or load with replace=True'
    ]


@pytest.mark.anyio
async def test_requests_and_other_loads_continue_during_a_load(
    engine: penstock.Engine, adapter_folders: list[Path]
) -> None:
    gate = Gate()
    expected = bits_of(await engine.generate(PROMPT, PARAMS))
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: engine.load_adapter("slow", adapter_folders[0], progress=gate))
        await gate.reach()
        assert bits_of(await engine.generate(PROMPT, PARAMS)) == expected
        await engine.load_adapter("fast", adapter_folders[1])
        assert (await engine.generate(PROMPT, PARAMS, adapter="fast")).adapter == "fast"
        with pytest.raises(penstock.AdapterNotFoundError):
            await engine.generate(PROMPT, PARAMS, adapter="slow")
        with pytest.raises(penstock.AdapterNotFoundError):
            await engine.unload_adapter("slow")
        gate.opened.set()
    assert list(engine.adapters) == ["fast", "slow"]


@pytest.mark.anyio
async def test_cancelled_load_has_no_effect(engine: penstock.Engine, adapter_folders: list[Path]) -> None:
    gate = Gate()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: engine.load_adapter("a", adapter_folders[0], progress=gate))
        await gate.reach()
        group.cancel_scope.cancel()
    # The task has ended, its thread has not: another load of the name waits for it.
    async with anyio.create_task_group() as group:
        group.start_soon(engine.load_adapter, "a", adapter_folders[1])
        await anyio.lowlevel.checkpoint()
        assert engine.adapters == {}
        gate.opened.set()
    assert engine.adapters["a"].path == str(adapter_folders[1])


@pytest.mark.anyio
async def test_cancelled_wait_for_another_load_ends_at_once(
    engine: penstock.Engine, adapter_folders: list[Path]
) -> None:
    gate = Gate()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: engine.load_adapter("a", adapter_folders[0], progress=gate))
        await gate.reach()
        with anyio.move_on_after(0.05) as scope:
            await engine.load_adapter("a", adapter_folders[0])
        assert scope.cancelled_caught
        gate.opened.set()
    assert engine.adapters["a"].path == str(adapter_folders[0])


# ---- sleep, close and forks


@pytest.mark.anyio
async def test_adapters_are_loaded_again_after_a_sleep(
    tiny_model: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapter_folders[0], folder)
    async with make_engine(tiny_model, max_adapters=2) as engine:
        await engine.load_adapter("a", folder)
        await engine.load_adapter("b", adapter_folders[1])
        expected = [bits_of(await engine.generate(PROMPT, PARAMS, adapter=name)) for name in ("a", "b")]
        await engine.sleep()
        with pytest.raises(penstock.EngineStoppedError):
            await engine.load_adapter("c", adapter_folders[2])
        await engine.wake()
        assert list(engine.adapters) == ["a", "b"]
        found = [bits_of(await engine.generate(PROMPT, PARAMS, adapter=name)) for name in ("a", "b")]
        assert found == expected
        await engine.sleep()
        shutil.move(folder, tmp_path / "moved")
        with pytest.raises(penstock.AdapterLoadError, match='"a"'):
            await engine.wake()
        shutil.move(tmp_path / "moved", folder)
        await engine.wake()
        assert bits_of(await engine.generate(PROMPT, PARAMS, adapter="a")) == expected[0]


@pytest.mark.anyio
@pytest.mark.parametrize("is_blocking", [False, True])
async def test_lost_adapter_is_unloaded_from_a_sleeping_engine(
    tiny_model: Path, adapter_folders: list[Path], tmp_path: Path, *, is_blocking: bool
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapter_folders[0], folder)
    async with make_engine(tiny_model, max_adapters=2) as engine:
        await engine.load_adapter("a", folder)
        await engine.load_adapter("b", adapter_folders[1])
        expected = bits_of(await engine.generate(PROMPT, PARAMS, adapter="b"))
        await engine.sleep()
        shutil.rmtree(folder)
        with pytest.raises(penstock.AdapterLoadError, match='"a"'):
            await engine.wake()
        if is_blocking:
            engine.blocking.unload_adapter("a")
        else:
            await engine.unload_adapter("a")
        with pytest.raises(penstock.AdapterNotFoundError):
            await engine.unload_adapter("a")
        await engine.wake()
        assert list(engine.adapters) == ["b"]
        assert bits_of(await engine.generate(PROMPT, PARAMS, adapter="b")) == expected
    with pytest.raises(penstock.EngineStoppedError):
        await engine.unload_adapter("b")


@pytest.mark.anyio
async def test_close_during_a_load_ends_it(tiny_model: Path, adapter_folders: list[Path]) -> None:
    gate = Gate()
    engine = make_engine(tiny_model, max_adapters=1)
    await engine.start()
    async with anyio.create_task_group() as group:

        async def load() -> None:
            with pytest.raises(penstock.EngineStoppedError):
                await engine.load_adapter("a", adapter_folders[0], progress=gate)

        group.start_soon(load)
        await gate.reach()
        await engine.aclose()
        gate.opened.set()
    with pytest.raises(penstock.EngineStoppedError):
        await engine.load_adapter("a", adapter_folders[0])


def test_loads_in_threads_are_independent(tiny_model: Path, adapter_folders: list[Path]) -> None:
    names = [f"adapter {index}" for index in range(12)]
    with make_engine(tiny_model, max_adapters=2, max_cpu_adapters=12) as engine:

        def work(index: int) -> None:
            folder = adapter_folders[index % len(adapter_folders)]
            for _ in range(5):
                engine.blocking.load_adapter(names[index], folder)
                engine.blocking.generate(PROMPT, PARAMS, adapter=names[index])
                engine.blocking.unload_adapter(names[index])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.adapters == {}
        wait_until(lambda: engine.stats().running == 0)


@pytest.mark.needs("fork")
def test_calls_in_the_child_of_a_fork_raise(tiny_model: Path, adapter_folders: list[Path]) -> None:
    program = """
import os, sys, penstock
model, folder = sys.argv[1:]
engine = penstock.Engine(model, threads=1, max_adapters=2)
engine.blocking.start()
engine.blocking.load_adapter("a", folder)
run = lambda: engine.blocking.generate([1, 2, 3], max_tokens=4, temperature=0, adapter="a").token_ids
expected = run()
child = os.fork()
if child == 0:
    calls = [
        lambda: engine.blocking.load_adapter("b", folder),
        lambda: engine.blocking.unload_adapter("a"),
        lambda: engine.blocking.unload_adapter("a", force=True),
        lambda: engine.adapters,
        run,
    ]
    for call in calls:
        try:
            call()
        except penstock.EngineStoppedError as error:
            assert "fork" in str(error), error
        else:
            os._exit(1)
    other = penstock.Engine(model, threads=1, max_adapters=1)
    with other:
        other.blocking.load_adapter("b", folder)
        found = other.blocking.generate([1, 2, 3], max_tokens=4, temperature=0, adapter="b").token_ids
    os._exit(0 if found == expected else 2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert run() == expected
engine.blocking.unload_adapter("a")
engine.close()
"""
    command = [sys.executable, "-W", "ignore", "-c", program, str(tiny_model), str(adapter_folders[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
