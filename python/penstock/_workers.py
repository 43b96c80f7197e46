"""Slow work of an event loop in worker threads: a bounded number of them, whatever becomes of the tasks.

A cancelled task does not wait for its thread, which notices the cancellation at its next check or runs to
the end. The thread's slot stays taken until then, so clients that give up and try again cannot pile up
threads. Work that waits for other threads or processes, such as those that compile grammars, leaves its slot;
the number of threads that wait has a limit of its own. Long texts wait for a slot and for a share of the
characters that are tokenised at the same time.

AnyIO's limiters do not do that: they free a thread's slot when its task is cancelled. And its default limiter
belongs to the application, whose threads may all wait for this work.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import anyio
from anyio.lowlevel import RunVar

from penstock._client import MAX_WAITING, MAX_WAITING_OF_CLIENT, TurnLimiter, client
from penstock._core import Port
from penstock._threads import run_in_thread
from penstock.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LONG_TEXT_CHARS", "MAX_THREADS", "Kind", "SlowCall", "run_slow"]

Returned = TypeVar("Returned")
Kind: TypeAlias = Literal["short", "python", "load"]

#: Number of worker threads of an event loop, as in the standard library's thread pools.
MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)
#: The kinds of work, with the number of their threads. `python` is work that holds the interpreter for long:
#: several threads would leave the event loop little of it. `load` is that of adapters, which takes longest.
NUM_THREADS: dict[Kind, int] = {"short": MAX_THREADS, "python": 1, "load": 2}
#: Length of the long texts that are tokenised at the same time, each character of which takes up to 1.4 KB of
#: memory (340 bytes for each of its bytes).
MAX_TEXT_CHARS = 2 << 20
#: Length of a text that waits for no other: those of all threads together take less memory than long ones.
LONG_TEXT_CHARS = 64 << 10


class AbandonedError(BaseException):
    """Ends the work of a thread whose task was cancelled; never reaches a caller."""


class Units:
    """Units, such as slots. Clients that wait for some take turns. Any thread can release them."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._num_free = total
        self._lock = threading.Lock()  # of the number
        self._port = Port()  # rung when units are released
        self._first = TurnLimiter(1)  # held by the first of the tasks that wait

    async def take(self, number: int = 1) -> int:
        """Take units, as soon as they are free; returns their number. More than all are all."""
        number = min(number, self._total)
        async with self._first:
            while not self._try_take(number):
                await anyio.wait_readable(self._port.fileno())
                self._port.drain()
        return number

    def release(self, number: int = 1) -> None:
        """Let others take units."""
        with self._lock:
            self._num_free += number
        self._port.ring()

    def _try_take(self, number: int) -> bool:
        with self._lock:
            if self._num_free < number:
                return False
            self._num_free -= number
            return True


class Waiting:
    """The threads of an event loop that wait for other threads or processes. Their number is limited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = Counter[int | None]()  # by client

    def begin(self, client: int | None) -> bool:
        """Count a thread, if one more can wait."""
        with self._lock:
            is_full = self._numbers.total() >= MAX_WAITING
            if is_full or self._numbers[client] >= MAX_WAITING_OF_CLIENT:
                return False
            self._numbers[client] += 1
        return True

    def end(self, client: int | None) -> None:
        """The opposite of `begin`."""
        with self._lock:
            self._numbers[client] -= 1
            if not self._numbers[client]:
                del self._numbers[client]


class SlowCall:
    """A call in a worker thread, which raises when it is called once its task is cancelled."""

    def __init__(self, workers: Workers, slots: Units, num_chars: int) -> None:
        self.client = client.get()
        self._workers = workers
        self._slots = slots
        self._num_chars = num_chars
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
        if self._is_waiting:
            return
        if self._workers.waiting.begin(self.client):
            self._is_waiting = True
            self._slots.release()
        elif self.client is not None:
            raise OverloadedError("too many requests wait for grammars or chat templates; try again later")

    def run(self, function: Callable[[SlowCall], Returned]) -> Returned:
        """Call `function` in the thread."""
        if not self._started.acquire(blocking=False):
            raise AbandonedError
        try:
            return function(self)
        finally:
            self._end()

    def abandon(self) -> None:
        """The task has its result, or does not wait for it."""
        self._is_abandoned = True
        if self._started.acquire(blocking=False):
            self._end()

    def _end(self) -> None:
        self._workers.text_chars.release(self._num_chars)
        if self._is_waiting:
            self._workers.waiting.end(self.client)
        else:
            self._slots.release()


class Workers:
    """The worker threads of one event loop."""

    def __init__(self) -> None:
        #: The slots of the kinds of work.
        self.slots: dict[Kind, Units] = {kind: Units(number) for kind, number in NUM_THREADS.items()}
        self.text_chars = Units(MAX_TEXT_CHARS)
        self.waiting = Waiting()


_workers: RunVar[Workers] = RunVar("penstock.workers")


async def run_slow(
    function: Callable[[SlowCall], Returned], *, kind: Kind = "short", num_chars: int = 0
) -> Returned:
    """Call `function` in a worker thread of the running event loop, as soon as one is free.

    A cancellation abandons the thread: the `SlowCall` that `function` is given raises from then on. Work that
    holds the interpreter for long is of the kind `python`; one of these functions runs at a time. `num_chars`
    is the length of the text that is tokenised.
    """
    try:
        workers = _workers.get()
    except LookupError:
        workers = Workers()
        _workers.set(workers)
    slots = workers.slots[kind]
    # First the text, for which only others with long texts wait.
    num_chars = await workers.text_chars.take(num_chars) if num_chars > LONG_TEXT_CHARS else 0
    try:
        await slots.take()
    except BaseException:
        workers.text_chars.release(num_chars)
        raise
    call = SlowCall(workers, slots, num_chars)
    try:
        return await run_in_thread(lambda: call.run(function))
    finally:
        call.abandon()
