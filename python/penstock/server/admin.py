"""The routes about the models, the version and the requests of the server, which generate nothing."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import penstock
from penstock.server.bodies import converted
from penstock.server.errors import ApiError
from penstock.server.protocol.tokens import (
    AbortRequest,
    CacheRequest,
    LoadAdapterRequest,
    ModelRequest,
    SleepRequest,
    UnloadAdapterRequest,
)

if TYPE_CHECKING:
    from penstock.server.http import Exchange
    from penstock.server.models import Model
    from penstock.server.state import State

__all__ = [
    "abort",
    "load_adapter",
    "model",
    "models",
    "reset_prefix_cache",
    "sleep",
    "unload_adapter",
    "version",
    "wake_up",
]

_TEXT = "text/plain; charset=utf-8"


async def models(state: State, exchange: Exchange) -> None:
    """The list of models, then of their adapters."""
    rows = [_row(model, name) for name, model in state.models.items()]
    for model in state.models.selected(None):
        rows += [_adapter_row(model, name) for name in model.adapter_names if name not in state.models]
    await exchange.send_json({"object": "list", "data": rows})


async def model(state: State, exchange: Exchange) -> None:
    """One row of the list of models."""
    path = exchange.scope["path_params"]["name"]
    if not path:
        raise ApiError(404, "there is no such path", code="not_found")
    model, name, adapter = state.models.select(path)
    await exchange.send_json(_row(model, name) if adapter is None else _adapter_row(model, adapter))


def _row(model: Model, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "penstock",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "chat_sampling": model.chat_sampling,
        "permission": [_permission(name, model.created)],
    }


def _permission(name: str, created: int) -> dict[str, Any]:
    """The permission of a model in OpenAI's first API, which clients of vLLM and AIBrix read."""
    return {
        "id": f"modelperm-{sha256(name.encode()).hexdigest()[:32]}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


def _adapter_row(model: Model, name: str) -> dict[str, Any]:
    source = model.source(name)
    row = _row(model, name)
    return row | {
        "created": source.created,
        "permission": [_permission(name, source.created)],
        "root": source.root,
        "parent": model.name,
        "max_model_len": None,
    }


async def version(_state: State, exchange: Exchange) -> None:
    """The version of Penstock."""
    await exchange.send_json({"version": penstock.__version__})


async def abort(state: State, exchange: Exchange) -> None:
    """End requests by the `id` of their responses; their output so far is returned to their clients.

    Only administrators end those of other keys.
    """
    request = converted(await exchange.read_object(), AbortRequest)
    ids = [request.request_id] if isinstance(request.request_id, str) else request.request_id
    is_admin = exchange.key in state.admin_keys
    named = [state.calls.generations[name] for name in dict.fromkeys(ids) if name in state.calls.generations]
    found = [generation for generation in named if is_admin or generation.key == exchange.key]
    for generation in found:
        generation.abort()
    await exchange.send_json({"aborted": len(found)})


async def reset_prefix_cache(state: State, exchange: Exchange) -> None:
    """Empty the prefix cache, or remove the entries of a salt."""
    request = converted(await exchange.read_options(), CacheRequest)
    for model in state.models.selected(request.model):
        for salt in state.cache_salts(request.cache_salt):
            model.engine.reset_prefix_cache(cache_salt=salt)
    await exchange.send_json({})


async def sleep(state: State, exchange: Exchange) -> None:
    """Free the weights and the KV cache."""
    request = converted(await exchange.read_options(), SleepRequest)
    for model in state.models.selected(request.model):
        await model.engine.sleep(drain=request.drain)
    await exchange.send_json({})


async def wake_up(state: State, exchange: Exchange) -> None:
    """Load the weights again."""
    request = converted(await exchange.read_options(), ModelRequest)
    for model in state.models.selected(request.model):
        try:
            await model.engine.wake()
        except RuntimeError as error:  # another request wakes it
            raise ApiError(409, "the model is being loaded already", code="loading") from error
    await exchange.send_json({})


async def load_adapter(state: State, exchange: Exchange) -> None:
    """Load a LoRA adapter, which requests then name as their model."""
    request = converted(await exchange.read_object(), LoadAdapterRequest)
    models = state.adapters.models if request.model is None else state.models.selected(request.model)
    if len(models) > 1:
        message = "model is missing: it must be the name of the model that gets the adapter"
        raise ApiError(400, message, param="model")
    name = request.lora_name
    await state.adapters.load(models[0], name, request.lora_path, replace=request.load_inplace)
    await exchange.send_bytes(f"Success: LoRA adapter '{name}' added successfully.".encode(), _TEXT)


async def unload_adapter(state: State, exchange: Exchange) -> None:
    """Remove a LoRA adapter: new requests that name it get status 404."""
    request = converted(await exchange.read_object(), UnloadAdapterRequest)
    name = request.lora_name
    await state.adapters.unload(name, force=request.force)
    await exchange.send_bytes(f"Success: LoRA adapter '{name}' removed successfully.".encode(), _TEXT)
