"""The routes for probes: `/health`, which can generate a token, and `/ping`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

import penstock
from penstock.server.errors import invalid

if TYPE_CHECKING:
    from penstock.server.http import Exchange
    from penstock.server.models import Model
    from penstock.server.state import State

__all__ = ["engine_state", "health", "ping", "state_of"]


def state_of(model: Model, state: State) -> dict[str, Any]:
    """The state of a model, as `/health` and `/metrics` show it."""
    if model.progress is not None:
        return {"status": "loading", "bytes_loaded": model.progress.done, "bytes": model.progress.total}
    status = engine_state(model.engine, state.settings.stall_timeout)
    return {"status": "draining" if state.calls.is_draining and status == "ok" else status}


def engine_state(engine: penstock.Engine, stall_timeout: float) -> str:
    """The state of an engine that is not loading; it is stuck if a step takes longer than `stall_timeout`."""
    try:
        found = engine.health()
    except penstock.EngineStoppedError:
        return "stopped"
    if found.step_age is not None and found.step_age > stall_timeout:
        return "stuck"
    return "ok" if found.state == "open" else found.state


async def health(state: State, exchange: Exchange) -> None:
    """Whether requests can be answered: 200 if all models are open and compute."""
    states = {name: state_of(model, state) for name, model in state.models.items()}
    if _is_deep(exchange):
        async with anyio.create_task_group() as group:
            for name, model in state.models.items():
                if states[name]["status"] == "ok":
                    group.start_soon(_probe, states, name, model, state.settings.probe_timeout)
    is_ready = not state.calls.is_draining and all(found["status"] == "ok" for found in states.values())
    status = "draining" if state.calls.is_draining else "ok" if is_ready else "unavailable"
    await exchange.send_json({"status": status, "models": states}, 200 if is_ready else 503)


def _is_deep(exchange: Exchange) -> bool:
    value = exchange.query().get("deep", "0")
    if value not in ("0", "1"):
        raise invalid("deep", value, "0 or 1")
    return value == "1"


async def _probe(states: dict[str, Any], name: str, model: Model, timeout: float) -> None:  # noqa: ASYNC109
    states[name] = await model.probe.run(model.engine, timeout)


async def ping(state: State, exchange: Exchange) -> None:
    """Whether the process works: 200 unless a model has crashed or is stuck."""
    broken = [found for model in state.models.values() for found in [state_of(model, state)["status"]]]
    is_alive = not {"stopped", "stuck"} & set(broken)
    await exchange.send_json({"status": "ok" if is_alive else "broken"}, 200 if is_alive else 503)
