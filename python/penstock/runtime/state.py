"""The state of the runtime: everything that the routes share."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from penstock.runtime.access import Access
from penstock.runtime.adapters import Adapters
from penstock.runtime.downloads import Downloads
from penstock.runtime.engine import EngineClient
from penstock.runtime.engines.supervisor import Supervisor
from penstock.runtime.errors import ApiError
from penstock.runtime.measures import Measures
from penstock.runtime.operations import Operations

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from anyio.abc import TaskGroup

    from penstock.runtime.settings import RuntimeSettings

__all__ = ["State"]

#: Requests that change something at the same time, those that wait for each other included.
_MAX_CHANGES = 64
#: Requests at the same time about one of the engines that the runtime starts.
_MAX_PER_ENGINE = 16
#: Scrapes at the same time with the engine's key; the same limit holds for those without it.
_MAX_SCRAPES = 32
#: Probes of the engine at the same time. They share one request.
_MAX_PROBES = 1024
#: Requests at the same time for lists of downloaded models.
_MAX_LISTS = 32
_OK = 200


class State:
    """The engine's client, adapters, downloads and numbers of a runtime."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.settings = settings
        self.access = Access(settings)
        self.engine = EngineClient(settings)
        #: Scrapes and probes have their own connections, so slow changes do not delay them.
        self.probes = EngineClient(settings)
        self.measures = Measures()
        #: The thread that parses and formats metrics, which needs the interpreter.
        self.metrics_threads = anyio.CapacityLimiter(1)
        self.downloads = Downloads(settings)
        self.adapters = Adapters(settings, self.engine, self.downloads)
        self.supervisor = Supervisor(settings)
        self.engine_operations = Operations(_MAX_PER_ENGINE)
        self.scrapes = Operations(_MAX_SCRAPES)
        self.health = Operations(_MAX_PROBES)
        self.lists = Operations(_MAX_LISTS)
        self._operations = (
            self.adapters.operations,
            self.engine_operations,
            self.scrapes,
            self.health,
            self.lists,
        )
        #: Requests that change something now.
        self.num_changes = 0
        #: Whether the lifespan has ended with an error: nothing works any more.
        self.has_failed = False

    @contextmanager
    def change(self) -> Iterator[None]:
        """Count a request that changes something; raises if there are too many."""
        if self.num_changes >= _MAX_CHANGES:
            message = f"too many requests at the same time: the limit is {_MAX_CHANGES}"
            raise ApiError(503, "OverloadedError", message)
        self.num_changes += 1
        try:
            yield
        finally:
            self.num_changes -= 1

    @asynccontextmanager
    async def lifespan(self, _application: Any) -> AsyncIterator[None]:
        """Run downloads in the background until the application ends; the rest of them resumes later."""
        try:
            async with anyio.create_task_group() as group:
                self._start_in(group)
                group.start_soon(anyio.to_thread.run_sync, self.engine.prepare)
                group.start_soon(self.supervisor.run)
                yield
                self.stop()
                group.cancel_scope.cancel()
        except Exception:
            self.has_failed = True
            raise
        finally:
            await self.supervisor.close()
            await self.engine.close()
            await self.probes.close()

    def _start_in(self, group: TaskGroup) -> None:
        """Start downloads and operations in this group."""
        self.downloads.group = group
        for operations in self._operations:
            operations.group = group

    def stop(self) -> None:
        """End the operations, so that the requests that wait for them get an error, and start no more."""
        self.downloads.group = None
        for operations in self._operations:
            operations.stop()

    async def is_engine_up(self) -> bool:
        """Whether the engine answers that it is ready. Requests at the same time share one probe."""
        return await self.health.join("engine", None, self._probe)

    async def _probe(self) -> bool:
        try:
            reply = await self.probes.request(
                "GET",
                "/health",
                authorization=self.access.engine_authorization,
                timeout=self.settings.scrape_timeout,
            )
        except ApiError:
            return False
        return reply.status == _OK
