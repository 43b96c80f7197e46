"""`serve`: the runtime with uvicorn, for `penstock runtime`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvicorn

from penstock.runtime.application import app
from penstock.server.connection import limited_protocol
from penstock.server.listener import Address, listening
from penstock.server.settings import ServerSettings

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from penstock.runtime.settings import RuntimeSettings
    from penstock.runtime.state import State

__all__ = ["serve", "server"]

logger = logging.getLogger("penstock.runtime")

#: Seconds for unfinished requests after SIGTERM.
_DRAIN_TIMEOUT = 10
_MAX_CONNECTIONS = 256


class _Server(uvicorn.Server):
    """A server that exits with status 0 after a signal; the base class raises the signal again."""

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config)
        self._state = state

    async def on_tick(self, counter: int) -> bool:
        """Whether to exit: also when the application cannot work any more."""
        return await super().on_tick(counter) or self.has_failed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the operations, and then the connections, on which their requests are answered."""
        self._state.stop()
        await super().shutdown(sockets)

    @property
    def has_failed(self) -> bool:
        """Whether an error has ended the application."""
        return self._state.has_failed

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        """Stop listening and finish the requests; exit at once after the second signal."""
        self.force_exit = self.should_exit
        self.should_exit = True


def server(settings: RuntimeSettings) -> _Server:
    """A server of the runtime."""
    limits = ServerSettings(max_connections=_MAX_CONNECTIONS, receive_timeout=settings.receive_timeout)
    application = app(settings)
    config = uvicorn.Config(
        application,
        http=limited_protocol(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # clients of this machine are trusted
        timeout_graceful_shutdown=_DRAIN_TIMEOUT,
        h11_max_incomplete_event_size=2 * limits.max_header_bytes,
    )
    return _Server(config, application.state)


def serve(settings: RuntimeSettings, address: Address) -> None:
    """Serve until a signal. An error of the application ends the process with status 1."""
    found = server(settings)
    with listening(address) as listener:
        host = f"[{address.host}]" if ":" in address.host else address.host
        engine = urlsplit(settings.engine_endpoint)  # without a user and a password
        origin = f"{engine.scheme}://{engine.netloc.rpartition('@')[2]}"
        logger.info("listening on http://%s:%d", host, listener.getsockname()[1])
        logger.info("the engine is %s at %s", settings.engine, origin)
        found.run([listener])
    if found.has_failed:
        raise SystemExit(1)
