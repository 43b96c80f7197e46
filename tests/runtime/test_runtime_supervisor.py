"""Engines that the runtime starts: restarts, adoption after a crash, and their ends."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from penstock import ConfigError
from penstock.runtime import RuntimeSettings
from penstock.runtime.engines.process import start_time_of
from penstock.runtime.engines.registry import Record
from penstock.runtime.engines.supervisor import Supervisor
from penstock.runtime.errors import ApiError
from penstock.server.families import Families
from support.paths import TESTS
from support.runtime.engines import facts_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

SCRIPT = TESTS / "support" / "runtime" / "engine_script.py"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize(
        "anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})]
    ),
]


class Clock:
    """A time that only the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def settings_of(folder: Path, command: str | None = None) -> RuntimeSettings:
    return RuntimeSettings(
        engine_command=command or f"{sys.executable} {SCRIPT} {folder}",
        registry_path=str(folder / "run" / "engines.json"),
    )


def record(name: str = "m") -> Record:
    return Record(name, "org/repo", 0, f"kvc_{name}", [])


@asynccontextmanager
async def supervising(folder: Path, **options: Any) -> AsyncIterator[tuple[Supervisor, Clock]]:
    """A supervisor that looks at its engines when the test says so."""
    clock = Clock()
    supervisor = Supervisor(settings_of(folder, **options), clock)
    try:
        yield supervisor, clock
    finally:
        await supervisor.close()


async def until_ready(supervisor: Supervisor, name: str = "m") -> None:
    with anyio.fail_after(20):
        while not supervisor.engines[name].is_ready:
            await supervisor.tick()


async def kill(pid: int) -> None:
    """Kill a process, and wait until the system knows it."""
    os.kill(pid, signal.SIGKILL)
    with anyio.fail_after(20):
        while start_time_of(pid) is not None:
            await anyio.lowlevel.checkpoint()


def counts_of(supervisor: Supervisor, name: str) -> list[tuple[dict[str, str], float]]:
    """The labels and values of a metric."""
    families = Families()
    supervisor.write(families)
    samples = families.by_name[f"aibrix:modelclaim_{name}"].samples
    return [(sample.labels, sample.value) for sample in samples]


async def test_engine_killed_six_times_fails_at_last(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, clock):
        engine = supervisor.activate(record(), [], "org/repo")
        delays = []
        for number in range(1, 6):
            await kill(engine.record.pid)
            await supervisor.tick()
            assert (engine.phase, engine.is_ready, engine.num_restarts) == ("restarting", False, number)
            delays.append(engine.next_start - clock.now)
            clock.now = engine.next_start - 0.001
            await supervisor.tick()
            assert engine.phase == "restarting"
            clock.now = engine.next_start
            await supervisor.tick()
            assert (engine.phase, engine.is_alive()) == ("active", True)
        assert delays == [2, 4, 8, 16, 32]
        await kill(engine.record.pid)
        await supervisor.tick()
        assert (engine.phase, engine.is_alive()) == ("failed", False)
        clock.now += 1000
        await supervisor.tick()
        assert engine.phase == "failed"
        reason = "the process has ended with status -9: the log of the runtime has its output"
        assert engine.last_error == reason
        # A request starts it again, with new restarts.
        assert supervisor.activate(record(), [], "org/repo") is engine
        assert (engine.phase, engine.num_restarts, engine.is_alive()) == ("active", 0, True)
        assert counts_of(supervisor, "engine_restart_attempts") == [({"model": "m"}, 5)]
        assert counts_of(supervisor, "engine_restart_budget_exhausted") == [({"model": "m"}, 1)]


async def test_restarts_are_forgotten_when_an_engine_is_stable(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, clock):
        engine = supervisor.activate(record(), [], "org/repo")
        await kill(engine.record.pid)
        await supervisor.tick()
        clock.now = engine.next_start
        await supervisor.tick()
        await until_ready(supervisor)
        clock.now += 599
        await supervisor.tick()
        assert engine.num_restarts == 1
        clock.now += 1
        await supervisor.tick()
        assert engine.num_restarts == 0


async def test_command_that_cannot_be_run_fails_at_last(tmp_path: Path) -> None:
    async with supervising(tmp_path, command="/no/such/command") as (supervisor, clock):
        engine = supervisor.activate(record(), [], "org/repo")
        for _ in range(5):
            assert engine.phase == "restarting"
            clock.now += 60
            await supervisor.tick()
        assert (engine.phase, engine.last_error) == (
            "failed",
            "the command cannot be run: No such file or directory",
        )


