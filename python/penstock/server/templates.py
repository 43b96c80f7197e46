"""Chat templates of requests, which a child process renders, with limits on its time and memory.

The budget of the sandbox (`_chat_costs.py`) is an estimate, and a template can be written for an operation
that it misses. Here a process that exceeds a limit is killed, which no operation can delay, and the next
template gets another process. A server has one of them at a time, `_template_child.py`, which is started for
the first template and kept, so that a rendering costs two messages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.from_thread

import penstock
from penstock._client import MAX_WAITING_OF_CLIENT, TurnQueue, client
from penstock._renderer import CompileError, RenderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Wait = Callable[[], object]

__all__ = ["TemplateProcess"]

#: Seconds for all renderings of one request.
MAX_SECONDS = 5.0
#: Bytes of the address space of the process.
MAX_MEMORY = 512 << 20
#: Seconds for the start of the process.
MAX_START_SECONDS = 30.0
#: Bytes of an answer, which has at most six bytes for each character of a text.
_MAX_ANSWER = 64 << 20
#: Seconds between two checks of the caller.
_INTERVAL = 0.05
_CHUNK = 1 << 18
#: Variables of the environment that the process gets: those that change the time zone, and find libraries.
_ENVIRONMENT = ("TZ", "TZDIR", "LD_LIBRARY_PATH")
_CHILD = Path(__file__).parents[1] / "_template_child.py"


class Turns:
    """One thread at a time, of each client in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the other fields
        self._is_taken = False
        self._waiting = TurnQueue[threading.Event]()

    @contextmanager
    def turn(self, wait: Wait) -> Iterator[None]:
        """Wait for a turn and have it. `wait` is called meanwhile and can raise."""
        mine, has_turn = client.get(), threading.Event()
        with self._lock:
            if self._waiting.num_of(mine) >= MAX_WAITING_OF_CLIENT:
                raise penstock.OverloadedError("too many requests wait for chat templates; try again later")
            self._waiting.push(mine, has_turn)
            self._begin_next()
        try:
            while not has_turn.wait(_INTERVAL):
                wait()
            yield
        finally:
            with self._lock:
                if has_turn.is_set():
                    self._is_taken = False
                    self._begin_next()
                else:
                    self._waiting.remove(mine, has_turn)

    def _begin_next(self) -> None:
        if self._is_taken or not self._waiting:
            return
        self._waiting.pop().set()
        self._is_taken = True


class Child:
    """A process that renders templates."""

    def __init__(self) -> None:
        channel, theirs = socket.socketpair()
        channel.settimeout(0)
        # Isolated, without site packages: only the folders given here are searched for libraries.
        command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_CHILD)]
        command += [str(MAX_MEMORY), str(MAX_SECONDS + 1), *_library_folders()]
        try:
            with theirs:
                self.process = subprocess.Popen(  # noqa: S603 - no argument is a client's
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                    start_new_session=True,  # signals of a terminal are for the server
                )
        except BaseException:
            channel.close()
            raise
        self._channel = channel
        self._poll = select.poll()
        #: Kills it; called also when the server ends.
        self.end = weakref.finalize(self, _end, self.process, channel)

    def send(self, message: bytes, deadline: float, wait: Wait) -> None:
        """Send a message."""
        rest = memoryview(len(message).to_bytes(8) + message)
        while rest:
            self._wait_until(select.POLLOUT, deadline, wait)
            rest = rest[self._channel.send(rest[:_CHUNK]) :]

    def receive(self, deadline: float, wait: Wait) -> tuple[str, str]:
        """The next answer."""
        size = int.from_bytes(self._read(8, deadline, wait))
        if size > _MAX_ANSWER:
            raise EOFError
        kind, text = json.loads(self._read(size, deadline, wait))
        if not isinstance(text, str):
            raise TypeError
        return kind, text

    def _read(self, size: int, deadline: float, wait: Wait) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait_until(select.POLLIN, deadline, wait)
            part = self._channel.recv(min(size - len(data), _CHUNK))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _wait_until(self, event: int, deadline: float, wait: Wait) -> None:
        self._poll.register(self._channel, event)
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError
            if self._poll.poll(1000 * _INTERVAL):
                return
            wait()


class TemplateProcess:
    """Renders the templates of requests in a child process, one at a time, of each client in turn."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._child: Child | None = None

    def template(self, source: str) -> RequestTemplate:
        """The template of a request."""
        return RequestTemplate(self, source)

    @contextmanager
    def running(self, wait: Wait) -> Iterator[Child]:
        """Wait for the process and use it. An exception in the block ends it."""
        with self._turns.turn(wait):
            child = self._child
            if child is None or child.process.poll() is not None:
                child = self._child = _started(wait)
            try:
                yield child
            except BaseException:
                self._child = None
                child.end()
                raise


class RequestTemplate:
    """The template of a request, and the time that is left for it."""

    def __init__(self, process: TemplateProcess, source: str) -> None:
        self._process = process
        self._source = source
        self._seconds = MAX_SECONDS
        self._failure: CompileError | RenderError | None = None  # of every further rendering

    def render(self, values: dict[str, Any], check_cancelled: Callable[[], None] | None) -> str:
        """The text for the values of the variables."""
        if self._failure is not None:
            raise self._failure
        text = json.dumps([self._source, values], ensure_ascii=False)
        message = text.encode(errors="surrogatepass")
        check = check_cancelled or anyio.from_thread.check_cancelled
        # A thread that waits for long leaves its slot to others; see `SlowCall`.
        wait = getattr(check, "begin_wait", check)
        try:
            with self._process.running(wait) as child:
                begin = time.monotonic()
                child.send(message, begin + self._seconds, wait)
                kind, text = child.receive(begin + self._seconds, wait)
                self._seconds -= time.monotonic() - begin
                if kind == "memory":
                    raise MemoryError  # noqa: TRY301 - which ends the process
        except TimeoutError:
            self._failure = RenderError(f"it runs for more than {MAX_SECONDS} seconds")
        except MemoryError:
            self._failure = RenderError(f"it needs more than {MAX_MEMORY >> 20} MiB of memory")
        except (OSError, EOFError, ValueError, TypeError):
            self._failure = RenderError("it ends the process that renders it")
        else:
            if kind == "text":
                return text
            if kind == "render":
                raise RenderError(text)
            self._failure = CompileError(text)
        raise self._failure


def _started(wait: Wait) -> Child:
    """A process that is ready for messages."""
    child = None
    try:
        child = Child()
        child.receive(time.monotonic() + MAX_START_SECONDS, wait)
    except BaseException as error:
        if child is not None:
            child.end()
        if isinstance(error, (OSError, EOFError, ValueError, TypeError)):
            message = "the process for chat templates of requests cannot start"
            raise penstock.PenstockError(message) from error
        raise
    return child


def _library_folders() -> list[str]:
    """The folders in which the libraries of the sandbox are."""
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    found = [Path(spec.origin).parent.parent for spec in specs if spec is not None and spec.origin]
    return list(dict.fromkeys(str(folder.absolute()) for folder in found))


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    with suppress(OSError):
        process.kill()
    process.wait()
