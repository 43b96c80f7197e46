"""`/tokenize`, `/detokenize` and the administrative routes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.server.protocol.template import TemplateFields

__all__ = [
    "AbortRequest",
    "CacheRequest",
    "DetokenizeRequest",
    "LoadAdapterRequest",
    "ModelRequest",
    "SleepRequest",
    "TokenizeRequest",
    "UnloadAdapterRequest",
]


class TokenizeRequest(TemplateFields):
    """A text, or messages for the chat template."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=1 << 14)] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: Annotated[list[Any], msgspec.Meta(max_length=128)] | None = None


class DetokenizeRequest(msgspec.Struct):
    """Token ids."""

    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(max_length=1 << 18)]
    model: str | None = None


class AbortRequest(msgspec.Struct):
    """The `id` of a response, or several."""

    request_id: str | Annotated[list[str], msgspec.Meta(max_length=65536)]


class ModelRequest(msgspec.Struct):
    """The model that an administrative route is for; all models without one."""

    model: str | None = None


class CacheRequest(ModelRequest):
    """The entries of the prefix cache to remove: those of a salt, or all."""

    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None


class SleepRequest(ModelRequest):
    """The time for which open requests may finish, in seconds."""

    drain: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0


#: The engine has the limits of a name.
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class LoadAdapterRequest(msgspec.Struct):
    """A LoRA adapter: its name in requests, its folder or its id on the hub, and the model that gets it."""

    lora_name: _Name
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterRequest(msgspec.Struct):
    """A LoRA adapter to remove; `force` ends its requests."""

    lora_name: _Name
    lora_int_id: int | None = None
    force: bool = False