async def test_supervisor_goes_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_ticks = 0

    async def tick(_self: Supervisor) -> None:
        nonlocal num_ticks
        num_ticks += 1
        raise RuntimeError("no luck")

    monkeypatch.setattr(Supervisor, "tick", tick)
    with anyio.move_on_after(20) as scope:

        async def sleep(_seconds: float) -> None:
            if num_ticks == 3:
                scope.cancel()
            await anyio.lowlevel.checkpoint()

        await Supervisor(settings_of(tmp_path), Clock(), sleep).run()
    assert num_ticks == 3
    assert [entry.message for entry in caplog.records] == ["the engines cannot be watched"]


async def test_registry_that_cannot_be_used_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervising(tmp_path) as (supervisor, _):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "engines.json").write_text("[]")
        folder.chmod(0o777)
        for _ in range(3):
            supervisor.adopt()
        [entry] = caplog.records
        assert entry.message.startswith("the registry cannot be used: ")


async def test_registry_in_an_unreadable_folder_is_none(tmp_path: Path) -> None:
    supervisor = Supervisor(settings_of(tmp_path / ("n" * 300)), Clock())  # as for a folder of another user
    supervisor.adopt()
    with pytest.raises(ApiError) as caught:
        supervisor.activate(record(), [], "org/repo")
    assert caught.value.status == 503


async def test_engines_are_adopted_when_the_key_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as (first, _):
        pid = first.activate(record(), [], "org/repo").record.pid
        first._registry.unlock()
        (tmp_path / "run" / "engines.key").unlink()

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        async with supervising(tmp_path) as (second, _):
            with monkeypatch.context() as patch:
                patch.setattr("penstock.runtime.engines.supervisor.write_private", fail)
                second.adopt()
                assert second.engines == {}
            second.adopt()
            assert second.engines["m"].record.pid == pid


async def test_engines_of_two_runtimes_take_different_ports(tmp_path: Path) -> None:
    """Their engines do not listen yet, so all ports look free to both."""
    ports = set()
    for name in ("a", "b", "c"):
        async with supervising(tmp_path / name, command="/no/such/command") as (supervisor, _):
            ports.add(supervisor.activate(record(), [], "org/repo").record.port)
    assert len(ports) > 1


