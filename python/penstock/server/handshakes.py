"""Connections with TLS: each counts before its handshake, and a client has few handshakes at the same time.

asyncio would tell the server about a connection when its handshake has ended. A handshake takes up to some
milliseconds of the event loop, and its buffers take a quarter of a mebibyte.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.server.addresses import network_of

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from penstock.server.open_connections import Group, Handshakes, OpenConnections

__all__ = ["TlsListener"]

logger = logging.getLogger("penstock.server")

#: Seconds after which a handshake can end for another one.
_PATIENCE = 0.5
#: Connections that are accepted in one go.
_MAX_ACCEPTED = 64
#: Seconds until the next attempt to accept connections, after an error of the system.
_RETRY_INTERVAL = 1.0


class _Handshake:
    """A connection before its protocol knows of it."""

    group: Group | None = None
    has_unsent = False

    def __init__(self, task: asyncio.Task[None] | None) -> None:
        self._task = task

    def abort(self) -> None:
        """Close it at once."""
        if self._task is not None:
            self._task.cancel()


class TlsListener:
    """Accepts connections and makes their handshakes. uvicorn closes it as a server of asyncio."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make: Callable[[], Any],
        clients: OpenConnections,
        timeout: float,
    ) -> None:
        """`make` makes the protocol of a connection; the handshake may take `timeout` seconds."""
        self._listener, self._context, self._make = listener, context, make
        self._clients, self._timeout = clients, timeout
        listener.settimeout(0)
        #: The handshakes that run.
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._listen())

    def close(self) -> None:
        """Accept no more connections, and close the listener."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Wait until no more are accepted."""
        await asyncio.wait({self._accepting})

    async def wait_for_handshakes(self) -> None:
        """Wait until all handshakes have ended."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def begin(self, connection: socket.socket) -> None:
        """Make the handshake of a connection that was accepted."""
        connection.settimeout(0)
        task = asyncio.create_task(self._answer(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        with self._listener:
            await self._accept()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
                self.begin(connection)
                for _ in range(_MAX_ACCEPTED):
                    self.begin(self._listener.accept()[0])
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:
                logger.error("no connection can be accepted: %s", error)  # noqa: TRY400 - of the system
                await asyncio.sleep(_RETRY_INTERVAL)

    async def _answer(self, connection: socket.socket) -> None:
        handshake = _Handshake(asyncio.current_task())
        is_begun = False
        try:
            address = connection.getpeername()
            name = network_of(address[0]) if isinstance(address, tuple) else ""  # of a unix socket
            if not self._clients.add(handshake, name) or handshake.group is None:
                return
            handshakes = handshake.group.handshakes
            async with asyncio.timeout(self._timeout), handshakes.slot(handshake):
                is_begun = True
                await self._make_handshake(connection, handshake, handshakes)
        except OSError:  # also those of time and of TLS
            return
        finally:
            self._clients.remove(handshake)
            if not is_begun:
                connection.close()

    async def _make_handshake(
        self, connection: socket.socket, handshake: _Handshake, handshakes: Handshakes
    ) -> None:
        """Raises `TimeoutError` if it takes long and has to end for another one of its client."""

        def make() -> Any:
            protocol = self._make()
            protocol.former = handshake
            return protocol

        connecting = asyncio.get_running_loop().connect_accepted_socket(
            make, connection, ssl=self._context, ssl_handshake_timeout=self._timeout
        )
        task = asyncio.create_task(connecting)
        try:
            while not (await asyncio.wait({task}, timeout=_PATIENCE))[0]:
                if handshakes.must_end(handshake):
                    raise TimeoutError
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
