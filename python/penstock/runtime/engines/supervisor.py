"""Starts, watches, restarts and stops engines."""

from __future__ import annotations

import logging
import random
import secrets
import socket
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import anyio
import anyio.to_thread

from penstock.runtime.engines.commands import command_of, environment_of
from penstock.runtime.engines.engine import Phase, RunningEngine
from penstock.runtime.engines.process import EngineProcess, end_rest
from penstock.runtime.engines.registry import Record, Registry, read_private, write_private
from penstock.runtime.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from penstock.runtime.settings import RuntimeSettings
    from penstock.server.families import Families

__all__ = ["PORTS", "Supervisor"]

logger = logging.getLogger("penstock.runtime")

PORTS = range(20000, 21000)
_INTERVAL = 1.0
_MAX_ARTIFACTS = 1000
_MAX_RESTARTS = 5
_MIN_DELAY, _MAX_DELAY = 2.0, 60.0
#: Seconds after which an engine that was ready all the time has no restarts any more.
_STABLE = 600.0
#: Seconds for an engine to end, and between two looks at it.
_END_TIMEOUT = 10.0
_END_INTERVAL = 0.05


class Supervisor:
    """The engines that the runtime has started. `clock` and `sleep` are those of the event loop's time."""

    def __init__(
        self,
        settings: RuntimeSettings,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.settings = settings
        self.engines: dict[str, RunningEngine] = {}
        #: URLs of engines that were ready, the last one at the end: their models are on this machine.
        self.artifacts: dict[str, None] = {}
        self._clock = clock
        self._sleep = sleep
        self._registry = Registry(settings.registry_path)
        self._key_file = Path(settings.registry_path).with_name("engines.key")
        self._key = ""
        self._has_registry = False
        self._adoptions: Counter[str] = Counter()
        self._operations: Counter[tuple[str, str]] = Counter()
        #: The last error in the log, by place: some repeat each second.
        self._logged: dict[str, str] = {}

    async def run(self) -> None:
        """Adopt the engines of an earlier runtime when that has ended, and watch all."""
        while True:
            try:
                self.adopt()
                await self.tick()
            except Exception as error:  # the engines are still watched
                if self._is_new("run", error):
                    logger.exception("the engines cannot be watched")
            await self._sleep(_INTERVAL)

    def adopt(self) -> None:
        """Continue with the engines in the registry; those that have ended are started again.

        Nothing happens while another runtime has the registry, or if this one has it already.
        """
        if self._has_registry or not self._registry.exists() or not self._take_registry():
            return
        for record in self._registry.load():
            engine = self._new(record)
            self.engines[record.model_name] = engine
            engine.process = EngineProcess.adopt(record.pid, record.start_time)
            if engine.process is None:
                end_rest(record.pid, record.start_time)
                self._adoptions["restart_scheduled"] += 1
                engine.phase = "restarting"
                engine.next_start = self._clock()
            else:
                self._adoptions["success"] += 1
                engine.phase = "sleeping" if record.is_asleep else "active"
            logger.info("engine of %s: phase %s", record.model_name, engine.phase)

    async def tick(self) -> None:
        """Look at each engine once."""
        async with anyio.create_task_group() as group:
            for engine in list(self.engines.values()):
                group.start_soon(self._watch, engine)

    async def _watch(self, engine: RunningEngine) -> None:
        try:
            await self._look_at(engine)
        except Exception:  # the others are still watched
            logger.exception("engine of %s", engine.record.model_name)

    async def _look_at(self, engine: RunningEngine) -> None:
        if engine.phase == "restarting":
            if self._clock() >= engine.next_start:
                engine.num_attempts += 1
                self._start(engine)
            return
        if engine.phase in ("failed", "stopping"):
            return
        if not engine.is_alive():
            status = engine.process.status if engine.process is not None else None
            ending = "" if status is None else f" with status {status}: the log of the runtime has its output"
            self._restart_later(engine, f"the process has ended{ending}")
            return
        if engine.phase == "active":
            is_ready = await engine.check()
            if engine.phase != "active" or not engine.is_alive():
                return  # it changed meanwhile
            if is_ready and not engine.is_ready:
                engine.ready_since = self._clock()
                self._remember(engine.record.artifact_url)
            engine.is_ready = is_ready
            if is_ready and self._clock() - engine.ready_since >= _STABLE:
                engine.num_restarts = 0

    def _start(self, engine: RunningEngine) -> None:
        record = engine.record
        engine.phase = "active"
        record.is_asleep = False
        try:
            engine.process = EngineProcess.start(record.command, environment_of(record, self.settings))
        except OSError as error:
            self._restart_later(engine, f"the command cannot be run: {error.strerror}")
            return
        record.pid, record.start_time = engine.process.pid, engine.process.start_time
        logger.info("engine of %s: started, process %d, port %d", record.model_name, record.pid, record.port)
        self._save()

    def _restart_later(self, engine: RunningEngine, reason: str) -> None:
        if engine.process is not None:
            engine.process.signal(force=True)  # what is left of its group
        engine.process = None
        engine.last_error = reason
        engine.record.pid = 0
        name = engine.record.model_name
        if engine.num_restarts >= _MAX_RESTARTS:
            engine.phase = "failed"
            engine.num_failures += 1
            logger.error("engine of %s: failed after %d restarts: %s", name, _MAX_RESTARTS, reason)
        else:
            delay = min(_MIN_DELAY * 2**engine.num_restarts, _MAX_DELAY)
            engine.num_restarts += 1
            engine.hbm_bytes = 0
            engine.phase = "restarting"
            engine.next_start = self._clock() + delay
            logger.warning("engine of %s: %s, restart in %g s", name, reason, delay)
        self._save()

    def _take_registry(self) -> bool:
        try:
            is_locked = self._registry.lock()
            if is_locked:
                self._admin_key()  # all engines need it
        except OSError as error:
            self._registry.unlock()
            if self._is_new("registry", error):
                logger.warning("the registry cannot be used: %s", error)
            return False
        self._has_registry = is_locked
        return is_locked

    def _is_new(self, place: str, error: Exception) -> bool:
        """Whether an error is not the last one of this place."""
        text = repr(error)
        is_new = self._logged.get(place) != text
        self._logged[place] = text
        return is_new

    def _save(self) -> None:
        try:
            self._registry.save([engine.record for engine in self.engines.values()])
        except OSError as error:
            logger.warning("the registry cannot be written: %s", error)

    def _new(self, record: Record) -> RunningEngine:
        return RunningEngine(record, self.settings, self._admin_key())

    def _remember(self, url: str) -> None:
        self.artifacts.pop(url, None)
        self.artifacts[url] = None
        if len(self.artifacts) > _MAX_ARTIFACTS:
            del self.artifacts[next(iter(self.artifacts))]

    # ---- changes

    def activate(self, record: Record, arguments: list[str], model: str) -> RunningEngine:
        """Start an engine, unless the same one is there; its command is added to the record."""
        self.adopt()
        if not self._has_registry and not self._take_registry():
            message = "the registry of engines cannot be used: another runtime may have it"
            raise ApiError(503, "UnavailableError", message)
        name = record.model_name
        key_file = str(self._key_file.resolve())
        record.command = command_of(record, model, key_file, self.settings) + arguments
        found = self.engines.get(name)
        if found is not None:
            old = found.record
            port = f"--port={old.port}"
            is_same = old.command == [*record.command, port] and record.port in (0, old.port)
            if not is_same:
                message = f"the model {name!r} has an engine with other options: deactivate it first"
                raise ApiError(409, "ConflictError", message, param="model_name")
            if found.phase == "failed":
                found.num_restarts = 0
                self._start(found)
            return found
        if any(engine.record.ipc_name == record.ipc_name for engine in self.engines.values()):
            message = f"the engine of another model has ipc_name={record.ipc_name!r}"
            raise ApiError(409, "ConflictError", message, param="ipc_name")
        if len(self.engines) >= self.settings.max_engines:
            limit = self.settings.max_engines
            raise ApiError(429, "OverloadedError", f"too many engines: the limit is {limit}")
        record.port = self._free_port(record.port)
        record.command.append(f"--port={record.port}")
        engine = self.engines[name] = self._new(record)
        self._start(engine)
        return engine

    async def deactivate(self, name: str) -> None:
        """Stop an engine; an unknown one has been stopped."""
        engine = self.engines.get(name)
        if engine is None:
            return
        async with engine.lock:
            engine.phase = "stopping"
            await self._stop(engine)
        # Until now `close`, or the next runtime, could end it if this was interrupted.
        self.engines.pop(name, None)
        self._save()

    async def _stop(self, engine: RunningEngine) -> None:
        process = engine.process
        if process is not None:
            process.signal(force=False)
            for _ in range(round(_END_TIMEOUT / _END_INTERVAL)):
                if not process.is_alive():
                    break
                await self._sleep(_END_INTERVAL)
            process.signal(force=True)
            with anyio.move_on_after(_END_TIMEOUT):
                await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        await engine.client.close()

    def engine(self, name: str) -> RunningEngine:
        """The engine of this model."""
        engine = self.engines.get(name)
        if engine is None:
            message = f"the model {name[:128]!r} has no engine"
            raise ApiError(404, "NotFoundError", message, param="model_name", fields={"detail": message})
        return engine

    def save(self) -> None:
        """Write the registry after a change of an engine."""
        self._save()

    async def close(self) -> None:
        """Stop all engines. Those of a runtime that is killed continue."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for name in list(self.engines):
                    group.start_soon(self.deactivate, name)
        self._registry.unlock()
        self._has_registry = False

    @asynccontextmanager
    async def counted(self, action: str) -> AsyncIterator[None]:
        """Count an operation by its result."""
        try:
            yield
        except BaseException:
            self._operations[action, "failed"] += 1
            raise
        self._operations[action, "applied"] += 1

    def _admin_key(self) -> str:
        """The key of all engines, in a file that only this user can read."""
        if not self._key:
            self._key = (read_private(self._key_file) or b"").decode(errors="replace").strip()
        if not self._key:
            self._key = secrets.token_hex(32)
            write_private(self._key_file, f"{self._key}\n".encode())
        return self._key

    def _free_port(self, wanted: int) -> int:
        taken = {engine.record.port for engine in self.engines.values()}
        # At random: the next free one can be taken by another process before the engine listens.
        for port in (wanted,) if wanted else random.sample(PORTS, len(PORTS)):
            if port not in taken and _is_free(self.settings.engines_host, port):
                return port
        if wanted:
            raise ApiError(409, "ConflictError", f"the port {wanted} is in use", param="port")
        raise ApiError(503, "OverloadedError", "no port is free")

    def write(self, families: Families) -> None:
        """Add the numbers of the engines to those of a scrape."""
        if not self.settings.max_engines:
            return
        prefix = "aibrix:modelclaim_"
        text = "Engines that the runtime has started."
        families.gauge(f"{prefix}models_resident", text, {}, len(self.engines))
        phases = Counter[str](engine.phase for engine in self.engines.values())
        for phase in get_args(Phase):
            text = "Engines that the runtime has started, by phase."
            families.gauge(f"{prefix}engine_state", text, {"phase": phase}, phases[phase])
        for engine in self.engines.values():
            engine.write(families, prefix)
        for result, count in self._adoptions.items():
            text = "Engines of an earlier runtime, by what became of them."
            families.counter(f"{prefix}engine_re_adoptions", text, {"result": result}, count)
        for (action, result), count in self._operations.items():
            text = "Operations on engines."
            labels = {"action": action, "result": result}
            families.counter(f"{prefix}lifecycle_operations", text, labels, count)


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError:
        return False
    return True
