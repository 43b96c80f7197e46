"""The package on systems that lack what Linux has."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from penstock import ConfigError, _system
from penstock.cli.runtime import runtime
from penstock.server import ServerSettings
from penstock.server.listener import Address, listening
from support.paths import TESTS

if TYPE_CHECKING:
    from pathlib import Path

#: Removes what Python has on Linux and not on Windows, and runs the program of the next argument. Libraries
#: are imported before, because they depend on the system, too.
WITHOUT = """
import os, select, signal, socket, sys
import aiohttp, anyio, asyncio, concurrent.futures.thread, logging, multiprocessing.util, random, subprocess
import anyio._backends._asyncio, starlette.applications, tempfile, tokenizers, uvicorn, uuid

pair, unix = socket.socketpair, socket.AF_UNIX
socket.socketpair = lambda: pair(unix)
for module in ("fcntl", "grp", "pwd", "resource", "termios", "uvloop"):
    sys.modules[module] = None
for owner, names in {
    os: "register_at_fork geteuid getuid O_DIRECTORY O_NOFOLLOW O_CLOEXEC O_NONBLOCK killpg umask".split(),
    socket: ["AF_UNIX", "TCP_USER_TIMEOUT"],
    signal: ["SIGALRM", "SIGKILL", "setitimer", "pthread_sigmask"],
}.items():
    for name in names:
        delattr(owner, name)
del select.poll
exec(sys.argv[1])
"""

IMPORTS = """
import importlib, pkgutil
import penstock, penstock.cli

for package in ("penstock", "penstock.compat", "penstock.server"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.startswith(("penstock.runtime", "penstock._template_child", "penstock.__main__")):
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                assert "is not provided" in str(error), error
print("imported")
"""

GENERATES = """
import sys, anyio, penstock
from penstock.server.listener import Address, listening

async def main():
    async with penstock.Engine(sys.argv[2]) as engine:
        async with engine.stream([5, 6], max_tokens=3, ignore_eos=True) as request:
            chunks = [chunk async for chunk in request]
        assert chunks[-1].finish_reason == "length"
    try:
        with listening(Address(uds="socket")):
            pass
    except penstock.ConfigError as error:
        assert error.field == "uds" and "Unix sockets" in str(error)
        print("generated")

anyio.run(main)
"""


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", WITHOUT, program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "python"), str(TESTS)])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.needs("signals", "unix_sockets")
def test_modules_need_nothing_that_windows_lacks() -> None:
    assert run(IMPORTS) == "imported\n"


@pytest.mark.needs("signals", "unix_sockets")
def test_engine_generates_without_what_windows_lacks(tiny_model: Path) -> None:
    assert run(GENERATES, tiny_model) == "generated\n"


@pytest.mark.parametrize("has_poll", [True, False])
def test_readable_sockets_are_found(has_poll: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    if not has_poll:
        monkeypatch.delattr(select, "poll")
        monkeypatch.setattr(_system, "_SELECT_SIZE", 2)
    pairs = [socket.socketpair() for _ in range(5)]
    try:
        pairs[1][1].send(b"x")
        pairs[3][1].close()
        mine = [pair[0].fileno() for pair in pairs]
        assert _system.readable(mine) == {mine[1], mine[3]}
        assert _system.readable([]) == set()
    finally:
        for pair in pairs:
            for one in pair:
                one.close()


@pytest.mark.needs("resource")
def test_infinite_limit_of_descriptors_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = []

    def set_limit(_: int, limit: tuple[int, int]) -> None:
        if limit[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")  # as macOS does
        limits.append(limit)

    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, infinite))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    _system.raise_descriptor_limit()
    assert limits.pop() == (10_240, infinite)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20_000, infinite))
    _system.raise_descriptor_limit()
    assert limits.pop() == (20_000, infinite), "it is never lowered"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (infinite, infinite))
    _system.raise_descriptor_limit()
    assert not limits


@pytest.mark.parametrize(
    ("system", "option"), [("darwin", (6, 0x80, 3)), ("win32", (6, 5, 3)), ("aix", None)]
)
def test_send_timeout_is_that_of_the_system(
    system: str, option: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")
    monkeypatch.setattr(sys, "platform", system)
    options: list[Any] = []
    connection: Any = SimpleNamespace(setsockopt=lambda *given: options.append(given))
    _system.set_send_timeout(connection, 3.2)
    assert options == ([] if option is None else [option])


def test_file_is_locked_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("ab") as first:
        _system.lock_file(first.fileno())
        with path.open("ab") as second:
            with pytest.raises(BlockingIOError):
                _system.lock_file(second.fileno())
            waiting = threading.Thread(
                target=_system.lock_file, args=[second.fileno()], kwargs={"wait": True}
            )
            waiting.start()
            first.close()
            waiting.join(10)
            assert not waiting.is_alive()


@pytest.mark.needs("unix_sockets")
def test_unix_socket_is_refused_where_python_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.listener.AF_UNIX", None)
    with pytest.raises(ConfigError, match="Unix sockets") as caught, listening(Address(uds="a")):
        pass
    assert caught.value.field == "uds"


@pytest.mark.needs("memory_limit")
def test_options_that_need_linux_are_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.settings.sys", SimpleNamespace(platform="darwin"))
    with pytest.raises(ConfigError, match="no limit on the memory of a process") as caught:
        ServerSettings(request_templates=True)
    assert caught.value.field == "request_templates"
    monkeypatch.setattr("penstock.cli.runtime.sys", SimpleNamespace(platform="darwin"))
    done = CliRunner().invoke(runtime, [])
    assert (done.exit_code, done.output) == (1, "Error: the runtime needs Linux; this system is darwin\n")
