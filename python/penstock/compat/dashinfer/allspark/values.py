"""Conversion of configuration values, which may be names or texts of numbers, and configuration files."""

from __future__ import annotations

import os
import re
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from penstock._install import missing_extra
from penstock._json import loads
from penstock._shown import shown
from penstock.compat.dashinfer.allspark.enums import TargetDevice

if TYPE_CHECKING:
    from pathlib import Path

_COMPUTE_UNIT = re.compile(r"(?P<device>[a-zA-Z_]+)(:(?P<ids>[0-9]{1,5}(,[0-9]{1,5})*))?")

AnyEnum = TypeVar("AnyEnum", bound=Enum)


def parse_compute_unit(text: str) -> tuple[TargetDevice, list[int]]:
    """The device and ids of a text such as `CUDA:0,1`. Raises `ValueError`."""
    match = _COMPUTE_UNIT.fullmatch(text) if isinstance(text, str) else None
    device = TargetDevice.__members__.get(match["device"].upper()) if match else None
    if match is None or device is None:
        message = (
            f"compute_unit is {shown(text)}; it must be a device with ids: CUDA:0,1, CPU:0 or CPU_NUMA:0,1"
        )
        raise ValueError(message)
    return device, [int(item) for item in (match["ids"] or "0").split(",")]


def read_mapping(path: Path) -> dict[str, Any]:
    """The content of a JSON or YAML file, which must be a mapping. Raises `ValueError` and `OSError`."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError as error:
            message = f"{path}: {missing_extra('reading YAML', 'yaml', 'dashinfer')}"
            raise ImportError(message, name="yaml") from error
        try:
            content = yaml.safe_load(text)
        except Exception as error:  # values of a wrong type, and deep nesting, raise errors of all kinds
            message = f"{path}: invalid YAML: {error}"
            raise ValueError(message) from error
    else:
        try:
            content = loads(text)
        except ValueError as error:
            message = f"{path}: invalid JSON: {error}"
            raise ValueError(message) from error
    if not isinstance(content, dict):
        message = f"{path}: the content must be a mapping"
        raise ValueError(message)
    return content


def to_path(name: str, value: object) -> str:
    """A path as text."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        message = f"{name} is {shown(value)}; it must be a path"
        raise ValueError(message)
    return path


def to_integer(name: str, value: object) -> int:
    """An integer, or a text of one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        if isinstance(value, str):
            return int(value)
    except ValueError:
        pass
    message = f"{name} is {shown(value)}; it must be an integer"
    raise ValueError(message)


def to_enum(name: str, kind: type[AnyEnum], value: object) -> AnyEnum:
    """A member of an enumeration, or the member with this name."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        wanted = value.removeprefix(f"{kind.__name__}.").lower()
        for member in kind.__members__:
            if member.lower() == wanted:
                return kind[member]
    message = f"{name} is {shown(value)}; it must be one of {', '.join(kind.__members__)}"
    raise ValueError(message)
