"""The options of LoRA adapters that are loaded with a model, under the names of vLLM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Function = TypeVar("Function", bound="Callable[..., None]")
__all__ = ["LoraModule", "adapter_settings", "lora_modules"]

#: Adapters on the device by default.
_MAX_ADAPTERS = 8


class LoraModule(NamedTuple):
    """An adapter: its name, its path, and the model that gets it if there are several."""

    name: str
    path: str
    base: str | None = None


class _Module(click.ParamType):  # type: ignore[type-arg] # not generic in older versions
    """`NAME=PATH`, or a JSON object with `name`, `path` and `base_model_name`."""

    name = "NAME=PATH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> LoraModule:
        """The adapter."""
        if value.lstrip().startswith("{"):
            found = _object(value)
        else:
            name, _, path = value.partition("=")
            found = {"name": name, "path": path}
        name, path, base = found.get("name"), found.get("path"), found.get("base_model_name")
        if isinstance(name, str) and isinstance(path, str) and isinstance(base, str | None) and name and path:
            return LoraModule(name, path, base)
        expected = 'NAME=PATH or {"name": NAME, "path": PATH, "base_model_name": MODEL} is expected'
        raise click.BadParameter(f"{value!r}: {expected}", ctx, param)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def lora_modules(text: str) -> Callable[[Function], Function]:
    """The option with the adapters to load."""
    return click.option("--lora-modules", "modules", type=_Module(), multiple=True, help=text)


def adapter_settings(
    settings: Mapping[str, Any], num_modules: int, *, default: int = _MAX_ADAPTERS
) -> dict[str, Any]:
    """The options of an engine that takes adapters: `default` on the device, and room for all modules."""
    found = dict(settings)
    limit = found.get("max_cpu_adapters", _MAX_ADAPTERS)
    room = found.setdefault("max_adapters", min(default, _MAX_ADAPTERS, limit))
    if 0 < room < num_modules:
        found.setdefault("max_cpu_adapters", num_modules)
    return found
