"""The jobs of a batch: which prompts have been started, have been refused, and have finished."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock import _core
from penstock._pump import Watch
from penstock.errors import GenerationError, InvalidRequestError, OverloadedError
from penstock.request import result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeAlias

    from penstock._core import Port, Result, SamplingParams
    from penstock._options import Prompt
    from penstock._session import PreparedPrompt, Session

    #: Starts a request, or prepares a beam search; given a callable that raises once the caller is cancelled.
    Submit: TypeAlias = Callable[[Callable[[], None]], _core.Request | _core.BeamSearch]

#: With `ordered`, this many times `concurrency` results are kept while an earlier one is missing.
_WINDOW = 4
#: The errors of a job that do not end the batch.
REFUSALS = (InvalidRequestError, GenerationError, OverloadedError)


@dataclass(frozen=True)
class BatchItem:
    """The outcome of one prompt of `generate_many`: either `result` or `error` is set."""

    index: int
    result: Result | None
    error: InvalidRequestError | GenerationError | None

    __slots__ = {  # noqa: RUF023 - in the order of the fields
        "index": "The position of the prompt, from 0.",
        "result": "The result; `None` if the prompt is invalid or the request failed.",
        "error": "The `InvalidRequestError` or `GenerationError`; `None` if there is a result.",
    }

    def to_dict(self) -> dict[str, Any]:
        """The item for `json.dumps`; the error is its message."""
        return {
            "index": self.index,
            "result": None if self.result is None else self.result.to_dict(),
            "error": None if self.error is None else str(self.error),
        }


class Job:
    """One unfinished prompt: a request, or a beam search with the requests of its current step."""

    def __init__(self, index: int, prompt: PreparedPrompt, params: SamplingParams) -> None:
        self.index = index
        self.prompt = prompt
        self.params = params
        self.requests: list[_core.Request] = []
        self._search: _core.BeamSearch | None = None

    def submit(self, session: Session, port: Port) -> Submit:
        """The call that starts the job; slow if `should_offload`."""
        if self.params.num_beams > 1:
            return partial(session.search_beams, self.prompt, self.params)
        return partial(session.submit, self.prompt, _core.candidate_params(self.params), port)

    def begin(self, started: _core.Request | _core.BeamSearch, port: Port) -> None:
        if isinstance(started, _core.BeamSearch):
            self._search = started
            self.requests = started.start_step(port)
        else:
            self.requests = [started]

    def poll(self, port: Port) -> Result | None:
        """The result, if there is one yet; raises the error of a failed request."""
        while all(request.has_ended() for request in self.requests):
            results = [result_of(request) for request in self.requests]
            if self._search is None:
                return _core.best_of(results[0], self.params)
            self._search.advance(results)
            if not self._search.is_running:
                return self._search.result()
            self.requests = self._search.start_step(port)
        return None

    def cancel(self) -> None:
        for request in self.requests:
            request.cancel()
        self.requests = []
        if self._search is not None:
            self._search.close()
            self._search = None


class BatchBase:
    """The state of a batch, and its loop. The subclasses wait."""

    def __init__(
        self,
        session: Session,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams,
        chat_options: dict[str, Any],
        *,
        concurrency: int | None,
        ordered: bool,
    ) -> None:
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, (Iterable, AsyncIterable)):
            limit = "an iterable of prompts"
            message = f"prompts={reprlib.repr(prompts)} is not allowed: it must be {limit}"
            raise InvalidRequestError(message, "prompts", prompts, limit)
        info = session.check_open().info
        if concurrency is None:
            width = max(params.n, params.best_of or 1, params.num_beams)
            most = info.max_num_seqs + (info.max_waiting or info.max_num_seqs)
            concurrency = min(-(-(info.max_num_seqs * 5 // 4 + 1) // width) + 1, most)
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            limit = "an integer of at least 1"
            message = f"concurrency={concurrency!r} is not allowed: it must be {limit}"
            raise InvalidRequestError(message, "concurrency", concurrency, limit)
        self._session = session
        self._params = params
        self._chat_options = chat_options
        self._concurrency = concurrency
        self._limit = concurrency  # less after the engine has refused a request
        self._ordered = ordered
        self._num_taken = 0
        self._num_returned = 0
        self._is_exhausted = False
        self._is_active = False
        self._rejected: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._jobs: dict[int, Job] = {}  # the running ones, by the ids of their requests
        self._watch = Watch()
        self._watches: dict[int, Watch] = {}
        self._finished: dict[int, BatchItem] = {}

    def __del__(self) -> None:
        if hasattr(self, "_finished"):
            self._close()

    def _leave(self) -> None:
        self._enter()
        self._close()
        self._is_active = False

    def _close(self) -> None:
        """Cancel what runs; the iteration is over."""
        self._is_exhausted = True
        for job in self._running.values():
            self._forget(job.requests)
            job.cancel()
        self._rejected.clear()
        self._running.clear()
        self._finished.clear()

    def _enter(self) -> None:
        if self._is_active:
            message = "the batch is already being read; only one reader at a time is allowed"
            raise RuntimeError(message)
        self._is_active = True

    def _next_item(self) -> BatchItem | None:
        """The next item that can be returned."""
        index = self._num_returned if self._ordered else next(iter(self._finished), None)
        item = None if index is None else self._finished.pop(index, None)
        self._num_returned += item is not None
        return item

    def _has_room(self) -> bool:
        num_unreturned = len(self._running) + len(self._finished)
        return len(self._running) < self._limit and num_unreturned < _WINDOW * self._concurrency

    def _is_over(self) -> bool:
        return self._is_exhausted and not (self._running or self._finished or self._rejected)

    def _job(self, prompt: Prompt) -> Job | None:
        """The job of the next prompt; `None` if the prompt is not valid."""
        index = self._num_taken
        self._num_taken += 1
        try:
            return Job(index, self._prepare(prompt), self._params)
        except InvalidRequestError as error:
            self._finished[index] = BatchItem(index, None, error)
            return None

    def _prepare(self, prompt: Prompt) -> PreparedPrompt:
        return self._session.prepare(prompt, self._params, dict(self._chat_options))[0]

    def _begin(self, job: Job, started: _core.Request | _core.BeamSearch, port: Port) -> None:
        job.begin(started, port)
        self._running[job.index] = job
        self._follow(job)

    def _refuse(self, job: Job, error: InvalidRequestError | GenerationError | OverloadedError) -> bool:
        """Record the error of a job; false if the engine has no room for it, so that it is started later.

        The job holds nothing: an open beam search would delay `aclose(drain=...)`.
        """
        job.cancel()
        if isinstance(error, OverloadedError):
            self._rejected.appendleft(job)
            self._limit = max(1, len(self._running))
            return False
        self._finished[job.index] = BatchItem(job.index, None, error)
        return True

    def _follow(self, job: Job) -> None:
        """Look at the job once, and whenever a drain names one of its requests."""
        for request in job.requests:
            self._jobs[request.id] = job
            self._watches[request.id] = self._watch
            self._watch.reached.add(request.id)

    def _forget(self, requests: Sequence[_core.Request]) -> None:
        for request in requests:
            self._jobs.pop(request.id, None)
            self._watches.pop(request.id, None)

    def _collect(self, port: Port) -> bool:
        """Move finished jobs to the finished items; true if there is a reason to stop waiting."""
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
            self._end(job, requests)
            self._finished[job.index] = BatchItem(job.index, result, None)
            self._limit = min(self._limit + 1, self._concurrency)
        elif job.requests is not requests:  # the next step of a beam search
            self._forget(requests)
            self._follow(job)

    def _end(self, job: Job, requests: Sequence[_core.Request]) -> None:
        self._forget(requests)
        job.cancel()
        del self._running[job.index]

    # ---- the loop; the coroutines of a blocking batch never suspend

    async def _wait_for_item(self, port: Port) -> BatchItem | None:
        while True:
            await self._start_jobs(port)
            if (item := self._next_item()) is not None or self._is_over():
                return item
            await self._wait(port)

    async def _start_jobs(self, port: Port) -> None:
        while self._has_room() and (self._rejected or not self._is_exhausted):
            if self._rejected:
                job: Job | None = self._rejected.popleft()
            else:
                try:
                    prompt = await self._next_prompt()
                except StopAsyncIteration:
                    self._is_exhausted = True
                    return
                job = self._job(prompt)
            if job is not None and not await self._start(job, port):
                return

    async def _next_prompt(self) -> Prompt:
        """The next prompt; raises `StopAsyncIteration` after the last one."""
        raise NotImplementedError

    async def _start(self, job: Job, port: Port) -> bool:
        """Start a job; false if the engine has no room for it."""
        raise NotImplementedError

    async def _wait(self, port: Port) -> None:
        """Wait until a job has finished, or until an attempt to start one is due."""
        raise NotImplementedError
