"""One request, as the user holds it: to iterate, to collect, to cancel."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from types import TracebackType
    from typing import NoReturn

    from penstock import _core
    from penstock._core import Chunk, Port, Result, SamplingParams
    from penstock._pump import Pump
    from penstock._session import Session

__all__ = ["BlockingRequest", "BlockingStream", "Request", "Stream"]


class _Request:
    """What both kinds of request share. Holds the session: the engine stays open while somebody reads."""

    def __init__(self, session: Session, native: _core.Request) -> None:
        self._session = session
        self._native = native
        self._is_cancelled = False
        self._is_read = False

    @property
    def id(self) -> int:
        """The engine's number for it, unique in that engine."""
        return self._native.id

    @property
    def params(self) -> SamplingParams:
        """What the tokens are really chosen by: every default filled in, the seed included."""
        return self._native.params

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length`, `cancelled`, `interrupted` or `error` once the end has arrived, else `None`.

        Of several choices it is that of the first, when all have ended; `error` where one of them failed.
        """
        return self._native.finish_reason

    def cancel(self) -> None:
        """Ends the request; its memory is free after the step that runs now. Never waits, never raises.

        What was generated until then can still be read. Cancelling again, or after the end, does nothing.
        """
        self._is_cancelled = True
        self._native.cancel()

    def __repr__(self) -> str:
        state = self.finish_reason or "open"
        return f"<{type(self).__name__} {self.id} {state}>"

    def __del__(self) -> None:
        """Cancels what nobody can read any more."""
        native = getattr(self, "_native", None)
        if native is None or self._is_cancelled or native.has_ended():
            return
        native.cancel()
        warnings.warn(
            f"request {native.id} was dropped unfinished and is cancelled; read it to its end, cancel it, "
            "or use engine.stream()",
            ResourceWarning,
            stacklevel=1,
            source=self,
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if self._is_read:
            message = f"request {self.id} is being read by somebody else; one reader at a time"
            raise RuntimeError(message)
        self._is_read = True
        try:
            yield
        finally:
            self._is_read = False

    def _result(self) -> Result:
        result = self._native.result()
        if result is None:
            message = "an ended request has no result; this is a bug in penstock"
            raise AssertionError(message)
        return result


class Request(_Request):
    """A request on an event loop: an async iterator of chunks.

    The chunks of several choices come in turns, each with its `index`. What goes wrong with one choice ends
    that one; the others go on, and it is raised when all have ended.

    Cancelling the task that waits for a chunk does not cancel the request, so a timeout may be put around a
    single chunk; nothing is lost. Dropping the request does cancel it, with a `ResourceWarning`;
    `engine.stream()` cancels without one.
    """

    def __init__(self, session: Session, native: _core.Request, pump: Pump) -> None:
        super().__init__(session, native)
        self._pump = pump

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk: everything that arrived of a choice since its last one.

        Raises `GenerationError` where it failed, `EngineStoppedError` where the engine died, `RuntimeError`
        where another task is already waiting for a chunk.
        """
        with self._reading():
            await self._wait(self._native.has_chunk)
            chunk = self._native.take()
        if chunk is None:
            self._native.check()
            raise StopAsyncIteration
        return chunk

    async def result(self) -> Result:
        """Waits for the end and returns the whole output, whether or not parts of it were read as chunks.

        May be called at any time and again, also while another task iterates. Raises as iterating does.
        """
        await self._wait(self._native.has_ended)
        return self._result()

    async def admission(self) -> None:
        """Waits until the engine has taken the request; raises what kept it from that."""
        await self._wait(self._native.is_admitted)
        self._native.check_admission()

    async def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Always a checkpoint: a reader slower than the engine must not keep the loop from other tasks."""
        if is_ready():
            await anyio.lowlevel.checkpoint()
        else:
            await self._pump.wait(self.id, is_ready)


class BlockingRequest(_Request):
    """A request of a plain thread: an iterator of chunks. Ctrl-C interrupts every wait.

    As `Request`, without await; any thread may read, one at a time.
    """

    def __init__(self, session: Session, native: _core.Request, port: Port) -> None:
        super().__init__(session, native)
        self._port = port

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk: everything that arrived of a choice since its last one."""
        with self._reading():
            self._wait(self._native.has_chunk)
            chunk = self._native.take()
        if chunk is None:
            self._native.check()
            raise StopIteration
        return chunk

    def result(self) -> Result:
        """Waits for the end and returns the whole output, whether or not parts of it were read as chunks."""
        with self._reading():
            self._wait(self._native.has_ended)
        return self._result()

    def admission(self) -> None:
        """Waits until the engine has taken the request; raises what kept it from that."""
        self._wait(self._native.is_admitted)
        self._native.check_admission()

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        while not is_ready():
            self._port.wait()


SomeRequest = TypeVar("SomeRequest", bound=_Request)


class _Stream(Generic[SomeRequest]):
    """Cancels its request on the way out, whatever the reason; after the end that does nothing."""

    _request: SomeRequest | None = None

    def _leave(self) -> None:
        if self._request is not None:
            self._request.cancel()


class Stream(_Stream[Request]):
    """`async with engine.stream(...) as request`."""

    def __init__(self, start: Callable[[], Awaitable[Request]]) -> None:
        self._start = start

    async def __aenter__(self) -> Request:
        self._request = await self._start()
        return self._request

    def __await__(self) -> NoReturn:
        raise TypeError(_ENTER)

    def __aiter__(self) -> NoReturn:
        raise TypeError(_ENTER)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()


class BlockingStream(_Stream[BlockingRequest]):
    """`with engine.blocking.stream(...) as request`."""

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


_ENTER = "enter it first: `async with engine.stream(...) as request: async for chunk in request`"
_ENTER_BLOCKING = "enter it first: `with engine.blocking.stream(...) as request: for chunk in request`"
