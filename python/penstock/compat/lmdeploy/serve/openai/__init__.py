"""`lmdeploy.serve.openai`: the client. The server is `penstock serve`, with the routes of OpenAI."""

from penstock.compat.lmdeploy.errors import not_provided

__getattr__ = not_provided(
    "lmdeploy.serve.openai",
    {"api_server": "use `penstock serve MODEL`"},
)
