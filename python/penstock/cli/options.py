"""The options of the command line, made from the typed keywords of engines and requests."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import click

import penstock
from penstock._keywords import synonym
from penstock._options import ENGINE_GROUPS, SAMPLING_GROUPS, EngineOptions, SamplingOptions
from penstock.cli.output import message_of
from penstock.server.settings import ServerSettings

if TYPE_CHECKING:
    Function = Callable[..., None]
    Decorator = Callable[[Function], Function]

__all__ = [
    "Command",
    "api_key",
    "convert_options",
    "engine_options",
    "engine_options_with",
    "given",
    "json_option",
    "key_options",
    "lines_of",
    "log_options",
    "sampling_options_with",
    "server_options",
    "settings_options",
]

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Size(click.ParamType):  # type: ignore[type-arg] # not generic in older versions
    """A number of bytes: `1G`, `512M`, `1.5GiB`, `1000000`. The units are powers of 1024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        number = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", str(value), flags=re.IGNORECASE)
        if number is None:
            self.fail(f"{value!r}: a number of bytes is expected, such as 1G, 512M or 1000000", param, ctx)
        return int(Fraction(number[1]) * UNITS[number[2].upper()])


class Integers(click.ParamType):  # type: ignore[type-arg] # not generic in older versions
    """Integers with commas between them."""

    name = "integers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The integers."""
        return tuple(click.INT(item, param, ctx) for item in str(value).split(","))


class Numbers(click.ParamType):  # type: ignore[type-arg] # not generic in older versions
    """Numbers with commas between them; `inf` is one."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """The numbers."""
        return tuple(click.FLOAT(item, param, ctx) for item in str(value).split(","))


class JsonObject(click.ParamType):  # type: ignore[type-arg] # not generic in older versions
    """A JSON object, such as `{"max_position_embeddings": 8192}`."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """The object."""
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            self.fail(f"{value!r}: a JSON object is expected", param, ctx)
        return parsed


class Name(click.Choice):  # type: ignore[type-arg] # not generic in older versions
    """One of several names. The engine checks it, because its error knows more; this is for completion."""

    def convert(self, value: Any, _param: click.Parameter | None, _ctx: click.Context | None) -> Any:
        """The value as it is."""
        return value


class NameOrJson(Name):
    """One of several names, or a JSON object."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value as it is, or the object."""
        return TextOrJson().convert(value, param, ctx)


class TextOrJson(click.ParamType):  # type: ignore[type-arg] # not generic in older versions
    """A text, or a JSON object."""

    name = "text or json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text as it is, or the object."""
        is_object = isinstance(value, str) and value.lstrip().startswith("{")
        return JsonObject().convert(value, param, ctx) if is_object else value


