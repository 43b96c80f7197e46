"""Keeps the models of a server under their names, with their adapters and the probe of each."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

import penstock
from penstock._chat_sampling import CHAT_MIN_P, CHAT_TEMPERATURE
from penstock._client import TurnLimiter
from penstock.server.errors import ApiError
from penstock.server.measures import RequestMeasures

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["Model", "Models", "Probe", "Progress", "Selection"]

logger = logging.getLogger("penstock.server")

#: After all other requests, so that it preempts none; it leaves no entry in the prefix cache.
_PROBE_PARAMS = penstock.SamplingParams(
    max_tokens=1, temperature=0.0, priority=2**31 - 1, use_prefix_cache=False
)
#: Seconds between two looks at the steps of an engine.
_WATCH_INTERVAL = 0.02
#: Seconds for which the result of a probe holds, so that probes of many clients cost little.
_PROBE_MAX_AGE = 1.0
#: The prompts of batches that are started at the same time; long texts wait for their tokenisation.
_MAX_OPENINGS = 4


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
        if time.monotonic() - self._end >= _PROBE_MAX_AGE:
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
            await engine.generate([0], _PROBE_PARAMS)
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


class Progress:
    """Bytes of a model that were loaded, and bytes in all."""

    def __init__(self) -> None:
        self.done = self.total = 0

    def __call__(self, done: int, total: int) -> None:
        """Called by the engine while it loads."""
        self.done, self.total = done, total


class Source(NamedTuple):
    """The origin of an adapter: its path as given and as the engine has it, and the time of the load."""

    root: str
    path: str
    created: int


class Model:
    """An engine under a name, which a client gives as `model`."""

    def __init__(self, name: str, engine: penstock.Engine) -> None:
        self.name = name
        self.engine = engine
        self.created = int(time.time())
        #: While the server loads the model.
        self.progress: Progress | None = None
        self.probe = Probe()
        #: Requests with prompts that the engine has no room for, and that try again.
        self.num_retrying = 0
        #: The unfinished requests with several prompts, by client, and the turns to start such a prompt.
        self.num_batches = Counter[int | None]()
        self.openings = TurnLimiter(_MAX_OPENINGS)
        #: Adapters that the server loads before the model is ready: their paths by name.
        self.modules: Mapping[str, str] = {}
        #: Of adapters that the server has loaded; the one that was used last is the last one.
        self._sources: dict[str, Source] = {}
        #: Of adapters that made room for others, and are loaded again for a request that names them.
        self.evicted: dict[str, Source] = {}

    @property
    def max_model_len(self) -> int | None:
        """The length of the longest sequence, unless the engine was never open."""
        try:
            return self.engine.info.max_model_len
        except penstock.EngineStoppedError:
            return None

    @property
    def chat_sampling(self) -> dict[str, float] | None:
        """The sampling parameters of the chat page; `None` if the model's files have some, or are unknown."""
        try:
            has_defaults = self.engine.info.has_sampling_defaults
        except penstock.EngineStoppedError:
            return None
        return None if has_defaults else {"temperature": CHAT_TEMPERATURE, "min_p": CHAT_MIN_P}

    @property
    def adapters(self) -> dict[str, penstock.Adapter]:
        """The adapters by name; none if the engine was never open."""
        try:
            return self.engine.adapters
        except penstock.EngineStoppedError:
            return {}

    async def load_adapter(self, name: str, path: str, *, root: str, replace: bool = False) -> None:
        """Load an adapter; `root` is its path as it was given."""
        adapter = await self.engine.load_adapter(name, path, replace=replace)
        known = self._sources.get(name)
        if known is None or known.path != adapter.path:
            self._sources[name] = Source(root, adapter.path, int(time.time()))
        self.evicted.pop(name, None)

    async def unload_adapter(self, name: str, *, force: bool) -> None:
        """Remove an adapter; returns when its requests have ended."""
        self._sources.pop(name, None)
        if self.evicted.pop(name, None) is None:
            await self.engine.unload_adapter(name, force=force)

    def use_adapter(self, name: str) -> None:
        """A request uses an adapter, so others are evicted before it."""
        if name in self._sources:
            self._sources[name] = self._sources.pop(name)

    async def evict_adapter(self, used: Collection[str | None]) -> bool:
        """Let an adapter make room, the one used least recently that has no requests; false if there is none.

        `used` are the names of adapters of requests that may not have started in the engine.
        """
        adapters = self.adapters
        for name in self._sources:
            adapter = adapters.get(name)
            if adapter is not None and name not in used and not adapter.running + adapter.waiting:
                self.evicted[name] = self._sources.pop(name)
                await self.engine.unload_adapter(name)
                return True
        return False

    async def restore_adapter(self, name: str) -> None:
        """Load an adapter again that has made room for others."""
        if (source := self.evicted.get(name)) is None:
            return  # another request has loaded it, or it was unloaded
        await self.engine.load_adapter(name, source.path)
        if self.evicted.get(name) is source:
            self._sources[name] = self.evicted.pop(name)
        elif self._sources.get(name) is not source:  # it was unloaded meanwhile
            await self.engine.unload_adapter(name)

    @property
    def adapter_names(self) -> list[str]:
        """The adapters that requests can name, those that are loaded first."""
        return list(dict.fromkeys((*self.adapters, *self.evicted)))

    def source(self, name: str) -> Source:
        """The origin of an adapter, which an application can have loaded itself."""
        adapter = self.adapters.get(name)
        if adapter is None:
            return self.evicted[name]
        known = self._sources.get(name)
        if known is None or known.path != adapter.path:
            return Source(adapter.path, adapter.path, self.created)
        return known

    @cached_property
    def measures(self) -> RequestMeasures:
        """Distributions of the requests that have ended; the engine has been opened."""
        return RequestMeasures(self.engine.info.max_model_len)


