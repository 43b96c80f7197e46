"""The items of batches, and the batches that make them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock._jobs import REFUSALS, BatchBase
from penstock.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable
    from typing import Any

    from penstock._core import Chunk, Port, Result, SamplingParams, Usage
    from penstock._jobs import Failure, Job
    from penstock._options import BatchPrompt
    from penstock._session import Session
    from penstock.errors import DeadlineError, GenerationError, OutOfMemoryError


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


class Results(BatchBase[BatchItem]):
    """A batch of which each prompt has one item: its result, or its error."""

    def __init__(
        self,
        session: Session,
        prompts: Iterable[BatchPrompt] | AsyncIterable[BatchPrompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        options: dict[str, Any],
        *,
        concurrency: int | None,
        ordered: bool,
    ) -> None:
        super().__init__(session, prompts, params, options, concurrency=concurrency)
        self._ordered = ordered
        self._num_returned = 0
        self._finished: dict[int, BatchItem] = {}

    def _close(self) -> None:
        super()._close()
        self._finished.clear()

    def _num_kept(self) -> int:
        return len(self._finished)

    def _next_item(self) -> BatchItem | None:
        index = self._num_returned if self._ordered else next(iter(self._finished), None)
        item = None if index is None else self._finished.pop(index, None)
        self._num_returned += item is not None
        return item

    def _fail(self, job_index: int, error: Failure) -> None:
        self._finished[job_index] = BatchItem(job_index, None, error)

    def _collect(self, port: Port) -> bool:
        num_finished = len(self._finished)
        while self._watch.reached:
            job = self._jobs.get(self._watch.reached.pop())
            if job is not None:
                self._poll(job, port)
        return len(self._finished) > num_finished or not self._running

    def _poll(self, job: Job, port: Port) -> None:
        requests = job.requests
        try:
            result = job.poll(port)
        except REFUSALS as error:
            self._end(job, requests)
            self._refuse(job, error)
            return
        if result is not None:
            self._succeed(job, requests)
            self._finished[job.index] = BatchItem(job.index, result, None)
        elif job.requests is not requests:  # the next step of a beam search
            self._forget(requests)
            self._follow(job)


class Chunks(BatchBase[BatchChunk]):
    """A batch of which each prompt has an item for each chunk of its output."""

    def __init__(
        self,
        session: Session,
        prompts: Iterable[BatchPrompt] | AsyncIterable[BatchPrompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        options: dict[str, Any],
        *,
        concurrency: int | None,
    ) -> None:
        super().__init__(session, prompts, params, options, concurrency=concurrency)
        self._failed: deque[BatchChunk] = deque()
        self._ready: deque[Job] = deque()  # those with an unread chunk; each has its turn

    def _close(self) -> None:
        super()._close()
        self._failed.clear()
        self._ready.clear()

    def _check_params(self, params: SamplingParams) -> None:
        for name, is_set in (("num_beams", params.num_beams > 1), ("best_of", params.best_of is not None)):
            if is_set:
                value = getattr(params, name)
                limit = (
                    "left out, or passed to generate_many(): its outputs are selected after all have finished"
                )
                message = f"{name}={value} is not allowed: it must be {limit}"
                raise InvalidRequestError(message, name, value, limit)

    def _num_kept(self) -> int:
        return len(self._failed) + len(self._ready)

    def _next_item(self) -> BatchChunk | None:
        while self._ready:
            if (item := self._take(self._ready.popleft())) is not None:
                return item
        return self._failed.popleft() if self._failed else None

    def _fail(self, job_index: int, error: Failure) -> None:
        self._failed.append(BatchChunk(job_index, None, None, error))

    def _take(self, job: Job) -> BatchChunk | None:
        """The unread chunk of a job."""
        (request,) = requests = job.requests
        usage = request.usage  # before `take`: it receives, and the chunk has all that was received
        chunk = request.take()
        if chunk is None:
            try:
                request.check()
            except REFUSALS as error:
                self._end(job, requests)
                self._refuse(job, error)
            return None
        job.num_unfinished -= chunk.finish_reason is not None
        if not job.num_unfinished:
            self._succeed(job, requests)
        return BatchChunk(job.index, chunk, usage, None)

    def _collect(self, port: Port) -> bool:  # noqa: ARG002
        """Look at every job, when all ready ones had their turn: a fast one does not delay the others."""
        self._watch.reached.clear()
        self._ready.extend(job for job in self._running.values() if job.requests[0].has_chunk())
        return bool(self._ready) or not self._running
