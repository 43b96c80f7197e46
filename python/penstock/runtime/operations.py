"""Operations for which several requests wait.

Equal requests share one operation. It ends when no request waits for it any more, so a client that repeats a
request after its own timeout adds no work.
"""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from penstock.runtime.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Hashable

    from anyio.abc import TaskGroup

__all__ = ["Operations"]

Returned = TypeVar("Returned")


class _Operation:
    def __init__(self) -> None:
        self.num_waiting = 0
        self.scope = anyio.CancelScope()
        #: The result or the error; empty if it was cancelled.
        self.outcome: list[Any] = []
        self.has_ended = anyio.Event()


class Operations:
    """Runs the operations on named things, one per name at a time; `limit` is that of requests per name."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: Runs the operations while the application runs.
        self.group: TaskGroup | None = None
        self._running: dict[tuple[Hashable, Hashable], _Operation] = {}
        self._num_requests: Counter[Hashable] = Counter()
        self._locks: dict[Hashable, anyio.Lock] = {}
        #: Operations that hold a lock or wait for it.
        self._users: Counter[Hashable] = Counter()

    def num_requests(self, name: Hashable) -> int:
        """Requests that wait for an operation on this name."""
        return self._num_requests[name]

    async def join(
        self, name: Hashable, key: Hashable, run: Callable[[], Awaitable[Returned]], *, ends: bool = True
    ) -> Returned:
        """The result of `run`, or that of an operation with the same key which runs or waits.

        With `ends`, the operation is cancelled when no request waits for it.
        """
        if self._num_requests[name] >= self._limit:
            message = f"too many requests of this kind at the same time: the limit is {self._limit}"
            raise ApiError(503, "OverloadedError", message)
        operation = self._running.get((name, key)) or self._start(name, key, run)
        operation.num_waiting += 1
        self._num_requests[name] += 1
        try:
            await operation.has_ended.wait()
        finally:
            self._num_requests[name] -= 1
            if not self._num_requests[name]:
                del self._num_requests[name]
            operation.num_waiting -= 1
            if ends and not operation.num_waiting:
                operation.scope.cancel()
                self._forget(name, key, operation)  # a later request does not join what is being cancelled
        if not operation.outcome:
            raise _stopping()
        if isinstance(operation.outcome[0], Exception):
            raise operation.outcome[0]
        result: Returned = operation.outcome[0]
        return result

    def cancel(self, name: Hashable, error: Exception) -> None:
        """Cancel the operations on a name. Their requests get the error, and later ones do not join them."""
        for key, operation in list(self._running.items()):
            if key[0] == name:
                operation.outcome.append(error)
                operation.scope.cancel()
                self._forget(*key, operation)

    def stop(self) -> None:
        """Cancel all operations, and start none until there is another group. Their requests get an error."""
        self.group = None
        for operation in self._running.values():
            operation.scope.cancel()

    def _start(self, name: Hashable, key: Hashable, run: Callable[[], Awaitable[Any]]) -> _Operation:
        if self.group is None:
            raise _stopping()
        operation = self._running[name, key] = _Operation()
        self.group.start_soon(self._run, name, key, operation, run)
        return operation

    async def _run(
        self, name: Hashable, key: Hashable, operation: _Operation, run: Callable[[], Awaitable[Any]]
    ) -> None:
        try:
            with operation.scope:
                async with self._alone(name):
                    operation.outcome.append(await run())
        except Exception as error:  # noqa: BLE001 - the requests raise it
            operation.outcome.append(error)
        finally:
            self._forget(name, key, operation)
            operation.has_ended.set()

    def _forget(self, name: Hashable, key: Hashable, operation: _Operation) -> None:
        if self._running.get((name, key)) is operation:
            del self._running[name, key]

    @asynccontextmanager
    async def _alone(self, name: Hashable) -> AsyncIterator[None]:
        """Wait for the other operations on this name, also for those that are being cancelled."""
        lock = self._locks.setdefault(name, anyio.Lock())
        self._users[name] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._locks[name]


def _stopping() -> ApiError:
    return ApiError(503, "UnavailableError", "the runtime is stopping")
