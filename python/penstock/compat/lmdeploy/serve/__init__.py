"""`lmdeploy.serve`: the asynchronous engine. The server is `penstock serve`, with the routes of OpenAI."""

from penstock.compat.lmdeploy.errors import not_provided

_SERVER = "`penstock serve MODEL` is the server, and penstock.server.app its ASGI application"

__getattr__ = not_provided(
    "lmdeploy.serve",
    {
        "core": "use lmdeploy.serve.async_engine",
        "gradio": "use a client of OpenAI's API",
        "openai": _SERVER,
        "proxy": _SERVER,
        "vl_async_engine": "images are not supported yet",
    },
)
