"""`serve`: the server with uvicorn, for `penstock serve`."""

from __future__ import annotations

import logging
import resource
import socket
from typing import TYPE_CHECKING

import uvicorn

from penstock.server.application import app
from penstock.server.connection import limited_protocol
from penstock.server.lifecycle import run
from penstock.server.state import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import penstock
    from penstock.server.settings import ServerSettings

__all__ = ["serve"]

logger = logging.getLogger("penstock.server")

_BACKLOG = 2048


def serve(
    models: Mapping[str, Callable[[Progress], penstock.Engine]],
    aliases: Mapping[str, str],
    settings: ServerSettings,
    *,
    host: str,
    port: int,
    drain_timeout: float,
) -> None:
    """Load models and serve them until a signal.

    `models` has a function for each name that makes its engine; `aliases` are further names of these.
    """
    progress = {name: Progress() for name in models}
    engines = {name: make(progress[name]) for name, make in models.items()}
    engines |= {alias: engines[name] for alias, name in aliases.items()}
    application = app(engines, settings)
    application.state.hosts.add(host)
    for name, shown in progress.items():
        application.state.models[name].progress = shown
    config = uvicorn.Config(
        application,
        http=limited_protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
    )
    config.load()
    _raise_descriptor_limit()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listener:
        shown_host = f"[{host}]" if ":" in host else host
        logger.info("listening on http://%s:%d", shown_host, listener.getsockname()[1])
        run(application, config, listener, drain_timeout)


def _raise_descriptor_limit() -> None:
    """Allow as many descriptors as the system lets this process have: one for each connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
