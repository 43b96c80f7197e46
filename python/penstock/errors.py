"""Every error Penstock raises on purpose.

    PenstockError
    ├── ConfigError (ValueError)         a field of the engine's configuration
    ├── ModelLoadError                   the model's files, or fetching them
    ├── OutOfMemoryError                      the model or its cache does not fit
    ├── EngineStoppedError                    the engine is not open, was closed, or died of a defect
    └── RequestError
        ├── InvalidRequestError (ValueError)  a field of the request
        ├── OverloadedError                   too many requests wait; the same request may work later
        └── GenerationError              the request failed while it ran

Cancelling a request is not an error: it is a finish reason. Wrong Python (an unknown keyword, two tasks
reading one request) is a `TypeError` or a `RuntimeError`, as everywhere.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EngineStoppedError",
    "GenerationError",
    "InvalidRequestError",
    "ModelLoadError",
    "OutOfMemoryError",
    "OverloadedError",
    "PenstockError",
    "RequestError",
]


class PenstockError(Exception):
    """Anything that Penstock reports; on its own, a defect or a refusal of the operating system."""


class _FieldError(ValueError):
    """What is wrong with one field: its name, the value given, and what is allowed."""

    def __init__(
        self, message: str, field: str | None = None, value: object = None, limit: str | None = None
    ) -> None:
        super().__init__(message, field, value, limit)
        self.field = field
        self.value = value
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[0])


class ConfigError(_FieldError, PenstockError):
    """A field of the engine's configuration is not allowed; see `field`, `value` and `limit`."""


class ModelLoadError(PenstockError):
    """The model cannot be found, fetched or understood; the text names the file and what is wrong with it."""


class OutOfMemoryError(PenstockError, MemoryError):
    """The model or its cache needs more memory than there is; the text says which settings would fit."""


class EngineStoppedError(PenstockError):
    """The engine is not open, was closed, or was stopped by a defect."""


class RequestError(PenstockError):
    """Something about one request; the engine and other requests go on."""


class InvalidRequestError(_FieldError, RequestError):
    """A field of the request is not allowed here; see `field`, `value` and `limit`."""


class OverloadedError(RequestError):
    """As many requests wait as may wait; try again later."""


class GenerationError(RequestError):
    """The request failed while it ran; the text says how.

    Its step failed, its logits processor raised, the form of its answer could not be followed, or what it
    bans left no token to choose from.
    """
