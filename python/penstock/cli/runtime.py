"""`penstock runtime`: the AIBrix AI Engine Runtime."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import click

from penstock._install import missing_extra
from penstock.cli.options import Command, lines_of, log_options, settings_options
from penstock.runtime.settings import RuntimeSettings, settings_of_environment

__all__ = ["aibrix_runtime", "runtime"]

#: Of the extra `runtime`; some are imported after the start.
_LIBRARIES = ("aiohttp", "msgspec", "prometheus_client", "starlette", "urllib3", "uvicorn")

#: The parameter of glibc's `mallopt` for the maximum number of arenas.
_M_ARENA_MAX = -8

_File = click.Path(exists=True, dir_okay=False)
_Port = click.IntRange(0, 65535)

_HELP = """Run the AIBrix AI Engine Runtime beside an engine.

The engine is Penstock, vLLM, SGLang, TensorRT-LLM or any other server. Options override the environment
variables of AIBrix's runtime. PENSTOCK_RUNTIME_TOKEN is a token, PENSTOCK_ENGINE_KEY the engine's key.
"""

_runtime_options = settings_options(
    RuntimeSettings, {"Runtime": [field.name for field in fields(RuntimeSettings)]}
)


def _command(name: str, host: str) -> click.Command:
    """The command with the address at which it listens by default."""

    @click.command(name, cls=Command, help=_HELP)
    @click.option("--host", default=host, show_default=True, help="Address to listen on.")
    @click.option("--port", default=8080, show_default=True, type=_Port, help="Port to listen on.")
    @click.option("--token-file", type=_File, help="File of tokens, one per line.")
    @click.option("--engine-key-file", type=_File, help="File of the engine's key.")
    @log_options
    @_runtime_options
    def command(host: str, port: int, **options: Any) -> None:
        _run(host, port, options)

    return command


def _share_arena() -> None:
    """Let the threads of this process allocate from one arena: each further one takes 2 MiB."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc has it
        library.mallopt(_M_ARENA_MAX, 1)


def _run(host: str, port: int, options: dict[str, Any]) -> None:
    if sys.platform != "linux":
        raise click.ClickException(f"the runtime needs Linux; this system is {sys.platform}")
    _share_arena()
    tokens = [*options["tokens"], *lines_of(options["token_file"])]
    if "PENSTOCK_RUNTIME_TOKEN" in os.environ:
        tokens.append(os.environ["PENSTOCK_RUNTIME_TOKEN"])
    keys = [
        options["engine_key"],
        *lines_of(options["engine_key_file"]),
        os.environ.get("PENSTOCK_ENGINE_KEY"),
    ]
    options = {**options, "tokens": tuple(tokens), "engine_key": next(filter(None, keys), None)}
    chosen = {field.name: options[field.name] for field in fields(RuntimeSettings)}
    given = {name: value for name, value in chosen.items() if value not in (None, ())}
    settings = RuntimeSettings(**{**settings_of_environment(), **given})
    for name in _LIBRARIES:
        if find_spec(name) is None:
            raise click.ClickException(missing_extra("the runtime", name, "runtime"))
    from penstock.runtime.downloader import InvalidArgumentError, Options
    from penstock.runtime.serve import serve
    from penstock.server.listener import Address
    from penstock.server.logs import configure_logging

    try:
        for scheme in ("huggingface", "s3", "tos"):
            Options.load(f"{scheme}://")
    except InvalidArgumentError as error:  # a variable of the environment, which no client can change
        raise click.UsageError(str(error)) from None
    configure_logging(options["log_level"], options["log_format"], has_access=True)
    serve(settings, Address(host, port))


runtime = _command("runtime", "127.0.0.1")
#: AIBrix's name of the command, with its default address.
aibrix_runtime = _command("aibrix_runtime", "0.0.0.0")  # noqa: S104 - reading is open, changes are not
