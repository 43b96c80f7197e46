"""`generate_many` and `stream_many`: any number of prompts, with a bounded number of requests at a time.

There is no background task. The iterating task, or thread, starts requests while `Jobs` has room for them,
waits until output has arrived, and returns it. Only the prompts and the output of these requests are in
memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

import anyio
import anyio.lowlevel

from penstock._checks import invalid
from penstock._core import Port
from penstock._jobs import END, REFUSALS, Item, Job, Jobs
from penstock._session import should_offload
from penstock.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import Self

    from penstock._core import Chunk, Result, SamplingParams, Usage
    from penstock._jobs import Failure
    from penstock._pump import Pump
    from penstock.errors import DeadlineError, GenerationError, OutOfMemoryError

__all__ = ["Batch", "BatchChunk", "BatchItem", "BatchStream", "BlockingBatch", "BlockingBatchStream"]

#: Time between two attempts while requests of other callers fill the waiting queue, in seconds. The ends of
#: those requests are events of their own listeners only.
_RETRY_INTERVAL = 0.02


@dataclass(frozen=True)
class BatchItem:
    """The outcome of one prompt of `generate_many`: either `result` or `error` is set."""

    index: int
    result: Result | None
    error: InvalidRequestError | GenerationError | OutOfMemoryError | DeadlineError | None

    __slots__ = {  # noqa: RUF023 - in the order of the fields
        "index": "The position of the prompt, from 0.",
        "result": "The result; `None` if the prompt is invalid or the request failed.",
        "error": "The error, of one of these types; `None` if there is a result.",
    }

    def to_dict(self) -> dict[str, Any]:
        """The item for `json.dumps`; the error is its message."""
        return {
            "index": self.index,
            "result": None if self.result is None else self.result.to_dict(),
            "error": None if self.error is None else str(self.error),
        }


def error_at(item: BatchItem, place: str) -> Exception:
    """The error of an item; that of an invalid prompt names its place in the call."""
    error = item.error
    if isinstance(error, InvalidRequestError) and error.field == "prompt":
        return InvalidRequestError(f"{place}: {error}", place, error.value, error.limit)
    return error or AssertionError()


@dataclass(frozen=True)
class BatchChunk:
    """A part of the output of one prompt of `stream_many`: either `chunk` or `error` is set.

    The last item of a prompt has an `error`, or the `finish_reason` of the last choice in its `chunk`.
    """

    index: int
    chunk: Chunk | None
    usage: Usage | None
    error: InvalidRequestError | GenerationError | OutOfMemoryError | DeadlineError | None

    __slots__ = {  # noqa: RUF023 - in the order of the fields
        "index": "The position of the prompt, from 0.",
        "chunk": "The new output of one choice; `None` if there is an error.",
        "usage": "The token counts of the request so far, this chunk included; `None` if there is an error.",
        "error": "The error, of one of these types, after the last chunk; else `None`.",
    }

    def to_dict(self) -> dict[str, Any]:
        """The item for `json.dumps`; the error is its message."""
        return {
            "index": self.index,
            "chunk": None if self.chunk is None else self.chunk.to_dict(),
            "usage": None if self.usage is None else self.usage.to_dict(),
            "error": None if self.error is None else str(self.error),
        }


class Results(Jobs[BatchItem]):
    """Each prompt has one item: its result, or its error."""

    def _failure(self, index: int, error: Failure) -> BatchItem:
        return BatchItem(index, None, error)

    def collect(self) -> bool:
        num_kept = len(self._kept)
        while self.watch.reached:
            job = self._by_id.get(self.watch.reached.pop())
            if job is not None:
                requests = job.requests
                try:
                    result = job.poll(self.port)
                except REFUSALS as error:
                    self.refuse(job, error)
                    continue
                if result is not None:
                    self._succeed(job)
                    self._kept[job.index] = BatchItem(job.index, result, None)
                elif job.requests is not requests:  # the next step of a beam search
                    self._forget(requests)
                    self._follow(job)
        return len(self._kept) > num_kept or not self.running


class Chunks(Jobs[BatchChunk]):
    """Each prompt has an item for each chunk of its output, and one for its error."""

    _ready: Iterator[Job] = iter(())  # those with an unread chunk; each has its turn

    def _check_params(self, params: SamplingParams) -> None:
        limit = "left out, or passed to generate_many(): its outputs are selected after all have finished"
        if params.num_beams > 1:
            raise invalid("num_beams", params.num_beams, limit)
        if params.best_of is not None:
            raise invalid("best_of", params.best_of, limit)

    def _failure(self, index: int, error: Failure) -> BatchChunk:
        return BatchChunk(index, None, None, error)

    def collect(self) -> bool:
        """Look at every job, when all ready ones had their turn: a fast one does not delay the others."""
        self.watch.reached.clear()
        ready = [job for job in self.running.values() if job.requests[0].has_chunk()]
        self._ready = iter(ready)
        return bool(ready) or not self.running

    def next_item(self) -> BatchChunk | None:
        for job in self._ready:
            for request in job.requests:  # none if the batch was closed
                usage = request.usage  # before `take`: it receives, and the chunk has all that was received
                chunk = request.take()
                if chunk is not None:
                    job.num_unfinished -= chunk.finish_reason is not None
                    if not job.num_unfinished:
                        self._succeed(job)
                    return BatchChunk(job.index, chunk, usage, None)
                try:
                    request.check()
                except REFUSALS as error:
                    self.refuse(job, error)
        return super().next_item()


class _Batch(Generic[Item]):
    """A batch cancels what runs when it is dropped."""

    def __init__(self, jobs: Jobs[Item]) -> None:
        self._jobs = jobs

    def __del__(self) -> None:
        self._jobs.close()

    def cancel(self, index: int | None = None) -> None:
        """Cancel the request of the prompt at this position; without `index` all, and start no other prompt.

        Never waits. Can be called from any thread, also while another one reads: the output so far is
        returned, with the finish reason `cancelled`. A beam search has a `GenerationError` instead.
        """
        self._jobs.cancel(index)


class _AsyncBatch(_Batch[Item]):
    """An event loop reads this batch, with the engine's methods for waiting and for slow calls."""

    def __init__(
        self, jobs: Jobs[Item], pump: Callable[[], Pump], call: Callable[..., Awaitable[Any]]
    ) -> None:
        super().__init__(jobs)
        prompts: Any = jobs.prompts
        self._is_async = isinstance(prompts, AsyncIterable)
        self._prompts = aiter(prompts) if self._is_async else iter(prompts)
        self._find_pump = pump
        self._pump: Pump | None = None
        self._call = call

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        """Return the next item. Raises `EngineStoppedError` after a close, and what the prompts raise."""
        with self._jobs as jobs:
            await anyio.lowlevel.checkpoint()
            pump = self._pump = self._pump or self._find_pump()
            jobs.port, jobs.watches = pump.port, pump.watches
            while True:
                # An item does not wait for the next prompt of an async iterable, which may take long.
                item = jobs.next_item() if self._is_async else None
                if item is None:
                    while jobs.has_room():
                        await self._start_job()
                    item = jobs.next_item()
                if item is not None:
                    return item
                if jobs.is_over():
                    raise StopAsyncIteration
                if not jobs.running:
                    await anyio.sleep(_RETRY_INTERVAL)
                    jobs.limit = 1
                elif not jobs.collect():
                    await pump.wait(jobs.watch, jobs.collect)

    async def _start_job(self) -> None:
        job = self._jobs.rejected_job()
        if job is None:
            prompt = await anext(self._prompts, END) if self._is_async else next(self._prompts, END)
            job = self._jobs.next_job(prompt)
        if job is not None:
            in_thread = should_offload(job.prompt, job.params)
            await anyio.lowlevel.checkpoint()
            try:
                started = await self._call(self._jobs.submit(job), job.prompt, in_thread=in_thread)
                self._jobs.begin(job, started)
            except REFUSALS as error:
                self._jobs.refuse(job, error)

    async def aclose(self) -> None:
        """Cancel the requests that run. Can be called repeatedly, not while a task waits for an item."""
        with self._jobs as jobs:
            jobs.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _BlockingBatch(_Batch[Item]):
    """A thread without an event loop reads this batch."""

    def __init__(self, jobs: Jobs[Item]) -> None:
        super().__init__(jobs)
        prompts: Any = jobs.prompts
        self._prompts = iter(prompts)
        jobs.port = Port(blocking=True)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """Return the next item; raises as the asynchronous batch does."""
        with self._jobs as jobs:
            while True:
                while jobs.has_room():
                    self._start_job()
                if (item := jobs.next_item()) is not None:
                    return item
                if jobs.is_over():
                    raise StopIteration
                if not jobs.running:
                    jobs.port.wait(_RETRY_INTERVAL)
                    jobs.limit = 1
                while not jobs.collect():
                    jobs.port.wait()
                    jobs.watch.reached.update(jobs.port.drain())

    def _start_job(self) -> None:
        job = self._jobs.rejected_job() or self._jobs.next_job(next(self._prompts, END))
        if job is not None:
            try:
                self._jobs.begin(job, self._jobs.submit(job)())
            except REFUSALS as error:
                self._jobs.refuse(job, error)

    def close(self) -> None:
        """Cancel the requests that run. Can be called repeatedly."""
        with self._jobs as jobs:
            jobs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Batch(_AsyncBatch[BatchItem]):
    """The return value of `Engine.generate_many`: an async iterator of `BatchItem`s.

        async with engine.generate_many(prompts, max_tokens=64) as items:
            async for item in items:
                print(item.index, item.result.text if item.result else item.error)

    Leaving the block, `aclose()`, dropping the batch and an exception inside of it, such as a cancellation,
    cancel the requests that run. `async for item in engine.generate_many(...)` works without the block.
    """


class BatchStream(_AsyncBatch[BatchChunk]):
    """The return value of `Engine.stream_many`: an async iterator of `BatchChunk`s.

        async with engine.stream_many(prompts, max_tokens=64) as chunks:
            async for item in chunks:
                print(item.index, item.chunk.text if item.chunk else item.error)

    Ends as `Batch` does: leaving the block, `aclose()`, dropping it and an exception cancel what runs.
    """


class BlockingBatch(_BlockingBatch[BatchItem]):
    """The return value of `Blocking.generate_many`, an iterator of `BatchItem`s: `Batch` without `await`."""


class BlockingBatchStream(_BlockingBatch[BatchChunk]):
    """The return value of `Blocking.stream_many`, an iterator of `BatchChunk`s, without `await`."""
