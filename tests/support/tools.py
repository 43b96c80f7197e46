"""The programs of `tools/` as modules."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from support.paths import ROOT

if TYPE_CHECKING:
    from types import ModuleType


def tool(name: str, folder: str = "") -> ModuleType:
    """The module of a program by the name of its file. Modules of a folder import each other."""
    path = ROOT / "tools" / folder / f"{name}.py"
    if folder and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    if folder and name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module
