"""Request handles, for event loops and for threads: iterate over chunks, await the result, cancel."""

from __future__ import annotations

import threading
import time
import warnings
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio.lowlevel

from penstock import _attributes
from penstock._session import check_seconds
from penstock.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from types import TracebackType
    from typing import NoReturn

    from penstock import _core
    from penstock._core import Chunk, Port, Result, SamplingParams, Timings, Usage
    from penstock._pump import Pump
    from penstock._session import Session

__all__ = ["BlockingRequest", "BlockingStream", "Request", "Stream"]


def result_of(request: _core.Request) -> Result:
    """The result of a request that has ended; raises the error of a failed one."""
    result = request.result()
    if result is None:
        message = "a finished request has no result; this is a bug in penstock"
        raise AssertionError(message)
    return result


class _Request:
    """The common part of both kinds of request. Refers to the session, which keeps the engine alive."""

    def __init__(self, session: Session, native: _core.Request) -> None:
        self._session = session
        self._native = native
        self._is_cancelled = False
        self._is_reading = False  # a task waits for a chunk

    @property
    def id(self) -> int:
        """The request's number, unique within its engine."""
        return self._native.id

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters in effect: all defaults filled in, including the seed."""
        return self._native.params

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Tokens of the prompt, special tokens included."""
        return self._native.prompt_token_ids

    @property
    def usage(self) -> Usage:
        """Token counts so far; the tokens from the prefix cache are known with the first token."""
        return self._native.usage

    @property
    def timings(self) -> Timings:
        """Durations so far, as the caller sees them; those of the result once the request has finished.

        Before that, `queued` is an upper bound: the time until the first token, or until now.
        """
        return self._native.timings

    @property
    def finish_reason(self) -> str | None:
        """That of `Choice`, or `error`; `None` until the end.

        With several choices it is set once all have finished: `error` if one of them failed, else the reason
        of the first choice.
        """
        return self._native.finish_reason

    def poll(self) -> Chunk | None:
        """The next chunk if output has arrived, else `None`. Never waits.

        The last chunk of each choice has a `finish_reason`. After the end, `poll` returns the chunks that are
        left and then `None`. So `None` means either that nothing has arrived yet or that everything was read:
        the `finish_reason` of the last chunk tells which. Output is received by polling: a request that is
        neither polled nor awaited pauses, unless it has `unread="keep"`. Raises as iterating does.
        """
        if self._is_reading:
            self._refuse_reader()
        chunk = self._native.poll()
        if chunk is None:
            self._native.check()
        return chunk

    def cancel(self) -> None:
        """Cancel the request; its memory is freed after the current step. Never waits, never raises.

        Output generated so far can still be read. Cancelling again, or after the end, does nothing.
        """
        self._is_cancelled = True
        self._native.cancel()

    def __repr__(self) -> str:
        state = "forked" if self._native.is_forked else self.finish_reason or "open"
        return f"<{type(self).__name__} {self.id} {state}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise _attributes.missing(self, name, _attributes.REQUEST_HINTS)

    def __del__(self) -> None:
        """Cancel the request if it is unfinished: its output can no longer be read."""
        native = getattr(self, "_native", None)
        if native is None or self._is_cancelled or native.is_forked or native.has_ended():
            return
        native.cancel()
        warnings.warn(
            f"request {native.id} was dropped before it finished and has been cancelled; read it to the end, "
            "cancel it, or use engine.stream()",
            ResourceWarning,
            stacklevel=1,
            source=self,
        )

    def _refuse_reader(self) -> NoReturn:
        message = f"request {self.id} is already being read; only one reader at a time is allowed"
        raise RuntimeError(message)

    def _result(self) -> Result:
        return result_of(self._native)


class Request(_Request):
    """A request on an event loop: an async iterator of chunks.

    Chunks of several choices are interleaved; `Chunk.index` names the choice. If one choice fails, the others
    continue, and the error is raised when all have finished.

    Cancelling a task that waits for a chunk does not cancel the request, so a timeout can be put around a
    single chunk without losing output. Dropping an unfinished request cancels it with a `ResourceWarning`;
    `engine.stream()` cancels without a warning.
    """

    def __init__(self, session: Session, native: _core.Request, pump: Pump) -> None:
        super().__init__(session, native)
        self._id = native.id
        self._pump = pump

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk: all output of one choice since the previous chunk of that choice.

        Raises `GenerationError` if the request failed, `EngineStoppedError` if the engine crashed,
        `RuntimeError` if another task is already waiting for a chunk.
        """
        # Runs once per token and stream: no context manager, few calls.
        native = self._native
        if self._is_reading:
            self._refuse_reader()
        self._is_reading = True
        try:
            if native.is_readable():
                await anyio.lowlevel.checkpoint()
                chunk = native.next()
                if chunk is not None:
                    return chunk
            return await self._pump.wait(self._id, native.next)
        finally:
            self._is_reading = False

    async def result(self) -> Result:
        """Wait until the request has finished and return its complete output.

        Includes output that was already read as chunks. Can be called repeatedly, also while another task
        iterates. Raises as iterating does.
        """
        await self._wait(self._native.has_ended)
        return self._result()

    async def admission(self) -> None:
        """Wait until the engine has accepted the request; raise the error if it was rejected."""
        await self._wait(self._native.is_admitted)
        self._native.check_admission()

    async def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait; always an AnyIO checkpoint, so that a slow reader does not block the event loop."""
        if is_ready():
            await anyio.lowlevel.checkpoint()
        else:
            await self._pump.wait(self._id, is_ready)


