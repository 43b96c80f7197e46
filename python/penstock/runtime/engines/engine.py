"""One engine that the runtime has started: its process, and the requests to it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio

from penstock.runtime.engine import EngineClient
from penstock.runtime.errors import ApiError
from penstock.runtime.metrics import parsed

if TYPE_CHECKING:
    from penstock.runtime.engines.process import EngineProcess
    from penstock.runtime.engines.registry import Record
    from penstock.runtime.settings import RuntimeSettings

__all__ = ["Phase", "RunningEngine"]

#: An engine is active from its start; it is ready when it answers.
Phase: TypeAlias = Literal["active", "sleeping", "restarting", "failed"]

_HEALTH_TIMEOUT = 1.0
_METRICS_TIMEOUT = 0.5
_MAX_OPERATIONS = 128
_OK = 200
#: Statuses of an engine that does not have a route.
_ABSENT = frozenset({403, 404, 405, 501})
#: The counters of the requests that have succeeded, of several versions of vLLM.
_SUCCESSES = ("vllm:request_success", "vllm:num_requests_success", "vllm:e2e_request_latency_seconds")


class RunningEngine:
    """An engine, the state of its process, and the results of the operations on it."""

    def __init__(self, record: Record, settings: RuntimeSettings, key: str) -> None:
        self.record = record
        self.process: EngineProcess | None = None
        self.is_ready = False
        #: The time since which it is ready.
        self.ready_since = 0.0
        self.num_restarts = 0
        #: The time of the next start, while it restarts.
        self.next_start = 0.0
        self.last_error = ""
        self.lock = anyio.Lock()
        self._phase: Phase = "active"
        self._transition = datetime.now(UTC)
        self._results: OrderedDict[str, dict[str, Any]] = OrderedDict()
        host = settings.engines_host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - not of a listener
        endpoint = f"http://[{host}]:{record.port}" if ":" in host else f"http://{host}:{record.port}"
        self.client = EngineClient(replace(settings, engine="vllm", engine_endpoint=endpoint))
        self._authorization = f"Bearer {key}"

    @property
    def phase(self) -> Phase:
        """The phase for the controller."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if phase != self._phase:
            self._phase = phase
            self._transition = datetime.now(UTC)
            self.is_ready = False

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.is_alive()

    async def check(self) -> bool:
        """Whether it answers that it is ready."""
        try:
            reply = await self.client.request("GET", "/health", timeout=_HEALTH_TIMEOUT)
        except ApiError:
            return False
        return reply.status == _OK

    async def operate(
        self, operation: str, target: Phase, path: str, query: dict[str, str]
    ) -> dict[str, Any]:
        """Put the engine to sleep or wake it, once for each id of an operation."""
        async with self.lock:
            if operation in self._results:
                return self._results[operation]
            is_changed = self.phase != target
            if is_changed:
                await self._change(path, query)
                self.phase = target
                self.record.is_asleep = target == "sleeping"
            result = {
                "status": "success",
                "model_name": self.record.model_name,
                "operation_id": operation,
                "applied": is_changed,
                "phase": self.phase,
            }
            self._results[operation] = result
            if len(self._results) > _MAX_OPERATIONS:
                self._results.popitem(last=False)
            return result

    async def _change(self, path: str, query: dict[str, str]) -> None:
        if not self.is_alive() or (self.phase == "active" and not self.is_ready):
            message = f"the engine of {self.record.model_name!r} is not ready: its phase is {self.phase}"
            raise ApiError(409, "ConflictError", message)
        reply = await self.client.request(
            "POST", path, query=query, json={}, authorization=self._authorization
        )
        if reply.status in _ABSENT:
            message = f"the engine of {self.record.model_name!r} has no {path}: status {reply.status}"
            raise ApiError(409, "ConflictError", message)
        if reply.status != _OK:
            message = f"the engine answers with status {reply.status} to {path}: {reply.text()}"
            raise ApiError(502, "ServerError", message)

    def summary(self) -> dict[str, Any]:
        """The item of the list of engines."""
        record = self.record
        return {
            "model_name": record.model_name,
            "port": record.port,
            "ipc_name": record.ipc_name,
            "phase": self.phase,
            "ready": self.is_ready,
            "kv_used_bytes": 0,
            "kv_total_bytes": 0,
        }

    async def snapshot(self) -> dict[str, Any]:
        """The item of the snapshot, with the numbers of requests if the engine has them."""
        claim = self.record.claim_ref
        found = {
            **self.summary(),
            "artifact_url": self.record.artifact_url,
            "claim_ref": None
            if claim is None
            else {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid},
            "alive": self.is_alive(),
            "restart_count": self.num_restarts,
            "last_error": self.last_error,
            "last_transition": self._transition.isoformat(),
            "kv_used_bytes": -1,
            "kv_capacity_bytes": -1,
            "hbm_peak_bytes": 0,
            "request_metrics_observed": False,
            "requests_running": 0,
            "requests_waiting": 0,
        }
        del found["kv_total_bytes"]
        return {**found, **(await self._request_numbers() if self.is_ready else {})}

    async def _request_numbers(self) -> dict[str, Any]:
        try:
            reply = await self.client.request(
                "GET", "/metrics", timeout=_METRICS_TIMEOUT, authorization=self._authorization
            )
            families = parsed(reply.text(1 << 20))
        except Exception:  # noqa: BLE001 - no answer, or one that the parser refuses
            return {}

        def total(name: str) -> int | None:
            family = families.get(name)
            if family is None:
                return None
            values = [
                sample.value
                for sample in family.samples
                if sample.labels.get("model_name") == self.record.model_name
                and sample.name.endswith((name, "_total", "_count"))
            ]
            return int(sum(values)) if values else None

        running, waiting = total("vllm:num_requests_running"), total("vllm:num_requests_waiting")
        if running is None or waiting is None:
            return {}
        found = {"request_metrics_observed": True, "requests_running": running, "requests_waiting": waiting}
        success = next((number for name in _SUCCESSES if (number := total(name)) is not None), None)
        return found if success is None else {**found, "request_success_total": success}
