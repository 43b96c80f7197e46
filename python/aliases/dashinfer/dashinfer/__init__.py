"""DashInfer's Python API on Penstock. Modules are those of `penstock.compat.dashinfer`."""

import importlib as _importlib
import sys as _sys

from penstock.compat.dashinfer import __version__, allspark

__all__ = ["__version__", "allspark"]

# `import dashinfer.allspark.engine` finds these, so no module is loaded twice.
_modules = ("", "._allspark", ".engine", ".model_loader", ".prompt_utils")
for _name in [f"allspark{_module}" for _module in _modules]:
    _sys.modules[f"{__name__}.{_name}"] = _importlib.import_module(f"penstock.compat.dashinfer.{_name}")
