"""The open connections of a server, by client: each has a share of their number, and of TLS handshakes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Connection", "Group", "Handshakes", "OpenConnections"]

#: TLS handshakes of a client at the same time; others of it wait.
_MAX_HANDSHAKES = 32


class Connection(Protocol):
    """A counted connection: of HTTP, or during its TLS handshake."""

    group: Group | None

    @property
    def has_unsent(self) -> bool:
        """Whether a part of a response has not been sent."""

    def abort(self) -> None:
        """Close it at once."""


class Handshakes:
    """The TLS handshakes of one client: some are made at the same time, and the others wait."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_MAX_HANDSHAKES)
        self._num_waiting = 0
        #: The oldest first.
        self._running: dict[Connection, None] = {}

    @asynccontextmanager
    async def slot(self, connection: Connection) -> AsyncIterator[None]:
        """Wait until the handshake of a connection may be made."""
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        self._running[connection] = None
        try:
            yield
        finally:
            del self._running[connection]
            self._slots.release()

    def must_end(self, connection: Connection) -> bool:
        """Whether a running handshake has to end for one that waits: each ends the oldest one."""
        # A free slot belongs to a waiting handshake, whose task has not resumed yet.
        excess = self._num_waiting + len(self._running) - _MAX_HANDSHAKES
        return connection in islice(self._running, max(excess, 0))


class Group:
    """The open connections of one client."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Those with no request that is being answered, the one without activity for longest first.
        self.idle: dict[Connection, None] = {}
        self.busy: set[Connection] = set()
        self.handshakes = Handshakes()

    def __len__(self) -> int:
        return len(self.idle) + len(self.busy)

    @property
    def oldest(self) -> Connection | None:
        """The idle connection without activity for longest, of those that have sent their responses."""
        return next((found for found in self.idle if not found.has_unsent), None)

    def touch(self, connection: Connection, *, is_idle: bool) -> None:
        """Note an activity of a connection."""
        self.remove(connection)
        if is_idle:
            self.idle[connection] = None
        else:
            self.busy.add(connection)

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        self.idle.pop(connection, None)
        self.busy.discard(connection)


class OpenConnections:
    """The open connections of a server, by client."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_connections = 0
        self._groups: dict[str, Group] = {}

    def add(self, connection: Connection, name: str) -> bool:
        """Count a new connection of this client; returns whether there is room for it.

        An address has at most three quarters of the limit. At the limit, a client with at least two more
        connections loses an idle one.
        """
        group = self._groups.get(name) or Group(name)
        if name and len(group) >= max(1, self._limit * 3 // 4):
            return False
        if self._num_connections >= self._limit:
            by_size = sorted(self._groups.values(), key=len, reverse=True)
            larger = takewhile(lambda found: len(found) > len(group) + 1, by_size)
            oldest = next(filter(None, (found.oldest for found in larger)), None)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.abort()
        self._groups[name] = connection.group = group
        self._num_connections += 1
        group.touch(connection, is_idle=True)
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection, if it is counted."""
        group, connection.group = connection.group, None
        if group is None:
            return
        self._num_connections -= 1
        group.remove(connection)
        if not group:
            del self._groups[group.name]
