"""The state of a server: its models and its unfinished requests."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import penstock
from penstock._chat_sampling import CHAT_MIN_P, CHAT_TEMPERATURE
from penstock._client import MAX_WAITING, TurnLimiter
from penstock.server.adapters import Adapters
from penstock.server.errors import ApiError, api_error, prompt_error
from penstock.server.hosts import Hosts
from penstock.server.keys import Keys
from penstock.server.measures import HttpMeasures, RequestMeasures
from penstock.server.probes import Probe
from penstock.server.responses.store import ResponseStore
from penstock.server.templates import TemplateProcess
from penstock.server.threads import Threads
from penstock.server.tracing import Tracer
from penstock.server.usage import usage_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from penstock.server.batch.batches import Batches
    from penstock.server.settings import ServerSettings

__all__ = ["Call", "Generation", "Model", "Progress", "Selection", "State"]

#: The largest body by default: for each token of the longest sequence, with a lower and an upper bound.
_BODY_BYTES_PER_TOKEN = 1 << 10
_MIN_BODY_BYTES = 2 << 20
_MAX_BODY_BYTES = 32 << 20
#: The prompts of batches that are started at the same time; long texts wait for their tokenisation.
_MAX_OPENINGS = 4


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


class Cancellable(Protocol):
    """A request of the engine, or a scope around one."""

    def cancel(self) -> object:
        """End it now."""


@dataclass(frozen=True)
class Call:
    """The computation of a generating HTTP request: the same for each of its prompts."""

    prompts: Sequence[penstock.Prompt]
    params: penstock.SamplingParams
    #: The options of the chat template, if the prompt is a chat.
    template: Mapping[str, Any] = field(default_factory=dict)
    #: Whether generated tokens are returned, and count: the engine has no request without one.
    returns_tokens: bool = True

    @property
    def num_outputs(self) -> int:
        """The number of outputs that the engine computes, those that are not returned included."""
        return len(self.prompts) * max(self.params.n, self.params.best_of or 1, self.params.num_beams)


class Ended(NamedTuple):
    """The numbers of a request of the engine that has ended, without its output."""

    usage: penstock.Usage
    timings: penstock.Timings
    finish_reason: str | None


class Generation:
    """One generating HTTP request, which can have several requests of the engine."""

    def __init__(self, prefix: str, model: Model, name: str, call: Call, key: bytes, prompt: str) -> None:
        #: Unpredictable, because it allows to abort the request.
        self.id = prefix + secrets.token_hex(16)
        self.created = int(time.time())
        self.model = model
        #: The name by which the client called the model.
        self.name = name
        self.call = call
        #: The digest of the API key of the request.
        self.key = key
        #: The field of the request that makes the prompt.
        self._prompt = prompt
        self.is_aborted = False
        self._parts: list[Cancellable] = []
        #: Requests of the engine that have ended with a result.
        self.ended: list[Ended] = []

    def add(self, part: Cancellable) -> None:
        """Cancel this part of the work when the request is aborted."""
        self._parts.append(part)
        if self.is_aborted:
            part.cancel()

    def error_of(self, error: BaseException, place: str | None = None) -> ApiError:
        """The response for an exception. `place` is that of the prompt in its field, if there are several.

        A request with `force` may have unloaded the adapter.
        """
        if isinstance(error, penstock.InvalidRequestError) and error.field == "prompt":
            return prompt_error(error, place or self._prompt, self.model.max_model_len)
        name = self.call.params.adapter
        is_unloaded = name is not None and str(error).endswith(" was unloaded")
        if is_unloaded and isinstance(error, penstock.GenerationError):
            return ApiError(503, f"the adapter {name!r} was unloaded", code="adapter_unloaded", retry_after=1)
        return api_error(error)

    def end(self, ended: penstock.Result | penstock.Request) -> None:
        """Count a request of the engine that has ended with a result."""
        self.model.measures.add(ended, self.call.params)
        self.ended.append(Ended(ended.usage, ended.timings, ended.finish_reason))

    def requests(self) -> Sequence[Ended | penstock.Request]:
        """The requests of the engine, for their numbers so far."""
        return [part for part in self._parts if isinstance(part, penstock.Request)] or self.ended

    def usage(self) -> dict[str, Any]:
        """The token counts so far, as the response has them."""
        usages = (request.usage for request in self.requests())
        return usage_of(*usages, completion_tokens=None if self.call.returns_tokens else 0)

    def abort(self) -> None:
        """Cancel all parts; their output so far ends with the finish reason `abort`."""
        self.is_aborted = True
        for part in self._parts:
            part.cancel()


class State:
    """Everything that the routes of a server share."""

    def __init__(self, engines: Mapping[str, penstock.Engine], settings: ServerSettings) -> None:
        if not engines:
            raise ValueError("engines is empty: at least one engine is required")
        models: dict[int, Model] = {}
        self.settings = settings
        self.keys = Keys(settings.api_keys)
        self.admin_keys = Keys(settings.admin_api_keys)
        #: Whether the prefix cache is separated by key: not if all requests have the same one, or none.
        is_shared = settings.share_prefix_cache or len({*self.keys, *self.admin_keys}) == 1
        self._separates_keys = bool(self.keys) and not is_shared
        self._secret = secrets.token_bytes(32)
        self._num_outputs_by_key: Counter[bytes] = Counter()
        #: By name; several names can have one engine.
        self.models = {
            name: models.setdefault(id(engine), Model(name, engine)) for name, engine in engines.items()
        }
        self.generations: dict[str, Generation] = {}
        self.adapters = Adapters(list(models.values()), list(self.models), self.generations, settings)
        self.hosts = Hosts(settings)
        #: Threads that decode large bodies and that format metrics; they need the interpreter. Bodies that
        #: wait are bounded by their bytes.
        self.body_threads = Threads(1)
        self.metrics_threads = Threads(1, "scrapes")
        #: Threads that tokenise outside of the engine.
        self.tokenizer_threads = Threads(2, "tokenisations")
        #: The process that renders templates of requests, and a thread for each task that can wait for it.
        self.templates = TemplateProcess()
        self.template_threads = Threads(MAX_WAITING, "chat templates")
        #: Threads that make responses of results, and never wait for tokenisation.
        self.response_threads = Threads(2)
        #: Names of request fields that the log has as unknown.
        self.unknown_fields: set[str] = set()
        self.responses = ResponseStore(settings)
        #: If the settings have a folder for files.
        self.batches: Batches | None = None
        self.http = HttpMeasures()
        endpoint = settings.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint)
        #: Unfinished generating HTTP requests.
        self.num_active = 0
        #: Bytes of the bodies of unfinished requests and responses, and those rejected for their limit.
        self.num_body_bytes = self.num_rejected_bodies = 0
        self._num_body_bytes_by_client = Counter[int]()
        #: Whether new requests are refused, because the server ends.
        self.is_draining = False

    def max_body_bytes(self) -> int:
        """The setting, or a bound for the largest of the models that are open."""
        if self.settings.max_body_bytes is not None:
            return self.settings.max_body_bytes
        lengths = [model.max_model_len for model in self.models.values()]
        longest = max((length for length in lengths if length is not None), default=None)
        if longest is None:  # all requests get status 503
            return _MAX_BODY_BYTES
        return min(max(longest * _BODY_BYTES_PER_TOKEN, _MIN_BODY_BYTES), _MAX_BODY_BYTES)

    @property
    def max_outputs(self) -> int:
        """Maximum number of outputs of a request."""
        limits = (self.settings.max_outputs, self.settings.max_outputs_per_key)
        return min(limit for limit in limits if limit is not None)

    @property
    def max_prompts(self) -> int:
        """Maximum number of prompts of a request; each has an output."""
        return min(self.settings.max_prompts, self.max_outputs)

    def enter(self) -> None:
        """Count a generating request; raises if none is accepted any more."""
        if self.is_draining:
            raise ApiError(503, "the server is stopping", code="unavailable", retry_after=5)
        self.num_active += 1

    def take_body_bytes(self, client: int, size: int, num_read: int) -> None:
        """Count bytes of a body, its values or its response, of which a number was counted before.

        Raises if those of all unfinished requests are too many, or those of the client's requests: of the
        bytes that the other clients leave, a quarter is for clients with a single body. These requests can be
        sent again later. One that needs more than the limit alone is refused with status 413.
        """
        limit, own = self.settings.max_total_body_bytes, self._num_body_bytes_by_client[client]
        if num_read + size > limit:
            self.num_rejected_bodies += 1
            message = "the body and the response of this request are too large"
            raise ApiError(413, f"{message}: the limit is {limit} bytes")
        if self.num_body_bytes + size > limit:
            self.num_rejected_bodies += 1
            message = "the bodies of all unfinished requests and responses are too large"
            message = f"{message}: the limit is {limit} bytes"
            raise ApiError(503, message, code="overloaded", retry_after=1)
        share = (limit - self.num_body_bytes + own) * 3 // 4
        if own > num_read and own + size > share:
            self.num_rejected_bodies += 1
            message = "the bodies of your unfinished requests and responses are too large"
            message = f"{message}: the limit is {share} bytes now"
            raise ApiError(429, message, code="too_many_requests", retry_after=1)
        self.num_body_bytes += size
        self._num_body_bytes_by_client[client] += size

    def release_body_bytes(self, client: int, size: int) -> None:
        """End what `take_body_bytes` has counted for a body."""
        self.num_body_bytes -= size
        self._num_body_bytes_by_client[client] -= size
        if not self._num_body_bytes_by_client[client]:
            del self._num_body_bytes_by_client[client]

    def leave(self) -> None:
        """The request has ended."""
        self.num_active -= 1

    @contextmanager
    def running(self, generation: Generation) -> Iterator[None]:
        """List the generation, and count its outputs for its key, which has a limit of them."""
        key, count, limit = generation.key, generation.call.num_outputs, self.settings.max_outputs_per_key
        if limit is not None and (found := self._num_outputs_by_key[key]) + count > limit:
            message = f"this API key has {found} unfinished outputs; with {count} more, the limit is {limit}"
            raise ApiError(429, message, code="too_many_requests", retry_after=1)
        self._num_outputs_by_key[key] += count
        self.generations[generation.id] = generation
        try:
            yield
        finally:
            del self.generations[generation.id]
            self._num_outputs_by_key[key] -= count
            if not self._num_outputs_by_key[key]:
                del self._num_outputs_by_key[key]

    def cache_salt(self, key: bytes, salt: str | None) -> str | None:
        """The salt of the engine for the salt of a request: another one for each key.

        So neither cached tokens nor the time to the first token tell a client about prompts of other keys.
        """
        if not self._separates_keys:
            return salt
        return hmac.new(self._secret, key + (salt or "").encode(errors="surrogatepass"), "sha256").hexdigest()

    def cache_salts(self, salt: str | None) -> list[str | None]:
        """The salts of the engine for the salt of the requests of any key."""
        if salt is None or not self._separates_keys:
            return [salt]
        return [self.cache_salt(key, salt) for key in (*self.keys, *self.admin_keys)]

    @property
    def is_loading(self) -> bool:
        """Whether the server has not opened a model yet."""
        return all(model.progress is not None for model in self.models.values())

    def select(self, name: str | None) -> Selection:
        """The model that a request names."""
        models = self.selected(None)
        if not name:
            if len(models) > 1:
                raise ApiError(400, f"model is missing: it must be {self._names()}", param="model")
            return next(Selection(model, name) for name, model in self.models.items())
        if (model := self.models.get(name)) is not None:
            return Selection(model, name)
        for model in models:
            if name in model.adapter_names:
                return Selection(model, name, name)
        raise self._unknown(name)

    def selected(self, name: str | None) -> list[Model]:
        """The model of this name, which is none of an adapter, or all models."""
        if name is None:
            return list(dict.fromkeys(self.models.values()))
        if (model := self.models.get(name)) is None:
            raise self._unknown(name)
        return [model]

    def _unknown(self, name: str) -> ApiError:
        message = f"the model {name[:64]!r} does not exist: model must be {self._names()}"
        return ApiError(404, message, param="model", code="model_not_found")

    def _names(self) -> str:
        adapters = [name for model in self.selected(None) for name in model.adapter_names]
        return "one of " + ", ".join(map(repr, (*self.models, *adapters)))

    def abort_all(self) -> None:
        """Abort all generating requests."""
        for generation in list(self.generations.values()):
            generation.abort()
