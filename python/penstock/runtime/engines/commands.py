"""The command lines and the environments of engines, by their kinds."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock.runtime.errors import not_allowed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.runtime.engines.registry import Record
    from penstock.runtime.settings import RuntimeSettings

__all__ = ["Kind", "command_of", "environment_of", "kind_of"]

#: `vllm` is each engine with the command line of `vllm serve`.
Kind: TypeAlias = Literal["penstock", "vllm", "sglang"]

#: Variables of the runtime that engines do not get.
_SECRETS = ("PENSTOCK_RUNTIME_TOKEN", "PENSTOCK_ENGINE_KEY")
_SLEEP = "--enable-sleep-mode"


def kind_of(engine: str, settings: RuntimeSettings) -> Kind:
    """The kind of the engine that is started for a request."""
    kinds = ["vllm", "penstock"] + (["sglang"] if settings.sglang_command else [])
    if engine not in kinds:
        limit = " or ".join(kinds) + ("" if settings.sglang_command else "; sglang needs --sglang-command")
        raise not_allowed("ValidationError", "engine", engine, limit)
    if engine == "sglang":
        return "sglang"
    return "penstock" if settings.engine_command is None else "vllm"


def command_of(record: Record, model: str, key_file: str, settings: RuntimeSettings) -> list[str]:
    """The command without the flags of the request; `key_file` has the administrator's key."""
    served = ["--served-model-name", record.model_name, "--host", settings.engines_host]
    if record.engine == "sglang":
        command = shlex.split(settings.sglang_command or "")
        return [*command, "--model-path", model, *served, "--enable-memory-saver"]
    if settings.engine_command is not None:
        return [*shlex.split(settings.engine_command), model, *served]
    command = [sys.executable, "-m", "penstock", "serve"]
    return [*command, model, *served, "--admin-api-key-file", key_file]


def environment_of(
    record: Record, settings: RuntimeSettings, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables of an engine: those of the runtime, and those of its kind."""
    found = {name: value for name, value in environment.items() if name not in _SECRETS}
    if record.engine == "penstock":
        return found
    # The variables of kvcached, which images for elastic KV caches have.
    found = {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1", **found}
    found["KVCACHED_IPC_NAME"] = record.ipc_name
    if record.engine == "vllm":
        if settings.engine_key is not None:
            found.setdefault("VLLM_API_KEY", settings.engine_key)
        if any(argument.partition("=")[0] == _SLEEP for argument in record.command):
            # Otherwise it has no use for the routes of development.
            found["VLLM_SERVER_DEV_MODE"] = "1"
    return found
