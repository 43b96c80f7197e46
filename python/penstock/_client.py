"""The client that a task works for, such as an API key of a server, and the turns of clients."""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from typing import Generic, TypeVar

__all__ = ["TurnQueue", "client"]

Item = TypeVar("Item")

#: Identifies the client by a number below 2^64. Clients that compete have equal shares, and take turns where
#: their requests wait for one another.
client: ContextVar[int | None] = ContextVar("penstock.client", default=None)


class TurnQueue(Generic[Item]):
    """A queue of the items of clients, which take turns. The items of a client are in order."""

    def __init__(self) -> None:
        self._items: dict[int | None, deque[Item]] = {}  # of the next client first; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def num_of(self, client: int | None) -> int:
        """The number of items of a client."""
        self._last: int | None = -1  # the client served last, which is at the end; -1 before the first
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
        return item

    def remove(self, client: int | None, item: Item) -> None:
        """Take an item out."""
        items = self._items[client]
        items.remove(item)
        self._last = first
        if not items:
            del self._items[client]
