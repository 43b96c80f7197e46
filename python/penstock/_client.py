"""The client and the deadline of a task, such as an API key of a server; the turns and bounds of clients."""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from typing import Generic, TypeVar

import anyio

__all__ = ["MAX_WAITING", "MAX_WAITING_OF_CLIENT", "TurnLimiter", "TurnQueue", "client", "deadline"]

Item = TypeVar("Item")

#: Identifies the client by a number below 2^64. Clients that compete have equal shares, and take turns where
#: their requests wait for one another.
client: ContextVar[int | None] = ContextVar("penstock.client", default=None)

#: The time of `time.monotonic` by which requests must end. A request that cannot end by then is refused.
deadline: ContextVar[float | None] = ContextVar("penstock.deadline", default=None)

#: Number of tasks or threads that may wait for the same resource, and the share of one client.
MAX_WAITING = 64
MAX_WAITING_OF_CLIENT = 16


class TurnQueue(Generic[Item]):
    """A queue of the items of clients, which take turns. The items of a client are in order."""

    def __init__(self) -> None:
        self._items: dict[int | None, deque[Item]] = {}  # of the next client first; none is empty
        self._last: int | None = -1  # the client served last, which is at the end; -1 before the first

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def num_of(self, client: int | None) -> int:
        """The number of items of a client."""
        return len(self._items.get(client, ()))

    def push(self, client: int | None, item: Item) -> None:
        """Add an item. A client without items comes before the one served last, and after all others."""
        if client in self._items:
            self._items[client].append(item)
            return
        served = self._items.pop(self._last, None)
        self._items[client] = deque([item])
        if served is not None:
            self._items[self._last] = served

    def pop(self) -> Item:
        """Take the next item. Raises `IndexError` if there is none."""
        if not self._items:
            raise IndexError("no client has an item")
        first = next(iter(self._items))
        items = self._items.pop(first)
        item = items.popleft()
        if items:
            self._items[first] = items
        self._last = first
        return item

    def remove(self, client: int | None, item: Item) -> None:
        """Take an item out."""
        items = self._items[client]
        items.remove(item)
        if not items:
            del self._items[client]


class TurnLimiter:
    """Slots for tasks. Clients that wait for one take turns; the tasks of a client are in order."""

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots  #: 0 while tasks wait.
        self._waiting = TurnQueue[anyio.Event]()

    @property
    def num_waiting(self) -> int:
        """The number of tasks that wait."""
        return len(self._waiting)

    @property
    def num_waiting_of_client(self) -> int:
        """The number of tasks that wait and work for the client of the running one."""
        return self._waiting.num_of(client.get())

    async def __aenter__(self) -> None:
        turn, mine = anyio.Event(), client.get()
        self._waiting.push(mine, turn)
        if self.num_free:
            self.num_free -= 1
            self._waiting.pop()  # it was a turn of the client
            return
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._release()
            else:
                self._waiting.remove(mine, turn)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        if self._waiting:
            self._waiting.pop().set()
        else:
            self.num_free += 1
