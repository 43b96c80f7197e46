"""The OpenAI-compatible server, an ASGI application over the public API of `penstock`.

    async with penstock.Engine("path/to/model") as engine:
        application = penstock.server.app({"my-model": engine})

The extra `server` installs what it needs. `penstock serve MODEL` runs it with uvicorn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock._install import missing_extra
from penstock.server.settings import ServerSettings

if TYPE_CHECKING:
    from penstock.server.application import app

__all__ = ["ServerSettings", "app"]


def __getattr__(name: str) -> Any:
    """Import what needs the extra when it is used: the command line reads only the settings."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from penstock.server.application import app
    except ModuleNotFoundError as error:
        message = missing_extra("the server", error.name, "server")
        raise ModuleNotFoundError(message, name=error.name) from error
    return app
