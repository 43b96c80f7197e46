"""The OpenAI-compatible server, an ASGI application over the public API of `penstock`.

    async with penstock.Engine("path/to/model") as engine:
        application = penstock.server.app({"my-model": engine})

The extra `server` installs what it needs. `penstock serve MODEL` runs it with uvicorn.
"""

from penstock.server.application import app
from penstock.server.settings import ServerSettings

__all__ = ["ServerSettings", "app"]
