"""The client and the deadline that a task works for, such as an API key of a server; the turns of clients."""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from typing import Generic, TypeVar

__all__ = ["TurnQueue", "client", "deadline"]

Item = TypeVar("Item")

#: Identifies the client by a number below 2^64. Clients that compete have equal shares, and take turns where
#: their requests wait for one another.
client: ContextVar[int | None] = ContextVar("penstock.client", default=None)

#: The time of `time.monotonic` by which requests must end. A request that certainly ends later is refused.
deadline: ContextVar[float | None] = ContextVar("penstock.deadline", default=None)


class TurnQueue(Generic[Item]):
    """A queue of the items of clients, which take turns. The items of a client are in order."""

    def __init__(self) -> None:
        self._items: dict[int | None, deque[Item]] = {}  # of the next client first; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def num_of(self, client: int | None) -> int:
        """The number of items of a client."""
        return len(self._items.get(client, ()))

    def push(self, client: int | None, item: Item) -> None:
        """Add an item. A client without items gets the last turn."""
        self._items.setdefault(client, deque()).append(item)

    def pop(self) -> Item:
        """Take the next item. Raises `IndexError` if there is none."""
        if not self._items:
            raise IndexError("no client has an item")
        first = next(iter(self._items))
        items = self._items.pop(first)
        item = items.popleft()
        if items:
            self._items[first] = items
        return item

    def remove(self, client: int | None, item: Item) -> None:
        """Take an item out."""
        items = self._items[client]
        items.remove(item)
        if not items:
            del self._items[client]
