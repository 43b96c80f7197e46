"""DashInfer's Python API on Penstock. Modules are those of `penstock.compat.dashinfer`."""

import importlib as _importlib
import sys as _sys

from penstock.compat.dashinfer import allspark

__all__ = ["allspark"]

# `import dashinfer.allspark.engine` finds these, so no module is loaded twice.
for _name in ("allspark", "allspark.engine", "allspark.model_loader", "allspark.prompt_utils"):
    _sys.modules[f"{__name__}.{_name}"] = _importlib.import_module(f"penstock.compat.dashinfer.{_name}")
