"""The life of a server process: listening before the models are loaded, serving, draining."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import TYPE_CHECKING

import anyio
import uvicorn

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from types import FrameType

    from penstock.server.application import Application
    from penstock.server.state import Model

__all__ = ["Server", "run"]

logger = logging.getLogger("penstock.server")

#: Time for the last events of aborted requests, in seconds.
_LAST_EVENTS = 5
#: The number of signals that end the process at once.
_FORCE = 2


class Server(uvicorn.Server):
    """A server that drains on the first SIGTERM or SIGINT and exits on the second.

    While it drains, it listens: new requests and `/health` get status 503, unfinished ones continue until the
    deadline.
    """

    def __init__(self, config: uvicorn.Config, application: Application, drain_timeout: float) -> None:
        super().__init__(config)
        self._state = application.state
        self._drain_timeout = drain_timeout
        self._num_signals = 0
        self._deadline = 0.0

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        """Called by a signal."""
        self._num_signals += 1

    def drain(self) -> None:
        """Refuse new requests, and exit when the others have finished."""
        if not self._state.is_draining:
            self._state.is_draining = True
            self._deadline = anyio.current_time() + self._drain_timeout
            logger.info("draining: %d unfinished requests", self._state.num_active)

    async def on_tick(self, counter: int) -> bool:
        """Called several times per second; returns whether to exit."""
        if self._num_signals:
            self.drain()
        if self._state.is_draining:
            is_late = self._num_signals >= _FORCE or anyio.current_time() >= self._deadline
            if is_late and self._state.num_active:
                logger.warning("aborting %d unfinished requests", self._state.num_active)
                self._state.abort_all()
            self.should_exit = self.should_exit or is_late or not self._state.num_active
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections, with some time for the last events of aborted requests."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._abort_late_connections)
            await super().shutdown(sockets)
            group.cancel_scope.cancel()

    async def _abort_late_connections(self) -> None:
        """Close the connections of clients that do not read."""
        deadline = anyio.current_time() + _LAST_EVENTS
        while self._num_signals < _FORCE and anyio.current_time() < deadline:  # noqa: ASYNC110 - a signal counts
            await anyio.sleep(0.1)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


async def _load(models: Sequence[Model], server: Server, errors: list[Exception]) -> None:
    """Open the engines one after the other; a failure ends the server."""
    try:
        for model in models:
            await model.engine.start()
            model.progress = None
            logger.info("model %r is ready", model.name)
    except Exception as error:  # noqa: BLE001 - raised by `run`
        errors.append(error)
        server.should_exit = True
        return
    # The objects of the modules live as long as the process: the garbage collector need not visit them.
    gc.collect()
    gc.freeze()


async def _serve(application: Application, server: Server, listener: socket.socket) -> None:
    models = application.state.selected(None)
    errors: list[Exception] = []
    async with anyio.create_task_group() as group:
        group.start_soon(_load, models, server, errors)
        try:
            await server.serve([listener])
        finally:
            group.cancel_scope.cancel()
    for model in models:
        await model.engine.aclose()
    if errors:
        raise errors[0]


def run(
    application: Application, config: uvicorn.Config, listener: socket.socket, drain_timeout: float
) -> None:
    """Load the models and serve them until a signal; raises what made the loading fail."""
    server = Server(config, application, drain_timeout)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(application, server, listener))