class Selection(NamedTuple):
    """The model that a request names, by its own name or that of one of its adapters."""

    model: Model
    name: str
    #: The name of the adapter.
    adapter: str | None = None


class Models(Mapping[str, Model]):
    """The models by name; several names can have one engine, and so one model."""

    def __init__(self, engines: Mapping[str, penstock.Engine]) -> None:
        if not engines:
            raise ValueError("engines is empty: at least one engine is required")
        by_engine: dict[int, Model] = {}
        self._by_name = {
            name: by_engine.setdefault(id(engine), Model(name, engine)) for name, engine in engines.items()
        }

    def __getitem__(self, name: str) -> Model:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def is_loading(self) -> bool:
        """Whether the server has not opened a model yet."""
        return all(model.progress is not None for model in self._by_name.values())

    def select(self, name: str | None) -> Selection:
        """The model that a request names."""
        models = self.selected(None)
        if not name:
            if len(models) > 1:
                raise ApiError(400, f"model is missing: it must be {self._names()}", param="model")
            return next(Selection(model, name) for name, model in self._by_name.items())
        if (model := self._by_name.get(name)) is not None:
            return Selection(model, name)
        for model in models:
            if name in model.adapter_names:
                return Selection(model, name, name)
        raise self._unknown(name)

    def selected(self, name: str | None) -> list[Model]:
        """The model of this name, which is none of an adapter, or all models."""
        if name is None:
            return list(dict.fromkeys(self._by_name.values()))
        if (model := self._by_name.get(name)) is None:
            raise self._unknown(name)
        return [model]

    def _unknown(self, name: str) -> ApiError:
        message = f"the model {name[:64]!r} does not exist: model must be {self._names()}"
        return ApiError(404, message, param="model", code="model_not_found")

    def _names(self) -> str:
        adapters = [name for model in self.selected(None) for name in model.adapter_names]
        return "one of " + ", ".join(map(repr, (*self._by_name, *adapters)))
