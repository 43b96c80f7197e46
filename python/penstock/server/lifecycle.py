"""The life of a server process: listening before the models are loaded, serving, draining."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import socket
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import uvicorn

import penstock
from penstock._system import AF_UNIX, readable
from penstock.server.handshakes import TlsListener

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence
    from types import FrameType

    from penstock.server.application import Application
    from penstock.server.batch.batches import Batches
    from penstock.server.models import Model

__all__ = ["Server", "run"]

logger = logging.getLogger("penstock.server")

#: Time for the last events of aborted requests, in seconds.
_LAST_EVENTS = 5
#: Time for the request of a connection that had none, when the server stops listening.
_FIRST_REQUEST = 2
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
#: A packet filter that takes nothing: the classic BPF instruction "return 0".
_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
#: The number of signals that end the process at once.
_FORCE = 2


class Server(uvicorn.Server):
    """A server that drains on the first SIGTERM or SIGINT and exits on the second.

    While it drains, it listens: new requests and `/health` get status 503, unfinished ones continue until the
    deadline. Then it stops listening, and answers the requests of all connections that the system has
    accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        application: Application,
        context: ssl.SSLContext | None,
        drain_timeout: float,
    ) -> None:
        super().__init__(config)
        self._state = application.state
        self._drain_timeout = drain_timeout
        self._context = context
        self._tls: TlsListener | None = None
        self._num_signals = 0
        self._deadline = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. The base class has no limits of TLS handshakes."""
        assert sockets is not None  # noqa: S101 - for the type
        listener = sockets[0]
        self._listener = listener.dup()
        self._listener.settimeout(0)
        if self._context is None:
            loop = asyncio.get_running_loop()
            create: Any = loop.create_unix_server if listener.family == AF_UNIX else loop.create_server
            self.servers = [await create(self._protocol, sock=listener, backlog=self.config.backlog)]
        else:
            protocol: Any = self.config.http_protocol_class
            timeout = self._state.settings.receive_timeout
            self._tls = TlsListener(listener, self._context, self._protocol, protocol.clients, timeout)
            servers: list[Any] = [self._tls]
            self.servers = servers
        self.started = True

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(self.config, self.server_state, self.lifespan.state)
        return protocol

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        """Called by a signal."""
        self._num_signals += 1

    def drain(self) -> None:
        """Refuse new requests, and exit when the others have finished."""
        if not self._state.calls.is_draining:
            self._state.calls.is_draining = True
            self._deadline = anyio.current_time() + self._drain_timeout
            logger.info("draining: %d unfinished requests", self._state.calls.num_active)

    async def on_tick(self, counter: int) -> bool:
        """Called several times per second; returns whether to exit."""
        if self._num_signals:
            self.drain()
        if self._state.calls.is_draining:
            is_late = self._num_signals >= _FORCE or anyio.current_time() >= self._deadline
            if is_late and self._state.calls.num_active:
                logger.warning("aborting %d unfinished requests", self._state.calls.num_active)
                self._state.calls.abort_all()
            self.should_exit = self.should_exit or is_late or not self._state.calls.num_active
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening and close all connections, with some time for requests and events under way."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._abort_late_connections)
            await self._stop_listening()
            await self._close_idle_connections()
            await super().shutdown(sockets)
            group.cancel_scope.cancel()

    async def _stop_listening(self) -> None:
        """Close the listener. Connections that the system has accepted become those of the server.

        The system would reset them. On Linux, a filter makes it accept no more before.
        """
        for server in self.servers:
            server.close()
        program = ctypes.create_string_buffer(_NOTHING)
        accepted = []
        with self._listener:
            if sys.platform == "linux":
                option = struct.pack("HL", 1, ctypes.addressof(program))
                with suppress(OSError):  # a sandbox can forbid it
                    self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
            with suppress(OSError):  # there is no further connection
                while True:
                    accepted.append(self._listener.accept()[0])
        with anyio.move_on_after(_FIRST_REQUEST):
            async with anyio.create_task_group() as group:
                for connection in accepted:
                    group.start_soon(self._adopt, connection)
            if self._tls is not None:
                await self._tls.wait_for_handshakes()

    async def _adopt(self, connection: socket.socket) -> None:
        if sys.platform == "linux":
            with suppress(OSError):  # it has no filter, unless the system accepted it meanwhile
                connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        if self._tls is not None:
            self._tls.begin(connection)
            return
        connection.settimeout(0)
        with suppress(OSError):  # it is lost
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)

    async def _close_idle_connections(self) -> None:
        """Close each connection when it has no request, and no unread bytes of a request."""
        connections: Any = self.server_state.connections
        deadline = anyio.current_time() + _FIRST_REQUEST
        while connections and anyio.current_time() < deadline:
            by_descriptor = {found.fileno(): found for found in connections if found.is_idle}
            for descriptor in by_descriptor.keys() - readable(by_descriptor):
                by_descriptor[descriptor].shutdown()
            await anyio.sleep(0.02)

    async def _abort_late_connections(self) -> None:
        """Close the connections of clients that do not read."""
        deadline = max(self._deadline, anyio.current_time()) + _LAST_EVENTS
        while self._num_signals < _FORCE and anyio.current_time() < deadline:  # noqa: ASYNC110 - a signal counts
            await anyio.sleep(0.1)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


async def _load(models: Sequence[Model], server: Server, errors: list[Exception]) -> None:
    """Open the engines one after the other; a failure ends the server."""
    try:
        for model in models:
            await model.engine.start()
            for name, path in model.modules.items():
                await model.load_adapter(name, path, root=path)
            model.progress = None
            logger.info("model %r is ready", model.name)
    except Exception as error:  # noqa: BLE001 - raised by `run`
        errors.append(error)
        server.should_exit = True
        return
    # The objects of the modules live as long as the process: the garbage collector need not visit them.
    gc.collect()
    gc.freeze()


async def _run_batches(batches: Batches, server: Server, errors: list[Exception]) -> None:
    """Run the batches; a folder that cannot be used ends the server."""
    try:
        await batches.run()
    except penstock.ConfigError as error:
        errors.append(error)
        server.should_exit = True


async def _serve(application: Application, server: Server, listener: socket.socket) -> None:
    models = application.state.models.selected(None)
    errors: list[Exception] = []
    with server.capture_signals():  # also while the engines close
        async with anyio.create_task_group() as group:
            group.start_soon(_load, models, server, errors)
            if application.state.batches is not None:
                group.start_soon(_run_batches, application.state.batches, server, errors)
            try:
                await server.serve([listener])
            finally:
                group.cancel_scope.cancel()
        for model in models:
            await model.engine.aclose()
    if errors:
        raise errors[0]


def run(
    application: Application,
    config: uvicorn.Config,
    listener: socket.socket,
    context: ssl.SSLContext | None,
    drain_timeout: float,
) -> None:
    """Load the models and serve them until a signal; raises what made the loading fail."""
    server = Server(config, application, context, drain_timeout)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(application, server, listener))
    if application.tracer is not None:
        application.tracer.close()
