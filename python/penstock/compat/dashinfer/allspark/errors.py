"""`AsError`, the exception of the DashInfer API, and the statuses of Penstock's errors."""

from __future__ import annotations

import os
import re

from penstock import (
    AdapterConflictError,
    AdapterLimitError,
    AdapterLoadError,
    AdapterNotFoundError,
    ConfigError,
    DeviceUnavailableError,
    EngineStoppedError,
    InvalidRequestError,
    ModelLoadError,
    OutOfMemoryError,
    OverloadedError,
    PenstockError,
)
from penstock.compat.dashinfer.allspark import environment
from penstock.compat.dashinfer.allspark.enums import AsStatus

__all__ = ["AsError", "as_error", "check_process"]

#: The first class that matches an error determines its status; others are runtime errors.
_STATUSES: tuple[tuple[type[PenstockError], AsStatus], ...] = (
    (ConfigError, AsStatus.ALLSPARK_PARAM_ERROR),
    (DeviceUnavailableError, AsStatus.ALLSPARK_PARAM_ERROR),
    (AdapterNotFoundError, AsStatus.ALLSPARK_LORA_NOT_FOUND),
    (AdapterConflictError, AsStatus.ALLSPARK_LORA_ALREADY_LOADED),
    (AdapterLimitError, AsStatus.ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR),
    (AdapterLoadError, AsStatus.ALLSPARK_IO_ERROR),
    (InvalidRequestError, AsStatus.ALLSPARK_PARAM_ERROR),
    (ModelLoadError, AsStatus.ALLSPARK_IO_ERROR),
    (OutOfMemoryError, AsStatus.ALLSPARK_MEMORY_ERROR),
    (OverloadedError, AsStatus.ALLSPARK_REQUEST_DENIED),
    (EngineStoppedError, AsStatus.ALLSPARK_REQUEST_DENIED),
)
#: The fields of DashInfer's API that Penstock's options are made of.
_FIELDS = {
    "max_model_len": "engine_max_length",
    "max_num_seqs": "engine_max_batch",
    "max_num_batched_tokens": "engine_max_prefill_length",
    "numa_nodes": "compute_unit",
    "memory_ratio": "BFC_MEM_RATIO",
    "max_adapter_rank": "lora_max_rank",
    "max_cpu_adapters": "lora_max_num",
}
_OPTION = re.compile(rf"\b({'|'.join(_FIELDS)})\b")
#: The end of the message of an adapter with a higher rank than allowed.
_RANK_LIMIT = re.compile(r"; max_adapter_rank is \d+$")


class AsError(RuntimeError):
    """A call that failed; `status` is its `AsStatus`.

    The message begins with the name of the status, as in "ALLSPARK_PARAM_ERROR: max_batch must be above 0".
    """

    def __init__(self, status: AsStatus, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.status.name}: {self.reason}"


def as_error(error: PenstockError) -> AsError:
    """The `AsError` for an error of Penstock; raise it `from` that error."""
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), None)
    if isinstance(error, AdapterLoadError) and _RANK_LIMIT.search(str(error)):
        status = AsStatus.ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR
    reason = _OPTION.sub(lambda match: _FIELDS[match[0]], str(error))
    if isinstance(error, DeviceUnavailableError):
        reason += f"; {environment.DEVICE}=cpu in the environment selects the CPU in place of CUDA"
    return AsError(AsStatus.ALLSPARK_RUNTIME_ERROR if status is None else status, reason)


def check_process(process: int) -> None:
    """Raise `AsError` unless this process has this id; the child of a fork has copies of held locks."""
    if os.getpid() != process:
        reason = f"the engine was created before a fork, in process {process}; create one in this process"
        raise AsError(AsStatus.ALLSPARK_REQUEST_DENIED, reason)
