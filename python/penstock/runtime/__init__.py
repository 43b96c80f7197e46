"""The AIBrix AI Engine Runtime: a sidecar that manages the engine beside it and standardises its metrics.

The extra `runtime` installs what it needs; `penstock runtime` runs it. The engine can be any server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock._install import missing_extra
from penstock.runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from penstock.runtime.application import app

__all__ = ["RuntimeSettings", "app"]


def __getattr__(name: str) -> Any:
    """Import what needs the extra when it is used: the command line reads only the settings."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from penstock.runtime.application import app
    except ModuleNotFoundError as error:
        message = missing_extra("the runtime", error.name, "runtime")
        raise ModuleNotFoundError(message, name=error.name) from error
    return app
