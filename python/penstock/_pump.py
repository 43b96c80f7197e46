"""Waiting for results on an event loop: one file descriptor, any number of tasks, no background task.

A `Pump` belongs to one engine on one event loop and owns that loop's `Port`, whose descriptor becomes
readable when the engine has pushed output for any request started there. One of the waiting tasks is the
*leader*: it waits for the descriptor, calls `drain()`, and wakes the tasks whose requests received output.
The others are *followers*: each waits for a future of its own. There is no background task, so an engine
needs no task group and no scope, and every exception is raised in the task that it concerns.

Why no task waits forever:

- A wake-up carries no data. `drain()` stores the output with each request, and `ready` reads that store, so a
  wake-up lost to a cancellation loses nothing.
- The bell's protocol is kept: the engine pushes, then rings; `drain()` clears the bell, then reads. If the
  leader is cancelled before its `drain()`, the descriptor stays readable for the next leader.
- *While there is a follower, there is a leader or one about to be.* Between two suspensions of tasks, either
  there is a leader, or some task has been woken and has not resumed. A leader does not suspend between giving
  up the lead and either leading again or leaving `wait`. A task that leaves `wait`, by returning, by
  cancellation or by an exception, wakes a follower if there is no leader. That follower resumes and leads,
  finds another leader, or leaves and repeats the same step. This also holds if it was cancelled in the
  meantime or had been woken for its own output: in each case it passes the same exit.
- No code here awaits between reading a field and acting on it; tasks of other event loops are rejected.

A step wakes a task for each stream, so most of the cost of a token outside the model is that of a wait.
Therefore a follower on asyncio waits for a plain future instead of an `anyio.Event`, and looks up its event
loop only if it may be another one: a future that is awaited on another loop raises an error.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import anyio
import anyio.lowlevel

from penstock._core import Port

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator

    _Future: TypeAlias = "asyncio.Future[None] | _EventFuture"

Ready = TypeVar("Ready")

_LOOP: anyio.lowlevel.RunVar[object] = anyio.lowlevel.RunVar("penstock.loop")


def _current_loop() -> object:
    """A token for the running event loop that does not keep the loop alive."""
    try:
        return _LOOP.get()
    except LookupError:
        token = object()
        _LOOP.set(token)
        return token


class _EventFuture:
    """The part of `asyncio.Future` that a pump uses, on other event loops."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def done(self) -> bool:
        return self._event.is_set()

    def set_result(self, _: None) -> None:
        self._event.set()

    def __await__(self) -> Generator[Any, None, None]:
        return self._event.wait().__await__()


class Watch:
    """The key of a task that waits for any of its requests: those that `drain` has named since it looked."""

    def __init__(self) -> None:
        self.reached: set[int] = set()


class Pump:
    """The port of one engine on one event loop, and the tasks that wait for it."""

    def __init__(self) -> None:
        self.port = Port()
        self._descriptor: int = self.port.fileno()
        self._loop = _current_loop()
        native: Any = anyio.lowlevel.current_token().native_token
        # Weak, because the event loop's variables refer to the pump.
        self._asyncio: weakref.ref[asyncio.AbstractEventLoop] | None = (
            weakref.ref(native) if hasattr(native, "create_future") else None
        )
        self._has_leader = False
        #: The requests that are not waited for by id.
        self.watches: dict[int, Watch] = {}
        self._followers: dict[int | Watch, list[_Future]] = {}

    async def wait(self, key: int | Watch, ready: Callable[[], Ready | None]) -> Ready:
        """Wait until `ready()` returns a true value, and return that. It had none when the caller looked.

        It reads the state of a request, or of those of a watch; `drain()` updates it.
        """
        # Runs once per token and stream, and so does `_wake`: no layers, few calls.
        loop = self._asyncio and self._asyncio()
        if not (self._has_leader and loop):
            self._check_loop(key)
        try:
            while True:
                if self._has_leader:
                    future = loop.create_future() if loop else _EventFuture()
                    followers = self._followers.get(key)
                    if followers is None:
                        self._followers[key] = [future]
                    else:
                        followers.append(future)
                    try:
                        await future
                    except BaseException as error:
                        self._forget(key, future)
                        if isinstance(error, (RuntimeError, TypeError)):  # a future of another event loop
                            self._check_loop(key)
                        raise
                else:
                    await self._lead()
                found = ready()
                if found:
                    return found
        finally:
            if not self._has_leader and self._followers:
                self._wake(next(iter(self._followers)))

    def _check_loop(self, key: int | Watch) -> None:
        if _current_loop() is not self._loop:
            what = "the batch" if isinstance(key, Watch) else f"request {key}"
            message = f"{what} was started on another event loop; read it on that loop"
            raise RuntimeError(message)

    async def _lead(self) -> None:
        self._has_leader = True
        try:
            await anyio.wait_readable(self._descriptor)
        finally:
            self._has_leader = False
        for request_id in self.port.drain():
            if request_id in self._followers:
                self._wake(request_id)
            elif (watch := self.watches.get(request_id)) is not None:
                watch.reached.add(request_id)
                self._wake(watch)

    def _wake(self, key: int | Watch) -> None:
        """Wake the followers of a key, which are followers no longer."""
        for future in self._followers.pop(key, ()):
            if not future.done():
                future.set_result(None)

    def _forget(self, key: int | Watch, future: _Future) -> None:
        """Remove a follower that was cancelled or has failed, if it was not woken before."""
        followers = self._followers.get(key, [])
        if future in followers:
            followers.remove(future)
            if not followers:
                del self._followers[key]
