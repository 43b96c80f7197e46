"""`lmdeploy.serve`: the asynchronous engine, and a client of OpenAI's routes, which `penstock serve` has."""

from penstock.compat.lmdeploy.errors import not_provided

_SERVER = "`penstock serve MODEL` is the server, and penstock.server.app its ASGI application"

__getattr__ = not_provided(
    "lmdeploy.serve",
    {
        "core": "use lmdeploy.serve.async_engine",
        "gradio": "use a client of OpenAI's API",
        "proxy": _SERVER,
        "vl_async_engine": "images are not supported yet",
    },
)
