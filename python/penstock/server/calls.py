"""Counts the generating requests of clients and the memory of all bodies, and bounds both."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import penstock
from penstock.server.errors import ApiError, api_error, prompt_error
from penstock.server.usage import usage_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.server.models import Model
    from penstock.server.settings import ServerSettings

__all__ = ["BodyBytes", "Call", "Calls", "Generation"]


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


class Calls:
    """Counts the unfinished generating HTTP requests, and refuses those above a limit."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.num_active = 0
        #: Whether new requests are refused, because the server ends.
        self.is_draining = False
        #: Those that are valid, by their id.
        self.generations: dict[str, Generation] = {}
        self._num_outputs_by_key: Counter[bytes] = Counter()

    @property
    def max_outputs(self) -> int:
        """Maximum number of outputs of a request."""
        limits = (self._settings.max_outputs, self._settings.max_outputs_per_key)
        return min(limit for limit in limits if limit is not None)

    @property
    def max_prompts(self) -> int:
        """Maximum number of prompts of a request; each has an output."""
        return min(self._settings.max_prompts, self.max_outputs)

    def enter(self) -> None:
        """Count a generating request; raises if none is accepted any more."""
        if self.is_draining:
            raise ApiError(503, "the server is stopping", code="unavailable", retry_after=5)
        self.num_active += 1

    def leave(self) -> None:
        """The request has ended."""
        self.num_active -= 1

    @contextmanager
    def running(self, generation: Generation) -> Iterator[None]:
        """List the generation, and count its outputs for its key, which has a limit of them."""
        key, count, limit = generation.key, generation.call.num_outputs, self._settings.max_outputs_per_key
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

    def abort_all(self) -> None:
        """Abort all generating requests."""
        for generation in list(self.generations.values()):
            generation.abort()


class BodyBytes:
    """Counts the bytes of the bodies of unfinished requests and responses."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.total = 0
        #: Bodies that were refused for the limit.
        self.num_rejected = 0
        self._by_client = Counter[int]()

    def take(self, client: int, size: int, num_read: int) -> None:
        """Count bytes of a body, its values or its response, of which a number was counted before.

        Raises if those of all unfinished requests are too many, or those of the client's requests: of the
        bytes that the other clients leave, a quarter is for clients with a single body. These requests can be
        sent again later. One that needs more than the limit alone is refused with status 413.
        """
        limit, own = self._limit, self._by_client[client]
        if num_read + size > limit:
            self.num_rejected += 1
            message = "the body and the response of this request are too large"
            raise ApiError(413, f"{message}: the limit is {limit} bytes")
        if self.total + size > limit:
            self.num_rejected += 1
            message = "the bodies of all unfinished requests and responses are too large"
            message = f"{message}: the limit is {limit} bytes"
            raise ApiError(503, message, code="overloaded", retry_after=1)
        share = (limit - self.total + own) * 3 // 4
        if own > num_read and own + size > share:
            self.num_rejected += 1
            message = "the bodies of your unfinished requests and responses are too large"
            message = f"{message}: the limit is {share} bytes now"
            raise ApiError(429, message, code="too_many_requests", retry_after=1)
        self.total += size
        self._by_client[client] += size

    def release(self, client: int, size: int) -> None:
        """End what `take` has counted for a body."""
        self.total -= size
        self._by_client[client] -= size
        if not self._by_client[client]:
            del self._by_client[client]
