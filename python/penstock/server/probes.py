"""The routes for probes: `/health`, which can generate a token, and `/ping`."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import anyio

import penstock
from penstock.server.errors import invalid

if TYPE_CHECKING:
    from penstock.server.http import Exchange
    from penstock.server.state import Model, State

__all__ = ["Probe", "engine_state", "health", "ping", "state_of"]

logger = logging.getLogger("penstock.server")

#: After all other requests, so that it preempts none; it leaves no entry in the prefix cache.
_PARAMS = penstock.SamplingParams(max_tokens=1, temperature=0.0, priority=2**31 - 1, use_prefix_cache=False)
#: Seconds between two looks at the steps of an engine.
_WATCH_INTERVAL = 0.02
#: Seconds for which the result of a probe holds, so that probes of many clients cost little.
_MAX_AGE = 1.0


class _Run:
    """One generated token; without a result if the task that ran it was cancelled."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.result: dict[str, Any] | None = None


class Probe:
    """Sees whether a model works: a step ends, of other requests or of one that generates a token.

    Probes at the same time share one request.
    """

    def __init__(self) -> None:
        self._running: _Run | None = None
        self._end = -math.inf
        self._result: dict[str, Any] = {}

    async def run(self, engine: penstock.Engine, timeout: float) -> dict[str, Any]:  # noqa: ASYNC109 - anyio's scope
        """The state of the model, with the time until a step has ended."""
        while (running := self._running) is not None:
            await running.ended.wait()
            if running.result is not None:
                return running.result
        if time.monotonic() - self._end >= _MAX_AGE:
            running = self._running = _Run()
            try:
                self._result = running.result = await _compute(engine, timeout)
                self._end = time.monotonic()
            finally:
                self._running = None
                running.ended.set()
        return self._result


async def _compute(engine: penstock.Engine, timeout: float) -> dict[str, Any]:  # noqa: ASYNC109 - anyio's scope
    begin = time.perf_counter()  # the clock of an event loop can be as coarse as a millisecond
    found: dict[str, Any] = {"status": "stuck"}

    async def generate() -> None:
        try:
            await engine.generate([0], _PARAMS)
            found["status"] = "ok"
        except penstock.OverloadedError:
            return  # the steps of other requests are watched
        except penstock.PenstockError as error:
            logger.warning("the probe failed: %s", error)
            found["status"] = "failed"
        group.cancel_scope.cancel()

    async def watch() -> None:
        before = _num_computed(engine)
        while _num_computed(engine) == before:  # noqa: ASYNC110 - the engine's thread sets no event
            await anyio.sleep(_WATCH_INTERVAL)
        found["status"] = "ok"
        group.cancel_scope.cancel()

    with anyio.move_on_after(timeout):
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            group.start_soon(generate)
    if found["status"] == "ok":
        found["probe_seconds"] = round(time.perf_counter() - begin, 6)
    return found


def _num_computed(engine: penstock.Engine) -> int:
    """The number of tokens that steps have computed; a step that fails computes none."""
    stats = engine.stats()
    return stats.prompt_tokens + stats.recomputed_tokens + stats.generation_tokens


def state_of(model: Model, state: State) -> dict[str, Any]:
    """The state of a model, as `/health` and `/metrics` show it."""
    if model.progress is not None:
        return {"status": "loading", "bytes_loaded": model.progress.done, "bytes": model.progress.total}
    status = engine_state(model.engine, state.settings.stall_timeout)
    return {"status": "draining" if state.is_draining and status == "ok" else status}


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
    is_ready = not state.is_draining and all(found["status"] == "ok" for found in states.values())
    status = "draining" if state.is_draining else "ok" if is_ready else "unavailable"
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
