"""Slow work of an event loop in worker threads: a bounded number of them, whatever becomes of the tasks.

A cancelled task does not wait for its thread, which notices the cancellation at its next check or runs to
the end. The thread's slot stays taken until then, so clients that give up and try again cannot pile up
threads.

AnyIO's limiters do not do that: they free a thread's slot when its task is cancelled. And its default limiter
belongs to the application, whose threads may all wait for this work.
"""

from __future__ import annotations

import math
import os
import threading
from typing import TYPE_CHECKING, Literal, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from penstock._core import Port

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_THREADS", "run_in_thread", "run_slow"]

Returned = TypeVar("Returned")

#: Number of worker threads of an event loop, as in the standard library's thread pools.
MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)


class AbandonedError(BaseException):
    """Ends the work of a thread whose task was cancelled; never reaches a caller."""


class Workers:
    """The slots of one event loop. Tasks take them in order; any thread can free one."""

    def __init__(self, num_threads: int) -> None:
        self._lock = threading.Lock()  # of `_num_free`
        self._num_free = num_threads
        self._port = Port()  # rung when a slot is freed
        self._first = anyio.Lock()  # held by the first of the tasks that wait

    async def run(self, function: Callable[[Callable[[], None]], Returned]) -> Returned:
        """Call `function` in a worker thread, with a callable that raises once the task is cancelled."""
        await self._acquire()
        is_abandoned = False
        started = threading.Lock()  # taken by the thread, or by the task if the thread never starts

        def check_cancelled() -> None:
            if is_abandoned:
                raise AbandonedError

        def work() -> Returned:
            if not started.acquire(blocking=False):
                raise AbandonedError
            try:
                return function(check_cancelled)
            finally:
                self._release()

        try:
            return await run_in_thread(work)
        finally:
            is_abandoned = True
            if started.acquire(blocking=False):
                self._release()

    async def _acquire(self) -> None:
        async with self._first:
            while not self._take_slot():
                await anyio.wait_readable(self._port.fileno())
                self._port.drain()

    def _take_slot(self) -> bool:
        with self._lock:
            if self._num_free == 0:
                return False
            self._num_free -= 1
            return True

    def _release(self) -> None:
        with self._lock:
            self._num_free += 1
        self._port.ring()


_workers: RunVar[Workers] = RunVar("penstock.workers")
#: The thread of work that holds the interpreter for long: several would leave the event loop little of it.
_python_worker: RunVar[Workers] = RunVar("penstock.python_worker")
#: The threads that load adapters, which takes longer than the work for a request.
_loaders: RunVar[Workers] = RunVar("penstock.loaders")
#: Kinds of work: the variable of its threads, and their number.
_KINDS = {"short": (_workers, MAX_THREADS), "python": (_python_worker, 1), "load": (_loaders, 2)}


async def run_slow(
    function: Callable[[Callable[[], None]], Returned],
    *,
    kind: Literal["short", "python", "load"] = "short",
) -> Returned:
    """Call `function` in a worker thread of the running event loop, as soon as one is free.

    A cancellation abandons the thread: the callable that `function` is given raises from then on. Work that
    holds the interpreter for long is of the kind `python`; one of these functions runs at a time.
    """
    variable, num_threads = _KINDS[kind]
    try:
        workers = variable.get()
    except LookupError:
        workers = Workers(num_threads)
        variable.set(workers)
    return await workers.run(function)


async def run_in_thread(function: Callable[[], Returned], *, abandon_on_cancel: bool = True) -> Returned:
    """Call `function` in a worker thread, regardless of any limiter."""
    return await anyio.to_thread.run_sync(
        function, abandon_on_cancel=abandon_on_cancel, limiter=anyio.CapacityLimiter(math.inf)
    )
