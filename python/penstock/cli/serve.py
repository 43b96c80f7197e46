"""`penstock serve`: the OpenAI-compatible server."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import penstock
from penstock._install import missing_extra
from penstock._options import EngineOptions
from penstock.cli.download import confirm_download, is_at_terminal, yes_option
from penstock.cli.engine import served_name
from penstock.cli.kv_events import kv_event_settings, kv_events_config
from penstock.cli.lora import adapter_settings, lora_modules
from penstock.cli.options import Command, engine_options_with, given, lines_of, log_options, server_options
from penstock.server.settings import ServerSettings, check_keys
from penstock.server.tracing import endpoint_of_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.cli.lora import LoraModule

__all__ = ["serve"]

#: The beginning of a value of `--lora-modules`.
_MODULE = re.compile(r"\s*\{|[^-/=][^/=]*=")
_File = click.Path(exists=True, dir_okay=False)

#: Options of the engine that have another default here.
_ENGINE_DEFAULTS = {"max_waiting": 1024}


def tls_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of TLS, which are the fields of `Tls`."""
    options = {
        "certfile": "Certificate, as PEM: serve HTTPS.",
        "keyfile": "Its private key. Default: in the file of the certificate.",
        "keyfile-password-file": "File with the password of the private key.",
        "ca-certs": "Certificates that sign those of clients.",
    }
    choices = click.Choice(["none", "optional", "required"])
    text = "Whether clients need a certificate."
    function = click.option("--tls-client-certs", default="none", type=choices, help=text)(function)
    for name, text in reversed(options.items()):
        function = click.option(f"--tls-{name}", type=_File, help=text)(function)
    return function


class _ServeCommand(Command):
    """Takes several values of `--lora-modules` in a row, as vLLM does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with the option before each of the values."""
        found: list[str] = []
        for arg in args:
            follows = found[-2:-1] == ["--lora-modules"] and _MODULE.match(arg)
            found += ["--lora-modules", arg] if follows else [arg]
        return super().parse_args(ctx, found)


