"""Slow work of an event loop in worker threads: a bounded number of them, whatever becomes of the tasks.

A cancelled task does not wait for its thread, which notices the cancellation at its next check or runs to
the end. The thread's slot stays taken until then, so clients that give up and try again cannot pile up
threads. Work that waits for other threads or processes, such as those that compile grammars, leaves its slot;
the number of threads that wait has a limit of its own.

AnyIO's limiters do not do that: they free a thread's slot when its task is cancelled. And its default limiter
belongs to the application, whose threads may all wait for this work.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Literal, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from penstock._client import MAX_WAITING, MAX_WAITING_OF_CLIENT, TurnLimiter, client
from penstock._core import Port
from penstock.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_THREADS", "SlowCall", "run_in_thread", "run_slow"]

Returned = TypeVar("Returned")

#: Number of worker threads of an event loop, as in the standard library's thread pools.
MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)


class AbandonedError(BaseException):
    """Ends the work of a thread whose task was cancelled; never reaches a caller."""


class SlowCall:
    """A call in a worker thread, which raises when it is called once its task is cancelled."""

    def __init__(self, workers: Workers) -> None:
        self.client = client.get()
        self._workers = workers
        self._is_abandoned = False
        self._is_waiting = False
        self._started = threading.Lock()  # taken by the thread, or by the task if the thread never starts

    def __call__(self) -> None:
        if self._is_abandoned:
            raise AbandonedError

    def begin_wait(self) -> None:
        """Leave the slot. Called in the thread, before it waits for other threads or processes.

        If too many wait, a client is refused. The application itself, which is no client, keeps the slot: its
        further calls wait for one.
        """
        self()
        if not self._is_waiting:
            self._is_waiting = self._workers.leave(self.client)
            if not self._is_waiting and self.client is not None:
                raise OverloadedError(
                    "too many requests wait for long texts, grammars or chat templates; try again later"
                )

    def run(self, function: Callable[[SlowCall], Returned]) -> Returned:
        """Call `function` in the thread."""
        if not self._started.acquire(blocking=False):
            raise AbandonedError
        try:
            return function(self)
        finally:
            self._workers.end(self.client, is_waiting=self._is_waiting)

    def abandon(self) -> None:
        """The task has its result, or does not wait for it."""
        self._is_abandoned = True
        if self._started.acquire(blocking=False):
            self._workers.end(self.client, is_waiting=False)


class Workers:
    """The slots of one event loop. Clients that wait for one take turns; any thread can free one."""

    def __init__(self, num_threads: int) -> None:
        self._lock = threading.Lock()  # of the numbers
        self._num_free = num_threads
        self._num_waiting = Counter[int | None]()  # by client
        self._port = Port()  # rung when a slot is freed
        self._first = TurnLimiter(1)  # held by the first of the tasks that wait

    async def run(self, function: Callable[[SlowCall], Returned]) -> Returned:
        """Call `function` in a worker thread, as soon as there is a slot."""
        await self._acquire()
        call = SlowCall(self)
        try:
            return await run_in_thread(lambda: call.run(function))
        finally:
            call.abandon()

    def leave(self, client: int | None) -> bool:
        """Free the slot of a thread that waits for other threads; returns whether one more can wait."""
        with self._lock:
            is_full = self._num_waiting.total() >= MAX_WAITING
            if is_full or self._num_waiting[client] >= MAX_WAITING_OF_CLIENT:
                return False
            self._num_waiting[client] += 1
            self._num_free += 1
        self._port.ring()
        return True

    def end(self, client: int | None, *, is_waiting: bool) -> None:
        """Free the slot, or the place among those that wait, of a thread that has ended."""
        with self._lock:
            if is_waiting:
                self._num_waiting[client] -= 1
                if not self._num_waiting[client]:
                    del self._num_waiting[client]
            else:
                self._num_free += 1
        self._port.ring()

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


_workers: RunVar[Workers] = RunVar("penstock.workers")
#: The thread of work that holds the interpreter for long: several would leave the event loop little of it.
_python_worker: RunVar[Workers] = RunVar("penstock.python_worker")
#: The threads that load adapters, which takes longer than the work for a request.
_loaders: RunVar[Workers] = RunVar("penstock.loaders")
#: Kinds of work: the variable of its threads, and their number.
_KINDS = {"short": (_workers, MAX_THREADS), "python": (_python_worker, 1), "load": (_loaders, 2)}


async def run_slow(
    function: Callable[[SlowCall], Returned],
    *,
    kind: Literal["short", "python", "load"] = "short",
) -> Returned:
    """Call `function` in a worker thread of the running event loop, as soon as one is free.

    A cancellation abandons the thread: the `SlowCall` that `function` is given raises from then on. Work that
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
