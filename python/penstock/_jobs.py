"""The jobs of a batch: which prompts have been started, have been refused, and have finished."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import AsyncIterable, Iterable, Mapping, Sized
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock import _core, _keywords
from penstock._options import merge
from penstock._pump import Watch
from penstock.chat import Chat
from penstock.errors import (
    DeadlineError,
    GenerationError,
    InvalidRequestError,
    OutOfMemoryError,
    OverloadedError,
)
from penstock.request import result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, TypeAlias

    from penstock._core import Port, Result, SamplingParams
    from penstock._options import BatchPrompt
    from penstock._session import PreparedPrompt, Session

    #: Starts a request, or prepares a beam search; given a callable that raises once the caller is cancelled.
    Submit: TypeAlias = Callable[[Callable[[], None]], _core.Request | _core.BeamSearch]
    #: The errors that a job can end with; none of them ends the batch.
    Failure: TypeAlias = InvalidRequestError | GenerationError | OutOfMemoryError | DeadlineError
    #: The errors of a job. An `OverloadedError` other than a `DeadlineError` starts it again later.
    Refusal: TypeAlias = Failure | OverloadedError

#: This many times `concurrency` items are kept while an earlier one is missing, or is not read.
_WINDOW = 4
#: The errors of `Refusal`.
REFUSALS = (InvalidRequestError, GenerationError, OutOfMemoryError, OverloadedError)

Item = TypeVar("Item")
Prompts = TypeVar("Prompts", bound="Iterable[BatchPrompt] | AsyncIterable[BatchPrompt]")


def prompts_of(prompts: Prompts | None, options: Mapping[str, Any]) -> Prompts:
    """The prompts of a batch, which cannot be `messages` of the options."""
    if "messages" in options:
        raise _keywords.unknown("SamplingParams", "messages")
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, (Iterable, AsyncIterable)):
        limit = "an iterable of prompts"
        message = f"prompts={reprlib.repr(prompts)} is not allowed: it must be {limit}"
        raise InvalidRequestError(message, "prompts", prompts, limit)
    return prompts


class Job:
    """One unfinished prompt: a request, or a beam search with the requests of its current step."""

    def __init__(self, index: int, prompt: PreparedPrompt, params: SamplingParams) -> None:
        self.index = index
        self.prompt = prompt
        self.params = params
        self.num_unfinished = params.n  # choices of which the last chunk was not taken
        self.requests: list[_core.Request] = []
        self.is_cancelled = False  # by `BatchBase.cancel`
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
            if self.is_cancelled and self._search is None:
                return results[0]
            if self.is_cancelled:
                message = "the beam search was cancelled"
                raise GenerationError(message)
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


class BatchBase(Generic[Item]):
    """The state of a batch, and its loop. Some subclasses wait, others make the items."""

    def __init__(
        self,
        session: Session,
        prompts: Iterable[BatchPrompt] | AsyncIterable[BatchPrompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        options: dict[str, Any],
        *,
        concurrency: int | None,
    ) -> None:
        self._params: SamplingParams | Iterator[SamplingParams]
        if isinstance(params, Iterable) and not isinstance(params, (str, bytes, Mapping)):
            if isinstance(params, Sized) and isinstance(prompts, Sized) and len(params) != len(prompts):
                raise _unequal(f"{len(params)} parameters for {len(prompts)} prompts", params)
            self._params, self._options, width = iter(params), options, 1
        else:
            shared: Any = params
            self._options = Chat.take_options(options)
            self._params = shared = merge(_core.SamplingParams, shared, options)
            self._check_params(shared)
            width = max(shared.n, shared.best_of or 1, shared.num_beams)
        info = session.check_open().info
        if concurrency is None:
            most = info.max_num_seqs + (info.max_waiting or info.max_num_seqs)
            concurrency = min(-(-(info.max_num_seqs * 5 // 4 + 1) // width) + 1, most)
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            limit = "an integer of at least 1"
            message = f"concurrency={concurrency!r} is not allowed: it must be {limit}"
            raise InvalidRequestError(message, "concurrency", concurrency, limit)
        self._session = session
        self._concurrency = concurrency
        self._limit = concurrency  # less after the engine has refused a request
        self._num_taken = 0
        self._is_exhausted = False
        self._is_active = False
        self._cancelled: set[int | None] = set()  # indices; `None` for all prompts
        self._rejected: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._jobs: dict[int, Job] = {}  # the running ones, by the ids of their requests
        self._watch = Watch()
        self._watches: dict[int, Watch] = {}

    def __del__(self) -> None:
        if hasattr(self, "_watches"):
            self._close()

    def cancel(self, index: int | None = None) -> None:
        """Cancel the request of the prompt at this position; without `index` all, and start no other prompt.

        Never waits. Can be called from any thread, also while another one reads: the output so far is
        returned, with the finish reason `cancelled`. A beam search has a `GenerationError` instead.
        """
        self._cancelled.add(index)
        if index is None:
            self._is_exhausted = True
        for job in list(self._running.values()):
            self._cancel_if_asked(job)

    def _cancel_if_asked(self, job: Job) -> None:
        if job.index in self._cancelled or None in self._cancelled:
            job.is_cancelled = True
            for request in job.requests:
                request.cancel()

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

    def _enter(self) -> None:
        if self._is_active:
            message = "the batch is already being read; only one reader at a time is allowed"
            raise RuntimeError(message)
        self._is_active = True

    # ---- the items

    def _check_params(self, params: SamplingParams) -> None:
        """Raise `InvalidRequestError` for parameters that no prompt can have."""

    def _num_kept(self) -> int:
        """The number of items that were not returned."""
        raise NotImplementedError

    def _next_item(self) -> Item | None:
        """The next item that can be returned."""
        raise NotImplementedError

    def _fail(self, job_index: int, error: Failure) -> None:
        """Keep the item of a prompt that failed."""
        raise NotImplementedError

    def _collect(self, port: Port) -> bool:
        """Keep the items that have arrived; true if there is a reason to stop waiting."""
        raise NotImplementedError

    # ---- the jobs

    def _has_room(self) -> bool:
        num_unreturned = len(self._running) + self._num_kept()
        return len(self._running) < self._limit and num_unreturned < _WINDOW * self._concurrency

    def _is_over(self) -> bool:
        return self._is_exhausted and not (self._running or self._rejected or self._num_kept())

    def _next_params(self) -> SamplingParams:
        """The parameters of the prompt that was just taken."""
        if isinstance(self._params, _core.SamplingParams):
            return self._params
        try:
            return next(self._params)
        except StopIteration:
            num_given = self._num_taken - 1
            raise _unequal(f"{num_given} parameters for at least {self._num_taken} prompts", None) from None

    def _exhaust(self) -> None:
        """There is no other prompt."""
        self._is_exhausted = True
        if not isinstance(self._params, _core.SamplingParams):
            for _ in self._params:
                message = f"at least {self._num_taken + 1} parameters for {self._num_taken} prompts"
                raise _unequal(message, None)

    def _job(self, prompt: BatchPrompt) -> Job | None:
        """The job of the next prompt; `None` if the prompt or its parameters are not valid."""
        index = self._num_taken
        self._num_taken += 1
        given = self._next_params()
        try:
            prepared, params = self._session.prepare(prompt, given, dict(self._options))
            if given is not self._params:
                self._check_params(params)
        except InvalidRequestError as error:
            self._fail(index, error.with_traceback(None))  # its frames have the prompt
            return None
        return Job(index, prepared, params)

    def _begin(self, job: Job, started: _core.Request | _core.BeamSearch, port: Port) -> None:
        job.begin(started, port)
        self._running[job.index] = job
        self._cancel_if_asked(job)  # after `cancel` can see it: it is called in any thread
        self._follow(job)

    def _refuse(self, job: Job, error: Refusal) -> bool:
        """Keep the error of a job; false if the engine has no room for it, so that it is started later.

        The job holds nothing: an open beam search would delay `aclose(drain=...)`.
        """
        job.cancel()
        if isinstance(error, OverloadedError) and not isinstance(error, DeadlineError):
            self._rejected.appendleft(job)
            self._limit = max(1, len(self._running))
            return False
        self._fail(job.index, error.with_traceback(None))  # its frames have the prompt
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

    def _end(self, job: Job, requests: Sequence[_core.Request]) -> None:
        self._forget(requests)
        job.cancel()
        del self._running[job.index]

    def _succeed(self, job: Job, requests: Sequence[_core.Request]) -> None:
        """End a job that the engine had room for."""
        self._end(job, requests)
        self._limit = min(self._limit + 1, self._concurrency)

    # ---- the loop; the coroutines of a blocking batch never suspend

    async def _wait_for_item(self, port: Port) -> Item | None:
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
                    self._exhaust()
                    return
                job = self._job(prompt)
            if job is not None and not await self._start(job, port):
                return

    async def _next_prompt(self) -> BatchPrompt:
        """The next prompt; raises `StopAsyncIteration` after the last one."""
        raise NotImplementedError

    async def _start(self, job: Job, port: Port) -> bool:
        """Start a job; false if the engine has no room for it."""
        raise NotImplementedError

    async def _wait(self, port: Port) -> None:
        """Wait until an item has arrived, or until an attempt to start a job is due."""
        raise NotImplementedError


def _unequal(counts: str, params: object) -> InvalidRequestError:
    limit = "a SamplingParams, or one for each prompt"
    return InvalidRequestError(f"params has {counts}; it must be {limit}", "params", params, limit)
