"""The iterators of one request: `AsyncStream` on an event loop, `read_blocking` without one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

import penstock
from penstock.compat.lmdeploy.errors import ErrorCode
from penstock.compat.lmdeploy.generation import GenOut, Turn
from penstock.compat.lmdeploy.sessions import RequestFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.compat.lmdeploy.engine_context import EngineContext
    from penstock.compat.lmdeploy.generation import Ask

__all__ = ["AsyncStream", "read_blocking"]

#: Errors that become the item of a request that failed.
FAILURES = (RequestFailed, penstock.RequestError, penstock.EngineStoppedError)


def acquire(context: EngineContext, turn: Turn, session_id: int) -> None:
    """Begin the use of the session; raises `RequestFailed`."""
    ask = turn.ask
    turn.lease = context.sessions.acquire(
        session_id, turn.cancel, start=ask.start, end=ask.end, step=ask.step
    )


def too_long(turn: Turn, error: Exception) -> GenOut | None:
    """The item of a prompt that does not fit: one without text and with the reason `length`."""
    if not isinstance(error, RequestFailed) or error.code != ErrorCode.CONTEXT_LENGTH_EXCEEDED:
        return None
    item = turn.failed(error)
    item.finish_reason = "length"
    return item


class AsyncStream(AsyncGenerator[GenOut, None]):
    """The items of a request, as an async generator.

    Dropping it cancels the request at once, also without a running event loop.
    """

    def __init__(self, context: EngineContext, session_id: int, ask: Ask) -> None:
        self._context = context
        self._session_id = session_id
        self._turn = Turn(context, ask)
        self._request: penstock.Request | None = None
        self._is_reading = False
        self._items: list[GenOut] = []  # in reverse order

    def set_items(self, items: list[GenOut]) -> None:
        """Return these items instead of starting a request."""
        self._turn.is_over = True
        self._items = items[::-1]

    async def __anext__(self) -> GenOut:
        """The next item."""
        # Runs once per token and stream.
        request = self._request
        if request is None or self._is_reading:
            return await self._next()
        self._is_reading = True
        try:
            chunk = await request.__anext__()
            while chunk.finish_reason is None:
                item = self._turn.read(chunk)
                if item is not None:
                    return item
                chunk = await request.__anext__()
        except FAILURES as error:
            return self._failed(error)
        except BaseException:
            self.close()
            raise
        finally:
            self._is_reading = False
        return self._last(chunk)

    async def _next(self) -> GenOut:
        """The next item, before the request has started or after it has ended."""
        if self._is_reading:
            message = "the stream is already being read by another task"
            raise RuntimeError(message)
        if self._items:
            return self._items.pop()
        if self._turn.is_over:
            raise StopAsyncIteration
        self._context.check_open()
        self._is_reading = True
        try:
            request = await self._start()
            if request is None:
                return self._turn.aborted()
            if not self._turn.ask.streams:
                return self._last(await request.result())
        except FAILURES as error:
            return self._failed(error)
        except BaseException:
            self.close()
            raise
        finally:
            self._is_reading = False
        self._request = request
        return await self.__anext__()

    async def _start(self) -> penstock.Request | None:
        """Start the request; `None` if it was cancelled before."""
        context, turn = self._context, self._turn
        acquire(context, turn, self._session_id)
        if turn.ask.is_long():
            prompt, params = await anyio.to_thread.run_sync(turn.prepare, abandon_on_cancel=True)
        else:
            prompt, params = turn.prepare()
        if turn.is_cancelled:
            return None
        request = await context.engine.start_request(prompt, params)
        turn.begin(request)
        return request

    def _last(self, chunk: penstock.Chunk | penstock.Result) -> GenOut:
        self._request = None
        self._items = self._turn.read_last(chunk)[::-1]
        return self._items.pop()

    def _failed(self, error: Exception) -> GenOut:
        self._request = None
        return too_long(self._turn, error) or self._turn.failed(error)

    async def asend(self, value: None) -> GenOut:
        """The same as `__anext__`."""
        return await self.__anext__()

    async def athrow(self, typ: Any, val: Any = None, tb: Any = None) -> GenOut:
        """Cancel the request and raise the error."""
        await self.aclose()
        return await super().athrow(typ, val, tb)

    async def aclose(self) -> None:
        """Cancel the request. Does nothing once it has ended."""
        self.close()

    def close(self) -> None:
        """The same as `aclose`, in any thread and without an event loop."""
        self._request = None
        self._items = []
        self._turn.release()

    def __del__(self) -> None:
        turn = getattr(self, "_turn", None)
        if turn is not None and not turn.is_over:
            self.close()


def read_blocking(context: EngineContext, session_id: int, ask: Ask) -> Iterator[GenOut]:
    """The items of a request, without an event loop. Closing or dropping the iterator cancels the request."""
    turn = Turn(context, ask)
    try:
        try:
            acquire(context, turn, session_id)
            prompt, params = turn.prepare()
            if turn.is_cancelled:
                yield turn.aborted()
                return
            turn.begin(context.engine.blocking.start_request(prompt, params))
            if not ask.streams:
                yield from turn.read_last(turn.request.result())
                return
            while True:
                chunk = turn.request.read()
                if chunk.finish_reason is not None:
                    yield from turn.read_last(chunk)
                    return
                if (item := turn.read(chunk)) is not None:
                    yield item
        except FAILURES as error:
            yield turn.failed(error)
    finally:
        turn.release()
