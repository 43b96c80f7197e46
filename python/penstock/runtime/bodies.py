"""The bodies of requests: structures that refuse unknown fields, and their decoding."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from penstock.runtime.engines.registry import Claim  # noqa: TC001 - msgspec reads it
from penstock.runtime.errors import invalid_body

__all__ = [
    "Activate",
    "CancelDownload",
    "Deactivate",
    "DelegatedLoad",
    "DelegatedUnload",
    "DirectLoad",
    "DirectUnload",
    "Download",
    "EngineConfig",
    "KvLimit",
    "ListModels",
    "Operation",
    "Sleep",
    "converted",
    "decoded",
]

Structure = TypeVar("Structure")

_MISSING = re.compile("missing required field `([^`]*)`")
_UNKNOWN = re.compile("unknown field `([^`]*)`")
_PLACE = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body; `null` equals an omitted field."""


class DirectLoad(_Body):
    """An adapter that the engine finds by itself."""

    lora_name: str
    lora_path: str


class DelegatedLoad(_Body):
    """An adapter that the runtime downloads for the engine."""

    lora_name: str
    artifact_url: str
    credentials_secret: str | None = None
    credentials: dict[str, str] | None = None
    additional_config: dict[str, str] | None = None
    local_dir: str | None = None


class DirectUnload(_Body):
    """An adapter to unload, with vLLM's fields."""

    lora_name: str
    lora_int_id: int


class DelegatedUnload(_Body):
    """An adapter to unload and, if the runtime downloaded it, to delete."""

    lora_name: str
    cleanup_local: bool = True


class Download(_Body):
    """A model to download."""

    model_uri: str
    local_dir: str | None = None
    model_name: str | None = None
    download_extra_config: dict[str, Any] | None = None


class CancelDownload(_Body):
    """A download to end."""

    model_name: str
    local_dir: str | None = None


class ListModels(_Body):
    """The folder of which the models are listed."""

    local_dir: str | None = None


class EngineConfig(_Body):
    """The flags of an engine and their values."""

    args: dict[str, str] = {}


class Activate(_Body):
    """An engine to start."""

    model_name: str
    artifact_url: str
    engine: str = "vllm"
    port: int = 0
    ipc_name: str | None = None
    credentials: dict[str, str] = {}
    engine_config: EngineConfig | None = None
    claim_ref: Claim | None = None
    additional_config: dict[str, str] = {}


class Deactivate(_Body):
    """An engine to stop."""

    model_name: str
    mode: Literal["stop"] = "stop"


class Operation(_Body):
    """A change of an engine; with the same id it is made once."""

    model_name: str
    operation_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class Sleep(Operation):
    """The level of sleep, as vLLM has it."""

    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1


class KvLimit(Operation):
    """The memory of a KV cache."""

    limit_bytes: Annotated[int, msgspec.Meta(ge=0)]


def decoded(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, without the fields that are null."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error) or "nested too deeply"
        raise invalid_body(f"JSON decode error: {text}", "json_invalid", ()) from None
    if not isinstance(value, dict):
        raise invalid_body("the body must be a JSON object", "model_attributes_type", ())
    return {name: field for name, field in value.items() if field is not None}


def converted(fields: dict[str, Any], structure: type[Structure]) -> Structure:
    """The fields of a body as a structure."""
    try:
        return msgspec.convert(fields, structure)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        place: list[str | int] = [
            name or (int(index) if index.isdecimal() else index)
            for name, index in _PLACE.findall(path.rstrip("`").removeprefix("$"))
        ]
        if found := _MISSING.search(message):
            raise invalid_body("field required", "missing", [*place, found[1]]) from None
        if found := _UNKNOWN.search(message):
            text = "extra inputs are not permitted"
            raise invalid_body(text, "extra_forbidden", [*place, found[1]]) from None
        raise invalid_body(message, "value_error", place) from None
