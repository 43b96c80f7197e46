"""The scheduler of a batch: it knows which prompts run, which were refused, and which items are kept.

Nothing here waits. The reader (`batch.py`) starts jobs while `has_room`, returns `next_item`, and if there is
none waits until `collect` is true. An engine without room lowers `limit` to the number of running jobs: no
other is started before one has succeeded. If none runs, the reader raises the limit to 1 after a pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Iterable, Mapping, Sized
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock import _core, _keywords
from penstock._checks import invalid
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
    from typing import Self, TypeAlias

    from penstock._core import Port, Result, SamplingParams
    from penstock._options import BatchPrompt
    from penstock._session import PreparedPrompt, Session

    #: The errors that a job can end with; none of them ends the batch.
    Failure: TypeAlias = InvalidRequestError | GenerationError | OutOfMemoryError | DeadlineError

#: This many times `concurrency` items are kept while an earlier one is missing, or is not read.
_WINDOW = 4
#: The errors of a job: those of `Failure`, and an `OverloadedError`, after which it is started again.
REFUSALS = (InvalidRequestError, GenerationError, OutOfMemoryError, OverloadedError)
#: Comes after the last prompt, and after the last parameters.
END: Any = object()

Item = TypeVar("Item")


class Job:
    """A job is one unfinished prompt: a request, or a beam search with the requests of its current step."""

    def __init__(self, index: int, prompt: PreparedPrompt, params: SamplingParams) -> None:
        self.index = index
        self.prompt = prompt
        self.params = params
        self.num_unfinished = params.n  # choices of which the last chunk was not taken
        self.requests: Sequence[_core.Request] = ()
        self.is_cancelled = False  # by `Jobs.cancel`
        self._search: _core.BeamSearch | None = None

    def begin(self, started: _core.Request | _core.BeamSearch, port: Port) -> None:
        if isinstance(started, _core.BeamSearch):
            self._search = started
            self.requests = started.start_step(port)
        else:
            self.requests = (started,)

    def poll(self, port: Port) -> Result | None:
        """Return the result if there is one, or start the next step; raises the error of a failed request."""
        if not all(request.has_ended() for request in self.requests):
            return None
        results = [result_of(request) for request in self.requests]
        if self._search is None:
            return results[0] if self.is_cancelled else _core.best_of(results[0], self.params)
        if self.is_cancelled:
            message = "the beam search was cancelled"
            raise GenerationError(message)
        self._search.advance(results)
        if not self._search.is_running:
            return self._search.result()
        self.requests = self._search.start_step(port)
        return None

    def cancel(self) -> None:
        for request in self.requests:
            request.cancel()
        self.requests = ()
        if self._search is not None:
            self._search.close()
            self._search = None


class Jobs(Generic[Item]):
    """`Jobs` begins and ends the jobs of a batch; a subclass makes items of their output."""

    port: Port  # set by the reader, as `watches`

    def __init__(
        self,
        session: Session,
        prompts: Iterable[BatchPrompt] | AsyncIterable[BatchPrompt] | None,
        params: SamplingParams | Iterable[SamplingParams] | None,
        options: Mapping[str, Any],
        *,
        concurrency: int | None,
        ordered: bool = False,
    ) -> None:
        if "messages" in options:
            raise _keywords.unknown("SamplingParams", "messages")
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, (Iterable, AsyncIterable)):
            raise invalid("prompts", prompts, "an iterable of prompts")
        self.prompts = prompts
        self._options = dict(options)
        self._shared: SamplingParams | None = None
        self._params: Iterator[SamplingParams]
        if isinstance(params, Iterable) and not isinstance(params, (str, bytes, Mapping)):
            if isinstance(params, Sized) and isinstance(prompts, Sized) and len(params) != len(prompts):
                raise _unequal(f"{len(params)} parameters for {len(prompts)} prompts", params)
            self._params, width = iter(params), 1
        else:
            given: Any = params
            changes, self._options = self._options, Chat.take_options(self._options)
            self._shared = shared = merge(_core.SamplingParams, given, changes)
            self._check_params(shared)
            self._params, width = repeat(shared), max(shared.n, shared.best_of or 1, shared.num_beams)
        info = session.check_open().info
        if concurrency is None:
            most = info.max_num_seqs + (info.max_waiting or info.max_num_seqs)
            concurrency = min(-(-(info.max_num_seqs * 5 // 4 + 1) // width) + 1, most)
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise invalid("concurrency", concurrency, "an integer of at least 1")
        self._session = session
        self._concurrency = self.limit = concurrency
        self._ordered = ordered
        self._num_taken = self._num_returned = 0
        self._is_exhausted = self._is_read = False
        self._cancelled: set[int | None] = set()  # indices; `None` for all prompts
        self._rejected: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        self._by_id: dict[int, Job] = {}  # the running ones, by the ids of their requests
        self._kept: dict[int, Item] = {}  # by index, in the order in which they came
        self.watch = Watch()
        self.watches: dict[int, Watch] = {}

    def __enter__(self) -> Self:
        """Begin to read. There is one reader at a time; an exception in it ends the batch."""
        if self._is_read:
            message = "the batch is already being read; only one reader at a time is allowed"
            raise RuntimeError(message)
        self._is_read = True
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.close()
        self._is_read = False

    # ---- the items

    def _check_params(self, params: SamplingParams) -> None:
        """Raise `InvalidRequestError` for parameters that no prompt can have."""

    def _failure(self, index: int, error: Failure) -> Item:
        raise NotImplementedError

    def collect(self) -> bool:
        """Look at the output that has arrived; true if there is a reason to stop waiting."""
        raise NotImplementedError

    def next_item(self) -> Item | None:
        """Return the next item, or `None` if it has not arrived."""
        index = self._num_returned if self._ordered else next(iter(self._kept), -1)
        item = self._kept.pop(index, None)
        self._num_returned += item is not None
        return item

    def is_over(self) -> bool:
        return self._is_exhausted and not (self.running or self._rejected or self._kept)

    # ---- the jobs

    def has_room(self) -> bool:
        """Whether the reader shall start another job."""
        num_running = len(self.running)
        num_unreturned = num_running + len(self._kept)
        is_below = num_running < self.limit and num_unreturned < _WINDOW * self._concurrency
        return is_below and bool(self._rejected or not self._is_exhausted)

    def rejected_job(self) -> Job | None:
        """Return a job that the engine had no room for, if there is one."""
        return self._rejected.popleft() if self._rejected else None

    def next_job(self, prompt: BatchPrompt) -> Job | None:
        """Make the job of the next prompt; there is none if the prompt is not valid, or is `END`."""
        index, params = self._num_taken, next(self._params, END)
        if prompt is END:
            self._is_exhausted = True
            if self._shared is None and params is not END:
                raise _unequal(f"at least {index + 1} parameters for {index} prompts", None)
            return None
        if params is END:
            raise _unequal(f"{index} parameters for at least {index + 1} prompts", None)
        self._num_taken += 1
        try:
            job = Job(index, *self._session.prepare(prompt, params, dict(self._options)))
            self._check_params(job.params)
        except InvalidRequestError as error:
            self._kept[index] = self._failure(index, error.with_traceback(None))  # its frames have the prompt
            return None
        return job

    def submit(self, job: Job) -> Callable[..., _core.Request | _core.BeamSearch]:
        """Return the call that starts a job in any thread; it is slow if `should_offload`."""
        if job.params.num_beams > 1:
            return partial(self._session.search_beams, job.prompt, job.params)
        return partial(self._session.submit, job.prompt, _core.candidate_params(job.params), self.port)

    def begin(self, job: Job, started: _core.Request | _core.BeamSearch) -> None:
        """Count a job as running, and follow its requests."""
        job.begin(started, self.port)
        self.running[job.index] = job
        self._cancel_if_asked(job)  # after `cancel` can see it: it is called in any thread
        self._follow(job)

    def refuse(self, job: Job, error: Failure | OverloadedError) -> None:
        """End a job that failed; one that the engine has no room for is started again later.

        The job holds nothing: an open beam search would delay `aclose(drain=...)`.
        """
        self._end(job)
        if isinstance(error, OverloadedError) and not isinstance(error, DeadlineError):
            self._rejected.appendleft(job)
            self.limit = len(self.running)
        else:
            self._kept[job.index] = self._failure(job.index, error.with_traceback(None))

    def cancel(self, index: int | None) -> None:
        self._cancelled.add(index)
        if index is None:
            self._is_exhausted = True
        for job in list(self.running.values()):
            self._cancel_if_asked(job)

    def close(self) -> None:
        """Cancel what runs; there is no other item."""
        self._is_exhausted = True
        for job in list(self.running.values()):
            self._end(job)
        self._rejected.clear()
        self._kept.clear()

    def _cancel_if_asked(self, job: Job) -> None:
        if job.index in self._cancelled or None in self._cancelled:
            job.is_cancelled = True
            for request in job.requests:
                request.cancel()

    def _follow(self, job: Job) -> None:
        """Look at the job once, and whenever a drain names one of its requests."""
        for request in job.requests:
            self._by_id[request.id] = job
            self.watches[request.id] = self.watch
            self.watch.reached.add(request.id)

    def _forget(self, requests: Sequence[_core.Request]) -> None:
        for request in requests:
            self._by_id.pop(request.id, None)
            self.watches.pop(request.id, None)

    def _end(self, job: Job) -> None:
        self._forget(job.requests)
        job.cancel()
        self.running.pop(job.index, None)

    def _succeed(self, job: Job) -> None:
        """End a job that the engine had room for."""
        self._end(job)
        self.limit = min(self.limit + 1, self._concurrency)


def _unequal(counts: str, params: object) -> InvalidRequestError:
    limit = "a SamplingParams, or one for each prompt"
    return InvalidRequestError(f"params has {counts}; it must be {limit}", "params", params, limit)