class BlockingRequest(_Request):
    """A request without an event loop: an iterator of chunks. Ctrl-C interrupts every wait.

    The same as `Request`, without `await`. Any number of threads can wait for its result, or read its chunks:
    each chunk goes to one of them.
    """

    def __init__(self, session: Session, native: _core.Request, port: Port) -> None:
        super().__init__(session, native)
        self._port = port
        # `with` on the lock itself: Ctrl-C inside `Condition.__enter__` would leave the lock held.
        self._lock = threading.Lock()
        self._waiters = threading.Condition(self._lock)
        self._has_leader = False  # one of the waiters waits for the port, and wakes the others

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk: all output of one choice since the previous chunk of that choice.

        Raises as `Request` does.
        """
        chunk = self.read()
        if chunk is None:
            raise StopIteration
        return chunk

    def read(self, timeout: float | None = None) -> Chunk | None:
        """Wait for the next chunk, for at most `timeout` seconds; `None` after the last one.

        Raises `TimeoutError` if no output came; the request continues. Otherwise raises as iterating does.
        """
        native = self._native
        chunk: Chunk | None = None

        def take() -> bool:
            nonlocal chunk
            while native.has_chunk():
                chunk = native.take()
                if chunk is not None:
                    return True
                # Another thread has taken the chunk, or the request has ended.
                if native.finish_reason is not None:
                    chunk = native.take()  # output that has arrived meanwhile
                    return True
            return False

        self._wait(take, timeout, "has no new output")
        if chunk is None:
            native.check()
        return chunk

    def result(self, timeout: float | None = None) -> Result:
        """Wait until the request has finished, for at most `timeout` seconds, and return its complete output.

        Raises `TimeoutError` if it has not finished; it continues. Otherwise the same as `Request.result`.
        """
        self._wait(self._native.has_ended, timeout, "has not finished")
        return self._result()

    def admission(self) -> None:
        """Wait until the engine has accepted the request; raise the error if it was rejected."""
        self._wait(self._native.is_admitted)
        self._native.check_admission()

    def _wait(self, is_ready: Callable[[], bool], timeout: float | None = None, state: str = "") -> None:
        if timeout is not None:
            check_seconds("timeout", timeout, InvalidRequestError)
        deadline = None if timeout is None else time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
        with self._lock:
            while not is_ready():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and not left > 0:
                    message = f"request {self.id} {state} after {timeout} seconds; it continues"
                    raise TimeoutError(message)
                if self._has_leader:
                    self._waiters.wait(left)
                else:
                    self._lead(left)

    def _lead(self, timeout: float | None) -> None:
        """Wait for the port, without the lock."""
        try:
            self._has_leader = True
            self._waiters.release()
            self._port.wait(timeout)
        finally:
            self._has_leader = False
            self._waiters.acquire()
            self._waiters.notify_all()


SomeRequest = TypeVar("SomeRequest", bound=_Request)


class _Stream(Generic[SomeRequest]):
    """A context manager that cancels its request on exit; a finished request is not affected."""

    _request: SomeRequest | None = None

    def _leave(self) -> None:
        if self._request is not None:
            self._request.cancel()


class Stream(_Stream[Request]):
    """The return value of `Engine.stream`, an async context manager.

        async with engine.stream(messages, max_tokens=256) as request:
            async for chunk in request:
                print(chunk.text, end="", flush=True)

    Entering it starts the request, raises the errors of `Engine.start_request`, and returns the `Request`.
    Leaving it cancels the request if it has not finished.
    """

    def __init__(self, start: Callable[[], Awaitable[Request]]) -> None:
        self._start = start

    async def __aenter__(self) -> Request:
        self._request = await self._start()
        return self._request

    def __await__(self) -> NoReturn:
        raise TypeError(_ENTER)

    def __aiter__(self) -> NoReturn:
        raise TypeError(_ENTER)

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            raise TypeError(_NOT_BLOCKING)

        def __enter__(self) -> NoReturn:
            raise TypeError(_NOT_BLOCKING)

        def __exit__(self, *_: object) -> None: ...  # required by `with`

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()


class BlockingStream(_Stream[BlockingRequest]):
    """The return value of `Blocking.stream`, a context manager. The same as `Stream`, without `await`."""

    def __init__(self, start: Callable[[], BlockingRequest]) -> None:
        self._start = start

    def __enter__(self) -> BlockingRequest:
        self._request = self._start()
        return self._request

    def __iter__(self) -> NoReturn:
        raise TypeError(_ENTER_BLOCKING)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()


_ENTER = "not entered; use `async with engine.stream(...) as request: async for chunk in request`"
_NOT_BLOCKING = "not blocking; use `async with engine.stream(...)`, or `with engine.blocking.stream(...)`"
_ENTER_BLOCKING = "not entered; use `with engine.blocking.stream(...) as request: for chunk in request`"
