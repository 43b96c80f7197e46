"""All exceptions that Penstock raises.

    PenstockError
    ├── ConfigError (ValueError)              a field of the engine's configuration is invalid
    ├── ModelLoadError                        the model's files are missing or invalid
    ├── DeviceUnavailableError                the device of the configuration cannot be used
    ├── OutOfMemoryError (MemoryError)        the model, its KV cache or a long text does not fit
    ├── AdapterLoadError                      the adapter cannot be loaded
    │   ├── AdapterConflictError              another adapter has the name
    │   └── AdapterLimitError                 adapters fill `max_cpu_adapters` or `max_cpu_adapter_bytes`
    ├── EngineStoppedError                    the engine is not open yet, asleep or closed, or has crashed
    └── RequestError
        ├── InvalidRequestError (ValueError)  a field of the request is invalid
        │   └── AdapterNotFoundError          no adapter of this name is loaded
        ├── OverloadedError                   the engine has too much unfinished work; retry later
        └── GenerationError                   the request failed while it ran

Cancelling a request is not an error; its finish reason is `cancelled`. Misuse of the API (an unknown keyword,
two tasks reading one request) raises `TypeError` or `RuntimeError`.
"""

from __future__ import annotations

from penstock._shown import shown

__all__ = [
    "AdapterConflictError",
    "AdapterLimitError",
    "AdapterLoadError",
    "AdapterNotFoundError",
    "ConfigError",
    "DeadlineError",
    "DeviceUnavailableError",
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
    """Base class of all Penstock errors; raised directly for bugs and for operating system errors."""


class _FieldError(ValueError):
    """An invalid field: its name, the value given, and the allowed range."""

    def __init__(
        self, message: str, field: str | None = None, value: object = None, limit: str | None = None
    ) -> None:
        super().__init__(message, field, value, limit)
        self.field = field
        self.value = value
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[0])

    def __repr__(self) -> str:
        fields = f"{self.args[0]!r}, {self.field!r}, {shown(self.value)}, {self.limit!r}"
        return f"{type(self).__name__}({fields})"


class ConfigError(_FieldError, PenstockError):
    """A field of the engine's configuration is invalid; see `field`, `value` and `limit`."""


class ModelLoadError(PenstockError):
    """The model cannot be found, downloaded or read; the message names the file and the problem."""


class DeviceUnavailableError(PenstockError):
    """The device of the configuration cannot be used; the message has the reason and a remedy."""


class OutOfMemoryError(PenstockError, MemoryError):
    """The model or its KV cache does not fit into memory; the message suggests settings that do.

    Also raised for a text, before it is encoded, if the system refuses the memory for that.
    """


class AdapterLoadError(PenstockError):
    """The adapter cannot be found, downloaded, read or used with the model; the message names the problem."""


class AdapterConflictError(AdapterLoadError):
    """An adapter with other contents has the name."""


class AdapterLimitError(AdapterLoadError):
    """`max_cpu_adapters` adapters are loaded, or fill `max_cpu_adapter_bytes`; unload one first."""


class EngineStoppedError(PenstockError):
    """The engine is not open yet, is closing, asleep or closed, was opened before a fork, or has stopped."""


class RequestError(PenstockError):
    """Base class of errors that concern one request; the engine and other requests continue."""


class InvalidRequestError(_FieldError, RequestError):
    """A field of the request is invalid; see `field`, `value` and `limit`."""


class AdapterNotFoundError(InvalidRequestError):
    """No adapter of this name is loaded; `limit` lists the names of those that are."""


class OverloadedError(RequestError):
    """`max_waiting`, `max_unfinished`, `max_output_bytes` or another bound is reached; retry later."""


class DeadlineError(OverloadedError):
    """The request cannot end in time: the prompts of its client before it take too long.

    Only requests of a server with a `request_timeout` have a deadline.
    """


class GenerationError(RequestError):
    """The request failed while it ran; the message names the cause.

    Possible causes: its step failed, its logits processor raised, its grammar exceeded a limit, or no token
    was left to sample.
    """
