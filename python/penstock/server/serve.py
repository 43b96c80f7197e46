"""`serve`: the server with uvicorn, for `penstock serve`."""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import uvicorn

from penstock._system import raise_descriptor_limit
from penstock.server.application import app
from penstock.server.connection import limited_protocol
from penstock.server.lifecycle import run
from penstock.server.listener import Address, Tls, listening, tls_context
from penstock.server.models import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import penstock
    from penstock.server.settings import ServerSettings

__all__ = ["ModelSource", "serve"]

logger = logging.getLogger("penstock.server")


class ModelSource(NamedTuple):
    """The function that makes the engine of a model, and the paths of its adapters by name."""

    make: Callable[[Progress], penstock.Engine]
    modules: Mapping[str, str] = MappingProxyType({})


def serve(
    models: Mapping[str, ModelSource],
    aliases: Mapping[str, str],
    settings: ServerSettings,
    address: Address,
    *,
    tls: Tls | None,
    drain_timeout: float,
) -> None:
    """Load models and serve them until a signal.

    `aliases` are further names of `models`.
    """
    context = None if tls is None else tls_context(tls)
    progress = {name: Progress() for name in models}
    engines = {name: source.make(progress[name]) for name, source in models.items()}
    engines |= {alias: engines[name] for alias, name in aliases.items()}
    application = app(engines, settings)
    application.state.hosts.add(address.host)
    for name, shown in progress.items():
        model = application.state.models[name]
        model.progress, model.modules = shown, models[name].modules
    config = uvicorn.Config(
        application,
        http=limited_protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=settings.forwarded_allow_ips is not None,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        # `connection.py` has the bound of a head; that of the parser must not be smaller.
        h11_max_incomplete_event_size=2 * settings.max_header_bytes,
    )
    config.load()
    raise_descriptor_limit()  # one for each connection
    with listening(address) as listener:
        if address.uds is not None:
            url = f"unix:{address.uds}"
        else:
            host = f"[{address.host}]" if ":" in address.host else address.host
            url = f"{'http' if tls is None else 'https'}://{host}:{listener.getsockname()[1]}"
        logger.info("listening on %s", url)
        run(application, config, listener, context, drain_timeout)
