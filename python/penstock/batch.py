"""`generate_many` and `stream_many`: any number of prompts, with a bounded number of requests at a time.

There is no background task. The iterating task, or thread, starts requests until `concurrency` of them are
unfinished, waits until output has arrived, and returns it. Only the prompts and the output of these requests
are in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from penstock._batch_items import BatchChunk, BatchItem, Chunks, Results
from penstock._core import Port
from penstock._jobs import REFUSALS, BatchBase, Item, Job
from penstock._session import should_offload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
    from types import TracebackType
    from typing import Any, Self

    from penstock._core import SamplingParams
    from penstock._options import BatchPrompt
    from penstock._pump import Pump
    from penstock._session import Session

__all__ = ["Batch", "BatchChunk", "BatchItem", "BatchStream", "BlockingBatch", "BlockingBatchStream"]

BatchChunk.__module__ = BatchItem.__module__ = __name__  # their public module, also for pickle

#: Time between two attempts while requests of other callers fill the waiting queue, in seconds. The ends of
#: those requests are events of their own listeners only.
_RETRY_INTERVAL = 0.02


class _AsyncBatch(BatchBase[Item]):
    """A batch that an event loop reads."""

    def _connect(
        self,
        prompts: Iterable[BatchPrompt] | AsyncIterable[BatchPrompt],
        pump: Callable[[], Pump],
        call: Callable[..., Awaitable[Any]],
    ) -> None:
        """Set where the prompts come from, and the engine's methods for waiting and for slow calls."""
        self._async_prompts = aiter(prompts) if isinstance(prompts, AsyncIterable) else None
        self._prompts = iter(()) if isinstance(prompts, AsyncIterable) else iter(prompts)
        self._find_pump = pump
        self._pump: Pump | None = None
        self._call = call

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        """The next item. Raises `EngineStoppedError` if the engine is closed, and what the prompts raise."""
        self._enter()
        try:
            await anyio.lowlevel.checkpoint()
            pump = self._pump = self._pump or self._find_pump()
            self._watches = pump.watches
            item = await self._wait_for_item(pump.port)
        except BaseException:
            self._close()
            raise
        finally:
            self._is_active = False
        if item is None:
            raise StopAsyncIteration
        return item

    async def _start_jobs(self, port: Port) -> None:
        if self._async_prompts is None or not self._num_kept():  # its next prompt may take long
            await super()._start_jobs(port)

    async def _next_prompt(self) -> BatchPrompt:
        if self._async_prompts is not None:
            return await anext(self._async_prompts)
        try:
            return next(self._prompts)
        except StopIteration:
            raise StopAsyncIteration from None

    async def _start(self, job: Job, port: Port) -> bool:
        submit, in_thread = job.submit(self._session, port), should_offload(job.prompt, job.params)
        await anyio.lowlevel.checkpoint()
        try:
            if in_thread:
                started = await self._call(submit, job.prompt, in_thread=True)
            else:
                started = submit(_never_cancelled)
            self._begin(job, started, port)
        except REFUSALS as error:
            return self._refuse(job, error)
        return True

    async def _wait(self, port: Port) -> None:
        if self._running and self._pump is not None:
            is_ready = partial(self._collect, port)
            if not is_ready():
                await self._pump.wait(self._watch, is_ready)
        elif self._rejected:
            await anyio.sleep(_RETRY_INTERVAL)

    async def aclose(self) -> None:
        """Cancel the requests that run. Can be called repeatedly, not while a task waits for an item."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()


class _BlockingBatch(BatchBase[Item]):
    """A batch that a thread without an event loop reads."""

    def _connect(self, prompts: Iterable[BatchPrompt]) -> None:
        """Set where the prompts come from."""
        self._prompts = iter(prompts)
        self._port = Port(blocking=True)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """The next item; raises as the asynchronous batch does."""
        self._enter()
        try:
            item = _run(self._wait_for_item(self._port))
        except BaseException:
            self._close()
            raise
        finally:
            self._is_active = False
        if item is None:
            raise StopIteration
        return item

    async def _next_prompt(self) -> BatchPrompt:
        try:
            return next(self._prompts)
        except StopIteration:
            raise StopAsyncIteration from None

    async def _start(self, job: Job, port: Port) -> bool:
        try:
            self._begin(job, job.submit(self._session, port)(_never_cancelled), port)
        except REFUSALS as error:
            return self._refuse(job, error)
        return True

    async def _wait(self, port: Port) -> None:
        while self._running and not self._collect(port):
            port.wait()
            self._watch.reached.update(port.drain())
        if not self._running and self._rejected:
            port.wait(_RETRY_INTERVAL)

    def close(self) -> None:
        """Cancel the requests that run. Can be called repeatedly."""
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()


class Batch(Results, _AsyncBatch[BatchItem]):
    """The return value of `Engine.generate_many`: an async iterator of `BatchItem`s.

        async with engine.generate_many(prompts, max_tokens=64) as items:
            async for item in items:
                print(item.index, item.result.text if item.result else item.error)

    Leaving the block, `aclose()`, dropping the batch and an exception inside of it, such as a cancellation,
    cancel the requests that run. `async for item in engine.generate_many(...)` works without the block.
    """

    def __init__(
        self,
        session: Session,
        prompts: Iterable[BatchPrompt] | AsyncIterable[BatchPrompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        options: dict[str, Any],
        *,
        concurrency: int | None,
        ordered: bool,
        pump: Callable[[], Pump],
        call: Callable[..., Awaitable[Any]],
    ) -> None:
        super().__init__(session, prompts, params, options, concurrency=concurrency, ordered=ordered)
        self._connect(prompts, pump, call)


class BatchStream(Chunks, _AsyncBatch[BatchChunk]):
    """The return value of `Engine.stream_many`: an async iterator of `BatchChunk`s.

        async with engine.stream_many(prompts, max_tokens=64) as chunks:
            async for item in chunks:
                print(item.index, item.chunk.text if item.chunk else item.error)

    Ends as `Batch` does: leaving the block, `aclose()`, dropping it and an exception cancel what runs.
    """

    def __init__(
        self,
        session: Session,
        prompts: Iterable[BatchPrompt] | AsyncIterable[BatchPrompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        options: dict[str, Any],
        *,
        concurrency: int | None,
        pump: Callable[[], Pump],
        call: Callable[..., Awaitable[Any]],
    ) -> None:
        super().__init__(session, prompts, params, options, concurrency=concurrency)
        self._connect(prompts, pump, call)


class BlockingBatch(Results, _BlockingBatch[BatchItem]):
    """The return value of `Blocking.generate_many`, an iterator of `BatchItem`s: `Batch` without `await`."""

    def __init__(
        self,
        session: Session,
        prompts: Iterable[BatchPrompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        options: dict[str, Any],
        *,
        concurrency: int | None,
        ordered: bool,
    ) -> None:
        super().__init__(session, prompts, params, options, concurrency=concurrency, ordered=ordered)
        self._connect(prompts)


class BlockingBatchStream(Chunks, _BlockingBatch[BatchChunk]):
    """The return value of `Blocking.stream_many`, an iterator of `BatchChunk`s, without `await`."""

    def __init__(
        self,
        session: Session,
        prompts: Iterable[BatchPrompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        options: dict[str, Any],
        *,
        concurrency: int | None,
    ) -> None:
        super().__init__(session, prompts, params, options, concurrency=concurrency)
        self._connect(prompts)


def _run(coroutine: Coroutine[Any, Any, Item | None]) -> Item | None:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        item: Item | None = end.value
        return item
    message = "a blocking batch was suspended; this is a bug in penstock"
    raise AssertionError(message)


def _never_cancelled() -> None:
    pass
