"""The routes about the models, the version and the requests of the server, which generate nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import penstock
from penstock.server.bodies import converted
from penstock.server.errors import ApiError
from penstock.server.protocol.tokens import AbortRequest, CacheRequest, ModelRequest, SleepRequest

if TYPE_CHECKING:
    from penstock.server.http import Exchange
    from penstock.server.state import Model, State

__all__ = [
    "abort",
    "model",
    "models",
    "reset_prefix_cache",
    "sleep",
    "version",
    "wake_up",
]


async def models(state: State, exchange: Exchange) -> None:
    """The list of models."""
    rows = [_row(name, model) for name, model in state.models.items()]
    await exchange.send_json({"object": "list", "data": rows})


async def model(state: State, exchange: Exchange) -> None:
    """One row of the list of models."""
    path = exchange.scope["path_params"]["name"]
    if not path:
        raise ApiError(404, "there is no such path", code="not_found")
    found, name = state.model(path)
    await exchange.send_json(_row(name, found))


def _row(name: str, model: Model) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "penstock",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "permission": [],
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
    named = [state.generations[name] for name in dict.fromkeys(ids) if name in state.generations]
    found = [generation for generation in named if is_admin or generation.key == exchange.key]
    for generation in found:
        generation.abort()
    await exchange.send_json({"aborted": len(found)})


async def reset_prefix_cache(state: State, exchange: Exchange) -> None:
    """Empty the prefix cache, or remove the entries of a salt."""
    request = converted(await exchange.read_options(), CacheRequest)
    for model in state.selected(request.model):
        for salt in state.cache_salts(request.cache_salt):
            model.engine.reset_prefix_cache(cache_salt=salt)
    await exchange.send_json({})


async def sleep(state: State, exchange: Exchange) -> None:
    """Free the weights and the KV cache."""
    request = converted(await exchange.read_options(), SleepRequest)
    for model in state.selected(request.model):
        await model.engine.sleep(drain=request.drain)
    await exchange.send_json({})


async def wake_up(state: State, exchange: Exchange) -> None:
    """Load the weights again."""
    request = converted(await exchange.read_options(), ModelRequest)
    for model in state.selected(request.model):
        try:
            await model.engine.wake()
        except RuntimeError as error:  # another request wakes it
            raise ApiError(409, "the model is being loaded already", code="loading") from error
    await exchange.send_json({})
