"""The LoRA adapters of `PytorchEngineConfig`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.compat.lmdeploy.checks import refuse

if TYPE_CHECKING:
    from penstock import EngineOptions

__all__ = ["adapters_of", "add_adapters"]

_LIMIT = "None, a mapping of names to paths, or one path"
#: The name of an adapter that is given without one.
_DEFAULT_NAME = "default"
#: The rank in an `adapter_config.json` that has none.
_DEFAULT_RANK = 8
_MAX_RANK = 1024


def adapters_of(value: Any) -> dict[str, str]:
    """The paths of adapters by name. Raises `ArgumentError`."""
    if value is None:
        return {}
    if isinstance(value, (str, os.PathLike)):
        value = {_DEFAULT_NAME: value}
    if not isinstance(value, Mapping):
        refuse("adapters", value, _LIMIT)
    for name, path in value.items():
        if not isinstance(name, str) or not isinstance(path, (str, os.PathLike)) or not name or not path:
            refuse("adapters", value, _LIMIT)
    return {name: os.fspath(path) for name, path in value.items()}


def add_adapters(options: EngineOptions, adapters: Mapping[str, str]) -> None:
    """Add the options for these adapters: their number and, of those that are not on the hub, the rank."""
    if not adapters:
        return
    options["max_adapters"] = len(adapters)
    ranks = [rank for path in adapters.values() if (rank := _rank(Path(path).expanduser())) is not None]
    if len(ranks) == len(adapters):
        options["max_adapter_rank"] = min(max(ranks), _MAX_RANK)


def _rank(path: Path) -> int | None:
    """The highest rank in an adapter's configuration; `None` if it cannot be read."""
    try:
        config = json.loads((path / "adapter_config.json").read_bytes())
        ranks = [config.get("r", _DEFAULT_RANK), *(config.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    return max((rank for rank in ranks if type(rank) is int and rank > 0), default=None)