async def test_next_runtime_adopts_a_running_engine(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (first, _):
        pid = first.activate(record(), [], "org/repo").record.pid
        second = Supervisor(settings_of(tmp_path), Clock())
        second.adopt()
        assert second.engines == {}
        with pytest.raises(ApiError) as caught:
            second.activate(record("other"), [], "org/repo")
        assert caught.value.status == 503
        first._registry.unlock()  # as after its end
        second.adopt()
        await until_ready(second)
        engine = second.engines["m"]
        assert (engine.record.pid, engine.phase, engine.num_restarts) == (pid, "active", 0)
        assert counts_of(second, "engine_re_adoptions") == [({"result": "success"}, 1)]
        await second.close()
        assert start_time_of(pid) is None


async def test_next_runtime_starts_an_ended_engine_again(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (first, _):
        pid = first.activate(record(), [], "org/repo").record.pid
        await kill(pid)
        first._registry.unlock()
        second = Supervisor(settings_of(tmp_path), Clock())
        second.adopt()
        assert second.engines["m"].phase == "restarting"
        assert counts_of(second, "engine_re_adoptions") == [({"result": "restart_scheduled"}, 1)]
        await second.tick()
        assert second.engines["m"].is_alive()
        assert second.engines["m"].record.pid != pid
        await second.close()


async def test_next_runtime_ends_the_workers_of_an_ended_engine(tmp_path: Path) -> None:
    (tmp_path / "child").touch()
    async with supervising(tmp_path) as (first, _):
        pid = first.activate(record(), [], "org/repo").record.pid
        with anyio.fail_after(20):
            while not (facts := facts_of(tmp_path)):
                await anyio.lowlevel.checkpoint()
        child = facts[0]["child"]
        await kill(pid)
        first._registry.unlock()
        assert start_time_of(child) is not None
        async with supervising(tmp_path) as (second, _):
            second.adopt()
            with anyio.fail_after(20):
                while start_time_of(child) is not None:
                    await anyio.lowlevel.checkpoint()


async def test_another_process_with_the_same_pid_is_not_adopted(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (first, _):
        engine = first.activate(record(), [], "org/repo")
        pid, started = engine.record.pid, engine.record.start_time
        engine.record.start_time += 1
        first.save()
        first._registry.unlock()
        second = Supervisor(settings_of(tmp_path), Clock())
        second.adopt()
        assert second.engines["m"].process is None
        assert start_time_of(pid) == started
        second.engines.clear()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'[{"pid": "x"}]', b"\xff"])
async def test_damaged_registry_is_ignored(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run" / "engines.json"
    path.parent.mkdir()
    path.write_bytes(content)
    async with supervising(tmp_path) as (supervisor, _):
        supervisor.adopt()
        assert supervisor.engines == {}


async def test_registry_that_others_can_write_is_ignored(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (first, _):
        first.activate(record(), [], "org/repo")
        path = tmp_path / "run" / "engines.json"
        assert path.stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "run" / "engines.key").stat().st_mode & 0o777 == 0o600
        path.chmod(0o666)
        first._registry.unlock()
        second = Supervisor(settings_of(tmp_path), Clock())
        second.adopt()
        assert second.engines == {}


async def test_key_is_not_written_to_a_file_of_others(tmp_path: Path) -> None:
    file = tmp_path / "run" / "engines.key"
    file.parent.mkdir()
    file.touch()
    file.chmod(0o666)
    with file.open() as opened:
        async with supervising(tmp_path) as (supervisor, _):
            supervisor.activate(record(), [], "org/repo")
        assert opened.read() == ""
    assert len(file.read_text().strip()) == 64
    assert file.stat().st_mode & 0o777 == 0o600


async def test_folder_of_all_users_has_no_registry(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    async with supervising(tmp_path) as (supervisor, _):
        with pytest.raises(ApiError, match="registry") as caught:
            supervisor.activate(record(), [], "org/repo")
        assert caught.value.status == 503
    assert list((tmp_path / "run").iterdir()) == []


async def test_foreign_engines_listen_on_this_machine_only() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "name"):  # noqa: S104 - refused
        with pytest.raises(ConfigError, match="engines_host"):
            RuntimeSettings(engine_command="vllm serve", engines_host=host)
        RuntimeSettings(engines_host=host)
        RuntimeSettings(engine_command="vllm serve", engines_host=host, open_engines=True)
    for host in ("127.0.0.1", "::1", "localhost"):
        RuntimeSettings(engine_command="vllm serve", engines_host=host)


async def test_close_ends_all_engines(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, _):
        pids = [supervisor.activate(record(name), [], "org/repo").record.pid for name in ("a", "b")]
        assert all(start_time_of(pid) for pid in pids)
    assert [start_time_of(pid) for pid in pids] == [None, None]
    assert (tmp_path / "run" / "engines.json").read_bytes() == b"[]"


async def deaf_engine(folder: Path, sleep: Callable[[float], Awaitable[None]]) -> tuple[Supervisor, int]:
    """A supervisor, and the process of its engine, which ignores SIGTERM."""
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    script = folder / "deaf.py"
    script.write_text(code + f"open({str(folder / 'ready')!r}, 'w').close(); signal.pause()")
    supervisor = Supervisor(settings_of(folder, f"{sys.executable} {script}"), Clock(), sleep)
    pid = supervisor.activate(record(), [], "org/repo").record.pid
    with anyio.fail_after(20):
        while not (folder / "ready").exists():
            await anyio.lowlevel.checkpoint()
    return supervisor, pid


async def test_engine_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    supervisor, pid = await deaf_engine(tmp_path, sleep)
    await supervisor.close()
    assert sum(waits) == pytest.approx(10)
    with anyio.fail_after(20):
        while start_time_of(pid) is not None:
            await anyio.lowlevel.checkpoint()


async def test_close_ends_an_engine_of_an_interrupted_stop(tmp_path: Path) -> None:
    num_waits = 0

    async def sleep(_seconds: float) -> None:
        nonlocal num_waits
        num_waits += 1
        await (anyio.sleep_forever() if num_waits == 1 else anyio.lowlevel.checkpoint())

    supervisor, pid = await deaf_engine(tmp_path, sleep)
    async with anyio.create_task_group() as group:
        group.start_soon(supervisor.deactivate, "m")
        await anyio.wait_all_tasks_blocked()
        assert supervisor.engines["m"].phase == "stopping"
        assert [found.pid for found in supervisor._registry.load()] == [pid]
        group.cancel_scope.cancel()
    await supervisor.tick()  # it is not watched any more
    await supervisor.close()
    assert start_time_of(pid) is None
    assert (supervisor.engines, supervisor._registry.load()) == ({}, [])
