"""The state of a server: its models and its unfinished requests."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from penstock.server.errors import ApiError
from penstock.server.keys import Keys
from penstock.server.measures import HttpMeasures, RequestMeasures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import penstock
    from penstock.server.settings import ServerSettings

__all__ = ["Call", "Generation", "Model", "Progress", "State"]


class Progress:
    """Bytes of a model that were loaded, and bytes in all."""

    def __init__(self) -> None:
        self.done = self.total = 0

    def __call__(self, done: int, total: int) -> None:
        """Called by the engine while it loads."""
        self.done, self.total = done, total


class Model:
    """An engine under a name, which a client gives as `model`."""

    def __init__(self, name: str, engine: penstock.Engine) -> None:
        self.name = name
        self.engine = engine
        self.created = int(time.time())
        #: While the server loads the model.
        self.progress: Progress | None = None

    @cached_property
    def measures(self) -> RequestMeasures:
        """Distributions of the requests that have ended; the engine has been opened."""
        return RequestMeasures(self.engine.info.max_model_len)


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

    @property
    def num_sequences(self) -> int:
        """The number of sequences that the engine computes, those that are not returned included."""
        params = self.params
        return len(self.prompts) * max(params.n, params.best_of or 1, params.num_beams)


class Generation:
    """One generating HTTP request, which can have several requests of the engine."""

    def __init__(self, prefix: str, model: Model, name: str, call: Call) -> None:
        #: Unpredictable, because it allows to abort the request.
        self.id = f"{prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = model
        #: The name by which the client called the model.
        self.name = name
        self.call = call
        self.is_aborted = False
        self._parts: list[Cancellable] = []

    def add(self, part: Cancellable) -> None:
        """Cancel this part of the work when the request is aborted."""
        self._parts.append(part)
        if self.is_aborted:
            part.cancel()

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
        self._num_active_by_key: Counter[bytes] = Counter()
        #: By name; several names can have one engine.
        self.models = {
            name: models.setdefault(id(engine), Model(name, engine)) for name, engine in engines.items()
        }
        #: Threads that tokenise outside of the engine.
        self.tokenizer_threads = anyio.CapacityLimiter(2)
        self.generations: dict[str, Generation] = {}
        #: Names of request fields that the log has as unknown.
        self.unknown_fields: set[str] = set()
        self.http = HttpMeasures()
        #: Unfinished HTTP requests, without those that need no key.
        self.num_active = 0
        #: Whether new requests are refused, because the server ends.
        self.is_draining = False

    def enter(self, key: bytes) -> None:
        """Count a request of this key; raises if there are too many, or none is accepted any more."""
        if self.is_draining:
            raise ApiError(503, "the server is stopping", code="unavailable", retry_after=5)
        limit = self.settings.max_requests_per_key
        if limit is not None and self._num_active_by_key[key] >= limit:
            message = f"this API key has {limit} unfinished requests, which is the limit"
            raise ApiError(429, message, code="too_many_requests", retry_after=1)
        self.num_active += 1
        self._num_active_by_key[key] += 1

    def leave(self, key: bytes) -> None:
        """The request has ended."""
        self.num_active -= 1
        self._num_active_by_key[key] -= 1
        if not self._num_active_by_key[key]:
            del self._num_active_by_key[key]

    def model(self, name: object) -> tuple[Model, str]:
        """The model that a request names, and that name."""
        if name is None or name == "":
            if len(self.selected(None)) > 1:
                raise ApiError(400, f"model is missing: it must be {self._names()}", param="model")
            return next((model, name) for name, model in self.models.items())
        model = self.models.get(name) if isinstance(name, str) else None
        if model is None or not isinstance(name, str):
            message = f"the model {str(name)[:64]!r} does not exist: model must be {self._names()}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model, name

    def selected(self, name: str | None) -> list[Model]:
        """The model of this name, or all models."""
        if name is not None:
            return [self.model(name)[0]]
        return list(dict.fromkeys(self.models.values()))

    def _names(self) -> str:
        return "one of " + ", ".join(map(repr, self.models))

    def abort_all(self) -> None:
        """Abort all generating requests."""
        for generation in list(self.generations.values()):
            generation.abort()
