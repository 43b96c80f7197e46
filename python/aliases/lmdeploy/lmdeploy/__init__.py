"""LMDeploy's Python API on Penstock. Modules are those of `penstock.compat.lmdeploy`."""

import importlib as _importlib
import sys as _sys

from penstock.compat.lmdeploy import *  # noqa: F403
from penstock.compat.lmdeploy import __all__, __getattr__, __version__, version_info  # noqa: F401

# `import lmdeploy.serve.async_engine` finds these, so no module is loaded twice. `pipeline` is the function.
_modules = (
    "messages",
    "model",
    "pytorch",
    "serve",
    "serve.async_engine",
    "serve.openai",
    "serve.openai.api_client",
    "tokenizer",
    "turbomind",
    "utils",
    "version",
    "vl",
)
for _name in (*_modules, "api", "pipeline"):
    _sys.modules[f"{__name__}.{_name}"] = _importlib.import_module(f"penstock.compat.lmdeploy.{_name}")
