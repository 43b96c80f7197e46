"""The LoRA adapters of `PytorchEngineConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._json import loads
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
#: Bytes for each adapter, for the padding of small ones.
_PADDING = 1 << 20


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
    """Add the options for these adapters: their number and, unless one is on the hub, rank and memory."""
    if not adapters:
        return
    options["max_adapters"] = len(adapters)
    known = [_rank_and_size(Path(path).expanduser()) for path in adapters.values()]
    ranks, sizes = [rank for rank, _ in known], [size for _, size in known]
    if all(ranks):
        options["max_adapter_rank"] = min(max(ranks), _MAX_RANK)
        # Packed tensors have padding; those of two types are float32.
        options["adapter_cache_bytes"] = sum(sizes) * 5 // 4 + max(sizes) + len(sizes) * _PADDING


def _rank_and_size(path: Path) -> tuple[int, int]:
    """The highest rank in an adapter's configuration and the bytes of its tensors; 0 if they are unknown."""
    try:
        size = (path / "adapter_model.safetensors").stat().st_size
        config = loads((path / "adapter_config.json").read_bytes())
        ranks = [config.get("r", _DEFAULT_RANK), *(config.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, AttributeError):
        return 0, 0
    return max((rank for rank in ranks if type(rank) is int and rank > 0), default=0), size