class Option(click.Option):
    """An option that belongs to a group."""

    def __init__(self, *arguments: Any, group: str, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.group = group


#: Examples of options that take a JSON object beside their names.
_OBJECTS = {"quantization": '{"type": "int4", "group_size": 128}'}
#: Options of llama.cpp that are no keywords of another engine.
_OTHER_OPTIONS = {"-c": "max_model_len", "-n": "max_tokens", "-ngl": "device", "-t": "threads"}


class _InvalidUsage(click.ClickException):
    exit_code = 2


class Command(click.Command):
    """A command with the options in groups in its help. Names the right option for one of another engine.

    An error of the package is one line, which names the options of the command.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except penstock.PenstockError as error:
            failure = _InvalidUsage if isinstance(error, ValueError) else click.ClickException
            raise failure(message_of(error)) from error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            written = next((arg for arg in given if arg.startswith(error.option_name)), error.option_name)
            name = written.partition("=")[0]
            meant = _OTHER_OPTIONS.get(name) or synonym(name.removeprefix("--").replace("-", "_"))
            if all(param.name != meant for param in self.get_params(ctx)):
                raise
            flag = (meant or "").replace("_", "-")
            message = f"No such option {name!r}. Did you mean '--{flag}'?"
            raise click.NoSuchOption(name, message, ctx=ctx) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command's own options, then each group."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "group", "Options"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


#: The names that vLLM has for options of the engine.
_ALIASES = {
    "max_adapters": "--max-loras",
    "max_adapter_rank": "--max-lora-rank",
    "max_cpu_adapters": "--max-cpu-loras",
}

_LISTS: dict[Any, click.ParamType] = {Sequence[int]: Integers(), Sequence[float]: Numbers()}  # type: ignore[type-arg]


def _joined(_ctx: click.Context, _param: click.Parameter, given: Any) -> tuple[float, ...]:
    return tuple(chain.from_iterable(given))


def _option(name: str, hint: Any, group: str) -> Decorator:
    kind, help_text = get_args(hint)
    flag = name.replace("_", "-")
    *kinds, _none = get_args(kind)
    literal = next((item for item in kinds if get_origin(item) is Literal), None)
    keywords: dict[str, Any] = {"cls": Option, "group": group, "help": help_text}
    if bool in kinds:
        return click.option(f"--{flag}/--no-{flag}", name, default=None, **keywords)
    if (numbers := next((_LISTS[kind] for kind in kinds if kind in _LISTS), None)) is not None:
        keywords["help"] += " Repeat the option or separate values with commas."
        return click.option(f"--{flag}", name, type=numbers, multiple=True, callback=_joined, **keywords)
    if Sequence[str] in kinds:
        keywords["help"] += " Can be given several times."
        return click.option(f"--{flag}", name, type=str, multiple=True, **keywords)
    takes_mapping = any(get_origin(kind) is Mapping for kind in kinds)
    if literal is not None:
        if name in _OBJECTS:
            text, default, rest = keywords["help"].partition(" Default: ")
            keywords["help"] = f"{text} Also a JSON object, such as {_OBJECTS[name]}.{default}{rest}"
        names = NameOrJson if takes_mapping else Name
        return click.option(f"--{flag}", name, type=names(get_args(literal)), **keywords)
    if takes_mapping:
        kind = TextOrJson() if str in kinds else JsonObject()
        return click.option(f"--{flag}", name, type=kind, **keywords)
    if name.endswith("_bytes"):
        keywords["help"] += " Units: K, M, G, T."
        return click.option(f"--{flag}", name, type=Size(), **keywords)
    plain = next((kind for kind in (int, float) if kind in kinds), str)
    flags = [f"--{flag}", _ALIASES[name]] if name in _ALIASES else [f"--{flag}"]
    return click.option(*flags, name, type=plain, **keywords)


def _options_of(fields: type, groups: Mapping[str, Sequence[str]]) -> Decorator:
    hints = get_type_hints(fields, include_extras=True)
    return _all(_option(name, hints[name], title) for title, names in groups.items() for name in names)


def _all(options: Iterable[Decorator]) -> Decorator:
    """A decorator that adds the options in their order."""
    in_reverse = list(options)[::-1]

    def decorate(function: Function) -> Function:
        for option in in_reverse:
            function = option(function)
        return function

    return decorate


engine_options = _options_of(EngineOptions, ENGINE_GROUPS)


def _options_with(
    fields: type, groups: Mapping[str, Sequence[str]], defaults: Mapping[str, object]
) -> Decorator:
    """The options of the fields with other defaults in their help texts."""
    hints = get_type_hints(fields, include_extras=True)

    def option(name: str, group: str) -> Decorator:
        hint = hints[name]
        if name in defaults:
            kind, text = get_args(hint)
            hint = Annotated[kind, f"{text.partition(' Default: ')[0]} Default: {defaults[name]}."]
        return _option(name, hint, group)

    return _all(option(name, group) for group, names in groups.items() for name in names)


def engine_options_with(defaults: Mapping[str, object]) -> Decorator:
    """The options of the engine with other defaults in their help texts."""
    return _options_with(EngineOptions, ENGINE_GROUPS, defaults)


def sampling_options_with(defaults: Mapping[str, object]) -> Decorator:
    """The options of a request with other defaults in their help texts."""
    return _options_with(SamplingOptions, SAMPLING_GROUPS, defaults)


convert_options = _options_of(EngineOptions, {"Options": ("quantization", "dtype", "threads")})


def _settings_option(field: Field[Any], hint: Any, group: str) -> Decorator:
    """The option of a field of a dataclass, with the default in its help text."""
    kind, help_text = get_args(hint)
    if get_origin(kind) is tuple:
        flag = field.name.removesuffix("s").replace("_", "-")
        return click.option(f"--{flag}", field.name, multiple=True, cls=Option, group=group, help=help_text)
    default: Any = field.default
    if default is not None:
        kind = kind | None
        if not isinstance(default, bool) and default != ():
            help_text += f" Default: {_shown(field.name, default)}."
    return _option(field.name, Annotated[kind, help_text], group)


def _shown(name: str, default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, str):
        return default
    if name.endswith("_bytes"):
        unit, size = [(unit, size) for unit, size in UNITS.items() if default % size == 0][-1]
        return f"{default // size}{unit}"
    return str(default) if isinstance(default, int) else f"{default:g}"


def settings_options(settings: type, groups: Mapping[str, Sequence[str]]) -> Decorator:
    """The options of the fields of a dataclass that have a help text, in groups."""
    hints = get_type_hints(settings, include_extras=True)
    named = {field.name: field for field in fields(settings)}
    return _all(
        _settings_option(named[name], hints[name], title) for title, names in groups.items() for name in names
    )


server_options = settings_options(
    ServerSettings, {"Server": [field.name for field in fields(ServerSettings)]}
)


def key_options(group: str) -> Decorator:
    """The options of `api_key`, for commands that are clients of a server."""
    named: dict[str, Any] = {"cls": Option, "group": group}
    about = "API key of the server, which other users of the machine can see."
    about_file = "File of the API key. Default: the environment variable PENSTOCK_API_KEY."
    path = click.Path(exists=True, dir_okay=False)
    return _all(
        [
            click.option("--api-key", help=about, **named),
            click.option("--api-key-file", type=path, help=about_file, **named),
        ]
    )


def api_key(key: str | None, file: str | None) -> str | None:
    """The API key of these options, or of the environment."""
    if key and file is not None:
        raise click.UsageError("--api-key excludes --api-key-file.")
    if file is not None:
        key = Path(file).read_text(encoding="utf-8", errors="replace").strip()
        if not key:
            raise click.UsageError(f"{file} has no key.")
    key = key or os.environ.get("PENSTOCK_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise click.UsageError("The API key has other characters than printable ASCII ones.")
    return key


log_options = _all(
    [
        click.option(
            "--log-level",
            default="info",
            show_default=True,
            type=click.Choice(["debug", "info", "warning", "error"]),
            help="Least level of log records.",
        ),
        click.option(
            "--log-format",
            default="text",
            show_default=True,
            type=click.Choice(["text", "json"]),
            help="Form of log records.",
        ),
    ]
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")


def given(fields: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fields of the class and were set."""
    return {name: options[name] for name in fields.__annotations__ if options.get(name) not in (None, ())}


def lines_of(file: str | None) -> list[str]:
    """The keys in a file: its lines that are not blank."""
    if file is None:
        return []
    lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    keys = [line for line in lines if line]
    if not keys:
        raise click.UsageError(f"{file} has no key.")
    return keys
