"""One engine that the runtime has started: its process, and the requests to it."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio
import anyio.to_thread

from penstock.runtime.engine import EngineClient
from penstock.runtime.engines.kvcached import Segment, read_segment, set_limit
from penstock.runtime.errors import ApiError
from penstock.runtime.exposition import parsed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from penstock.runtime.engines.accelerators import Accelerator
    from penstock.runtime.engines.process import EngineProcess
    from penstock.runtime.engines.registry import Record
    from penstock.runtime.settings import RuntimeSettings
    from penstock.server.families import Families

__all__ = ["Phase", "RunningEngine"]

#: An engine is active from its start; it is ready when it answers.
Phase: TypeAlias = Literal["active", "sleeping", "restarting", "failed", "stopping"]

_HEALTH_TIMEOUT = 1.0
_METRICS_TIMEOUT = 0.5
_MAX_OPERATIONS = 128
_OK = 200
#: Statuses of an engine that does not have a route.
_ABSENT = frozenset({403, 404, 405, 501})
#: The numbers of running and of waiting requests: of vLLM, Penstock, and of SGLang.
_VLLM_NUMBERS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_SGLANG_NUMBERS = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
#: The counters of the requests that have succeeded, of several versions of engines.
_SUCCESSES = (
    *("vllm:request_success", "vllm:num_requests_success", "vllm:e2e_request_latency_seconds"),
    *("sglang:num_requests", "sglang:e2e_request_latency_seconds"),
)


class RunningEngine:
    """An engine, the state of its process, and the results of the operations on it."""

    def __init__(self, record: Record, settings: RuntimeSettings, key: str) -> None:
        self.record = record
        self.process: EngineProcess | None = None
        self.is_ready = False
        #: The time since which it is ready.
        self.ready_since = 0.0
        self.num_restarts = 0
        #: Restarts and failures since it was activated, for the counters.
        self.num_attempts = self.num_failures = 0
        #: Largest memory of the process on one GPU that a snapshot has seen.
        self.hbm_bytes = 0
        #: The time of the next start, while it restarts.
        self.next_start = 0.0
        self.last_error = ""
        self.lock = anyio.Lock()
        self._phase: Phase = "active"
        self._transition = datetime.now(UTC)
        #: By action and id.
        self._results: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        #: The last limit that was requested, the last one that was set, and the operations by result.
        self._requested_limit: int | None = None
        self._limit: int | None = None
        self._limit_results: Counter[str] = Counter()
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

    async def sleep(self, operation: str, level: int) -> dict[str, Any]:
        """Free the memory of the model, once for each id of an operation."""
        change = partial(self._change, "sleeping", "/sleep", {"level": str(level)})
        return await self._once(("sleep", operation), change)

    async def wake(self, operation: str) -> dict[str, Any]:
        """Load the model again, once for each id of an operation."""
        return await self._once(("wake", operation), partial(self._change, "active", "/wake_up", {}))

    async def limit_kv_cache(self, operation: str, limit: int) -> dict[str, Any]:
        """Set the limit of the KV cache in bytes, once for each id of an operation."""
        return await self._once(("kv-limit", operation), partial(self._set_limit, limit))

    async def _once(self, key: tuple[str, str], change: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """The result of an operation; a stored one if it was made before."""
        async with self.lock:
            if key not in self._results:
                result = {
                    "status": "success",
                    "model_name": self.record.model_name,
                    "operation_id": key[1],
                    "applied": await change(),
                }
                self._results[key] = {**result, "phase": self.phase}
                if len(self._results) > _MAX_OPERATIONS:
                    self._results.popitem(last=False)
            return self._results[key]

    async def _change(self, target: Phase, path: str, query: dict[str, str]) -> bool:
        """Put the engine to sleep or wake it; whether it was in another phase."""
        if self.phase == target:
            return False
        name = self.record.model_name
        if not self.is_alive() or (self.phase == "active" and not self.is_ready):
            message = f"the engine of {name!r} is not ready: its phase is {self.phase}"
            raise ApiError(409, "ConflictError", message)
        if self.record.engine == "sglang":
            raise ApiError(409, "ConflictError", f"the engine of {name!r} cannot sleep: it is SGLang")
        reply = await self.client.request(
            "POST", path, query=query, json={}, authorization=self._authorization
        )
        if reply.status in _ABSENT:
            message = f"the engine of {name!r} has no {path}: status {reply.status}"
            raise ApiError(409, "ConflictError", message)
        if reply.status != _OK:
            message = f"the engine answers with status {reply.status} to {path}: {reply.reason()}"
            raise ApiError(502, "ServerError", message)
        self.phase = target
        self.record.is_asleep = target == "sleeping"
        return True

    async def _set_limit(self, limit: int) -> bool:
        self._requested_limit = limit
        try:
            await set_limit(self.record.ipc_name, limit)
        except ApiError:
            self._limit_results["failed"] += 1
            raise
        self._limit_results["applied"] += 1
        self._limit = limit
        return True

    def summary(self) -> dict[str, Any]:
        """The item of the list of engines."""
        record = self.record
        segment = self._segment()
        return {
            "model_name": record.model_name,
            "port": record.port,
            "ipc_name": record.ipc_name,
            "phase": self.phase,
            "ready": self.is_ready,
            "kv_used_bytes": segment.used,
            "kv_total_bytes": segment.capacity,
        }

    def _segment(self) -> Segment:
        """The KV cache; zeros if kvcached has none."""
        return read_segment(self.record.ipc_name) or Segment(0, 0)

    async def snapshot(self, accelerators: Sequence[Accelerator]) -> dict[str, Any]:
        """The item of the snapshot, with the numbers of requests if the engine has them."""
        claim = self.record.claim_ref
        pid = self.record.pid
        used = max((found.used_by(pid) for found in accelerators), default=0) if pid else 0
        self.hbm_bytes = max(self.hbm_bytes, used)
        found = self.summary()
        found = {
            **found,
            "artifact_url": self.record.artifact_url,
            "claim_ref": None
            if claim is None
            else {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid},
            "alive": self.is_alive(),
            "restart_count": self.num_restarts,
            "last_error": self.last_error,
            "last_transition": self._transition.isoformat(),
            "kv_capacity_bytes": found["kv_total_bytes"],
            "hbm_peak_bytes": self.hbm_bytes,
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
            families = await anyio.to_thread.run_sync(parsed, reply.text(1 << 20))
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
            number = sum(values) if values else math.nan
            return int(number) if math.isfinite(number) else None

        names = _SGLANG_NUMBERS if self.record.engine == "sglang" else _VLLM_NUMBERS
        running, waiting = map(total, names)
        if running is None or waiting is None:
            return {}
        found = {"request_metrics_observed": True, "requests_running": running, "requests_waiting": waiting}
        success = next((number for name in _SUCCESSES if (number := total(name)) is not None), None)
        return found if success is None else {**found, "request_success_total": success}

    def write(self, families: Families, prefix: str) -> None:
        """Add the numbers of this engine to those of a scrape."""
        labels = {"model": self.record.model_name}
        text = "Restarts of an engine that the runtime has started."
        families.counter(f"{prefix}engine_restart_attempts", text, labels, self.num_attempts)
        text = "Failures of an engine after its last restart."
        families.counter(f"{prefix}engine_restart_budget_exhausted", text, labels, self.num_failures)
        segment = self._segment()
        families.gauge(f"{prefix}kv_used_bytes", "KV cache of kvcached in use.", labels, segment.used)
        families.gauge(f"{prefix}kv_total_bytes", "KV cache of kvcached.", labels, segment.capacity)
        text = "Largest memory of an engine's process on one GPU that a snapshot has seen."
        families.gauge(f"{prefix}hbm_peak_bytes", text, labels, self.hbm_bytes)
        for name, value in (("requested", self._requested_limit), ("applied", self._limit)):
            if value is not None:
                text = f"Last limit of the KV cache that was {name}."
                families.gauge(f"{prefix}kv_limit_{name}_bytes", text, labels, value)
        for result, count in self._limit_results.items():
            text = "Limits of the KV cache that were requested, by result."
            families.counter(f"{prefix}kv_limit_operations", text, {**labels, "result": result}, count)
