"""LoRA adapters: their files beside those of a serialised model, and the adapters of an installed model.

The adapter `<name>.aslora` is a directory in PEFT's layout.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock import PenstockError
from penstock._shown import shown
from penstock.compat.dashinfer.allspark.enums import AsStatus
from penstock.compat.dashinfer.allspark.errors import AsError, as_error
from penstock.compat.dashinfer.allspark.model_files import ADAPTER, locked, temporary_directory
from penstock.compat.dashinfer.allspark.values import to_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.compat.dashinfer.allspark.installed_model import InstalledModel, RequestHandle

__all__ = ["LoraSettings", "load_adapter", "load_named_adapters", "unload_adapter"]

_CONFIG, _TENSORS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_DEFAULTS = {"input_base_dir": ".", "lora_names": (), "lora_only": False}


@dataclass(frozen=True)
class LoraSettings:
    """The argument `lora_cfg` of a serialisation."""

    sources: dict[str, Path]
    """The directory of each adapter by its name."""
    lora_only: bool
    """Whether the model itself is not written."""

    @classmethod
    def read(cls, lora_cfg: Mapping[str, Any] | None) -> Self | None:
        """The settings in a mapping; `None` for none. Raises `ValueError`."""
        if lora_cfg is None:
            return None
        if not hasattr(lora_cfg, "keys") or not lora_cfg.keys() <= _DEFAULTS.keys():
            message = f"lora_cfg is {shown(lora_cfg)}; it must be a mapping with {', '.join(_DEFAULTS)}"
            raise ValueError(message)
        values = {**_DEFAULTS, **lora_cfg}
        base, names, lora_only = values.values()
        base = Path(to_path("input_base_dir", base))
        if isinstance(names, str) or not all(map(_is_file_name, names)):
            message = f"lora_names is {shown(names)}; it must be a list of the names of directories"
            raise ValueError(message)
        if not isinstance(lora_only, bool):
            message = f"lora_only is {shown(lora_only)}; it must be True or False"
            raise ValueError(message)
        return cls({name: base / name for name in names}, lora_only)

    def check(self) -> None:
        """Raise `AsError` with `ALLSPARK_IO_ERROR` if a file of an adapter is missing."""
        for source in self.sources.values():
            for name in (_CONFIG, _TENSORS):
                if not (source / name).is_file():
                    has_pickle = name == _TENSORS and (source / _PICKLE).is_file()
                    hint = f"; {_PICKLE} is not read: save the tensors as safetensors" if has_pickle else ""
                    reason = f"{source / name}: no such file{hint}"
                    raise AsError(AsStatus.ALLSPARK_IO_ERROR, reason)

    def write(self, directory: Path) -> None:
        """Copy the adapters to a directory. A failure leaves a former adapter, or none. Raises `OSError`."""
        for name, source in self.sources.items():
            target = directory / f"{name}{ADAPTER}"
            with temporary_directory(target) as temporary:
                new = temporary / "new"
                new.mkdir()
                for file in (_CONFIG, _TENSORS):
                    shutil.copyfile(source / file, new / file)
                with locked(directory):
                    if target.exists():
                        target.rename(temporary / "former")
                    new.rename(target)


def load_adapter(model: InstalledModel, lora_name: object) -> None:
    """Load an adapter by its name or the absolute path of its directory. Raises `AsError`."""
    name, path = _source(model, lora_name)
    engine = model.engine
    if model.config.lora_max_num == 0:
        raise AsError(AsStatus.ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR, "lora_max_num is 0")
    if engine.info.max_adapters == 0:
        reason = f"the model {model.config.model_name!r} was serialised without lora_cfg"
        raise AsError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, reason)
    try:
        if name in engine.adapters:
            reason = f"the adapter {name!r} is loaded; call unload_lora first"
            raise AsError(AsStatus.ALLSPARK_LORA_ALREADY_LOADED, reason)
        engine.blocking.load_adapter(name, path)
    except PenstockError as error:
        raise as_error(error) from error


def load_named_adapters(model: InstalledModel) -> None:
    """Load the adapters that the runtime configuration names; closes the model if that fails."""
    try:
        for name in model.config.lora_names:
            load_adapter(model, name)
    except BaseException:
        model.engine.close()
        raise


def unload_adapter(model: InstalledModel, lora_name: object, handles: Iterable[RequestHandle]) -> None:
    """Remove an adapter that no request of `handles` uses. Raises `AsError`."""
    name = _checked(lora_name, "the name of an adapter")
    if any(handle.uses_adapter(name) for handle in handles):
        reason = f"the adapter {name!r} is used by a request that has not ended"
        raise AsError(AsStatus.ALLSPARK_LORA_IN_USE, reason)
    try:
        model.engine.blocking.unload_adapter(name)
    except PenstockError as error:
        raise as_error(error) from error


def _source(model: InstalledModel, lora_name: object) -> tuple[str, Path]:
    """The name and the directory of an adapter. Raises `AsError`."""
    if isinstance(lora_name, str) and lora_name.startswith("/"):
        path = Path(lora_name)
        return path.name.removesuffix(ADAPTER), path
    name = _checked(lora_name, "a name or an absolute path")
    return name, model.weights.parent / f"{name}{ADAPTER}"


def _checked(lora_name: object, limit: str) -> str:
    """The name of an adapter. Raises `AsError`."""
    if not _is_file_name(lora_name):
        reason = f"lora_name is {shown(lora_name)}; it must be {limit}"
        raise AsError(AsStatus.ALLSPARK_PARAM_ERROR, reason)
    return str(lora_name)


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and not {"/", "\0"} & {*value}
