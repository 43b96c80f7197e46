"""Waiting for results on an event loop: one file descriptor, any number of tasks, no task of our own.

A `Pump` belongs to one engine on one event loop and owns that loop's `Port`, whose descriptor becomes
readable when the engine has pushed something for any request started there. Of the tasks that wait, one
*leads*: it alone waits for the descriptor, calls `drain()`, and wakes those whose requests got what they wait
for. The others *follow*: each waits for an event of its own. There is no background task, so an engine needs
no task group and no scope, and every exception surfaces in the task it concerns.

Why nobody sleeps for ever:

- Data is never carried by a wake-up. `drain()` stores what arrived with each request, and `is_ready` looks
  there first, so a wake-up lost to a cancellation loses nothing.
- The order of the bell is kept: the engine pushes and then rings, `drain()` silences the bell and then looks.
  A leader cancelled before its `drain()` leaves the descriptor readable for the next one.
- *While somebody follows, somebody leads or is about to.* Between two suspensions of tasks, either there is a
  leader, or the event of some follower is set. A leader that stops leading does not suspend before it leads
  again or leaves `wait`; whoever leaves `wait`, satisfied, cancelled or raising, sets the event of a follower
  if nobody leads. That follower resumes: it leads, or finds that somebody does, or leaves in its turn and
  passes the duty on. It does not matter if it was cancelled meanwhile, or had been woken for its own news:
  both ways it passes through the same exit.
- Nothing here awaits between reading a field and acting on it, and other loops are turned away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from penstock._core import Port

if TYPE_CHECKING:
    from collections.abc import Callable


_LOOP: anyio.lowlevel.RunVar[object] = anyio.lowlevel.RunVar("penstock.loop")


def _current_loop() -> object:
    """Stands for the running event loop without keeping it alive."""
    try:
        return _LOOP.get()
    except LookupError:
        mark = object()
        _LOOP.set(mark)
        return mark


class Pump:
    """The waiting room of one engine on one event loop."""

    def __init__(self) -> None:
        self.port = Port()
        self._descriptor: int = self.port.fileno()
        self._loop = _current_loop()
        self._has_leader = False
        self._followers: dict[int, set[anyio.Event]] = {}

    async def wait(self, request_id: int, is_ready: Callable[[], bool]) -> None:
        """Returns when `is_ready()`, a question of that request which `drain()` knows about, is true."""
        if _current_loop() is not self._loop:
            message = f"request {request_id} was started on another event loop; read it there"
            raise RuntimeError(message)
        try:
            while not is_ready():
                if self._has_leader:
                    await self._follow(request_id)
                else:
                    await self._lead()
        finally:
            if not self._has_leader:
                self._promote()

    async def _lead(self) -> None:
        self._has_leader = True
        try:
            await anyio.wait_readable(self._descriptor)
        finally:
            self._has_leader = False
        for request_id in self.port.drain():
            for event in self._followers.get(request_id, ()):
                event.set()

    async def _follow(self, request_id: int) -> None:
        event = anyio.Event()
        followers = self._followers.setdefault(request_id, set())
        followers.add(event)
        try:
            await event.wait()
        finally:
            followers.remove(event)
            if not followers:
                del self._followers[request_id]

    def _promote(self) -> None:
        for followers in self._followers.values():
            for event in followers:
                event.set()
                return