@click.command("serve", cls=_ServeCommand)
@click.argument("model", required=False)
@click.option(
    "--model", "named", multiple=True, metavar="NAME=MODEL", help="A model and its name; repeatable."
)
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    help="Name of MODEL; repeatable. Default: MODEL, of a path its last part.",
)
@click.option(
    "--enable-lora",
    is_flag=True,
    help="Take LoRA adapters: max_adapters is 8 unless it is given. --lora-modules implies this.",
)
@lora_modules(
    "LoRA adapter to load before the model is ready, also as a JSON object with name, path and "
    "base_model_name; repeatable."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on."
)
@click.option("--uds", type=click.Path(), help="Unix socket to listen on, in place of an address.")
@tls_options
@click.option(
    "--drain-timeout",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0, 86400),
    help="Seconds for unfinished requests after SIGTERM.",
)
@click.option("--api-key-file", type=_File, help="File of keys, one per line.")
@click.option("--admin-api-key-file", type=_File, help="File of administrators' keys.")
@log_options
@click.option(
    "--access-log/--no-access-log",
    default=True,
    show_default=True,
    help="Log each HTTP request when it ends.",
)
@yes_option
@kv_events_config
@server_options
@engine_options_with(_ENGINE_DEFAULTS)
def serve(
    model: str | None,
    named: Sequence[str],
    names: Sequence[str],
    modules: Sequence[LoraModule],
    **options: Any,
) -> None:
    """Serve MODEL with OpenAI's API.

    The server listens before the model is loaded; /health reports the progress. SIGTERM or Ctrl-C lets
    unfinished requests finish; a second one exits at once. PENSTOCK_API_KEY is a key that requests need.

    Several models: --model NAME=MODEL, repeated. Engine options apply to each.
    """
    paths: dict[str, str] = {}
    for item in named:
        name, equals, path = item.partition("=")
        if not (name and equals and path):
            raise click.UsageError(f"--model {item!r}: NAME=MODEL is expected.")
        if name in paths:
            raise click.UsageError(f"--model {item!r}: another model has this name.")
        paths[name] = path
    aliases = {}
    if model is not None:
        first, *others = names or [served_name(model)]
        for name in (first, *others):
            if name in paths:
                raise click.UsageError(
                    f"{name!r} is the name of another model; --served-model-name sets one."
                )
        paths[first] = model
        aliases = dict.fromkeys(others, first)
    if not paths or (model is None and names):
        raise click.UsageError("Missing argument 'MODEL'.")
    adapters = _modules_of(modules, paths, aliases)
    keys = _keys_of(options, "api_key")
    if (key := os.environ.get("PENSTOCK_API_KEY")) is not None:
        check_keys("PENSTOCK_API_KEY", [key])
        keys.append(key)
    admin_keys = _keys_of(options, "admin_api_key")
    chosen = {field.name: options[field.name] for field in fields(ServerSettings) if field.name in options}
    folders = [str(Path(module.path).expanduser().absolute()) for module in modules]
    chosen["lora_roots"] = (*chosen["lora_roots"], *folders)
    chosen["otlp_traces_endpoint"] = options["otlp_traces_endpoint"] or endpoint_of_environment()
    settings = ServerSettings(
        api_keys=tuple(keys),
        admin_api_keys=tuple(admin_keys),
        **{name: value for name, value in chosen.items() if value is not None},
    )
    engine_settings: dict[str, Any] = {**_ENGINE_DEFAULTS, **given(EngineOptions, options)}
    if modules or options["enable_lora"]:
        engine_settings = adapter_settings(engine_settings, len(modules))

    engine_settings = kv_event_settings(engine_settings, options["kv_events_config"])
    if "kv_events" in engine_settings and len(paths) > 1:
        raise click.UsageError(
            "--kv-events has the events of one model; serve each model by a server of its own."
        )

    def maker(path: str) -> Callable[[Callable[[int, int], object]], penstock.Engine]:
        return lambda progress: penstock.Engine(path, progress=progress, **engine_settings)

    try:
        from penstock.server.listener import Address, Tls
        from penstock.server.logs import configure_logging
        from penstock.server.serve import ModelSource
        from penstock.server.serve import serve as run
    except ModuleNotFoundError as error:
        raise click.ClickException(missing_extra("the server", error.name, "server")) from error
    tls = {field.name: options.pop(f"tls_{field.name}") for field in fields(Tls)}
    if tls["certfile"] is None and any(value not in (None, "none") for value in tls.values()):
        raise click.UsageError("TLS needs --tls-certfile.")
    if is_at_terminal():  # elsewhere the server listens first
        paths = {name: confirm_download(path, options) for name, path in paths.items()}
    configure_logging(options["log_level"], options["log_format"], has_access=options["access_log"])
    run(
        {name: ModelSource(maker(path), adapters[name]) for name, path in paths.items()},
        aliases,
        settings,
        Address(options["host"], options["port"], options["uds"]),
        tls=None if tls["certfile"] is None else Tls(**tls),
        drain_timeout=options["drain_timeout"],
    )


def _keys_of(options: dict[str, Any], name: str) -> list[str]:
    """The keys of an option, and of the option for a file of them."""
    keys, file = options.pop(f"{name}s"), options[f"{name}_file"]
    check_keys(f"--{name.replace('_', '-')}", keys)
    lines = lines_of(file)
    check_keys(str(file), lines)
    return [*keys, *lines]


def _modules_of(
    modules: Sequence[LoraModule], models: Mapping[str, str], aliases: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """The paths of the adapters of each model by name. A single model gets all of them."""
    found: dict[str, dict[str, str]] = {name: {} for name in models}
    names = {*models, *aliases}
    for module in modules:
        if module.name in names:
            raise click.UsageError(
                f"--lora-modules: {module.name!r} is the name of another model or adapter."
            )
        names.add(module.name)
        base = next(iter(models)) if len(models) == 1 else aliases.get(module.base or "", module.base)
        if base not in found:
            message = f"--lora-modules {module.name!r}: base_model_name must be one of {', '.join(models)}."
            raise click.UsageError(message)
        found[base][module.name] = module.path
    return found
