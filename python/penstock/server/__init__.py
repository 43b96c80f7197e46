"""The OpenAI-compatible server, an ASGI application over the public API of `penstock`.

    async with penstock.Engine("path/to/model") as engine:
        application = penstock.server.app({"my-model": engine})

The extra `server` installs what it needs. `penstock serve MODEL` runs it with uvicorn. `EngineCollector` has
the metrics of engines for an application with a registry of its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock._install import missing_extra
from penstock.server.settings import ServerSettings

if TYPE_CHECKING:
    from penstock.server.application import app
    from penstock.server.engine_metrics import EngineCollector

__all__ = ["EngineCollector", "ServerSettings", "app"]

_MODULES = {"EngineCollector": "engine_metrics", "app": "application"}


def __getattr__(name: str) -> Any:
    """Import what needs the extra when it is used: the command line reads only the settings."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        message = missing_extra("the server", error.name, "server")
        raise ModuleNotFoundError(message, name=error.name) from error
