"""Runs the requests of a generating route: waiting for all output, or streaming it.

A stream is written by one task per request of the engine, without a layer between it and the ASGI server: its
work is done for every token. Another task waits for the client to disconnect, which cancels the first one and
so the request, and writes comments while the stream is idle.
"""

from __future__ import annotations

import math
import time
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import anyio

import penstock
from penstock._client import client, deadline
from penstock.server.calls import Generation
from penstock.server.choices import LogprobCount
from penstock.server.disconnects import (
    DisconnectedError,
    watch_connection,
    while_connected,
    while_watched,
)
from penstock.server.errors import ApiError, invalid
from penstock.server.http import LARGE_PIECE
from penstock.server.sse import KEEP_ALIVE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from typing import Self

    from anyio import CancelScope
    from anyio.abc import TaskGroup

    from penstock.server.calls import Call
    from penstock.server.events import Events
    from penstock.server.http import Exchange
    from penstock.server.models import Model
    from penstock.server.settings import ServerSettings
    from penstock.server.state import State

_Work: TypeAlias = "Callable[[int, penstock.Request], Awaitable[None]]"

__all__ = ["begin", "concurrency_of", "generate", "stream"]

#: Time between two attempts to start a prompt that the engine has no room for, in seconds.
_RETRY_INTERVAL = 0.02
#: The attempts of all requests together in a second.
_MOST_RETRIES = 500


def begin(
    state: State, exchange: Exchange, prefix: str, model_name: str | None, call: Call, *, prompt: str
) -> Generation:
    """The generation of a call, with a new id that has this prefix. Checks the limits of the server.

    `prompt` is the field of the request that makes the prompt.
    """
    model, name, adapter = state.models.select(model_name)
    settings = state.settings
    params = call.params if adapter is None else call.params.replace(adapter=adapter)
    limit = state.calls.max_outputs
    if call.num_outputs > limit:
        field = max(("n", "best_of", "num_beams"), key=lambda name: getattr(params, name) or 1)
        message = f"{field}: the request has {call.num_outputs} outputs; the limit is {limit}"
        raise ApiError(400, message, param=field)
    if params.priority < 0 and not settings.trust_priority and exchange.key not in state.admin_keys:
        raise invalid("priority", params.priority, "0 or more: only administrators can have less")
    if exchange.min_priority is not None:
        params = params.replace(priority=max(params.priority, exchange.min_priority))
    if params.use_prefix_cache:
        params = params.replace(cache_salt=state.cache_salt(exchange.key, params.cache_salt))
    call = replace(call, params=params)
    exchange.generation = Generation(prefix, model, name, call, exchange.key, prompt)
    return exchange.generation


class _Batch:
    """The requests of a generation: one for each prompt, a bounded number of them at the same time.

    They are started one after another: if the engine has no room, a batch tries again with one of them. The
    batches of a client share the number of prompts at the same time, and clients take turns to start one, so
    many batches leave the event loop to others.
    """

    def __init__(self, generation: Generation, logprobs: LogprobCount) -> None:
        self.generation = generation
        self._logprobs = logprobs
        self._model = generation.model
        self._num_prompts = len(generation.call.prompts)
        self._limit = min(concurrency_of(self._model.engine.info, generation.call), self._num_prompts)
        self._client = client.get()
        #: By the index of the prompt.
        self.requests: dict[int, penstock.Request] = {}
        self._opening = anyio.Lock()
        self._indices = iter(range(self._num_prompts))
        self._errors: list[Exception] = []
        #: Of the tasks. Not the scope of their group: AnyIO would keep the errors of cancelled tasks, and so
        #: their frames.
        self._scopes: list[CancelScope] = []

    def __enter__(self) -> Self:
        if self._num_prompts > 1:
            self._model.num_batches[self._client] += 1
        return self

    def __exit__(self, *_: object) -> None:
        if self._num_prompts > 1:
            self._model.num_batches[self._client] -= 1
            if not self._model.num_batches[self._client]:
                del self._model.num_batches[self._client]

    @property
    def _concurrency(self) -> int:
        """The share of this batch in the prompts that are computed at the same time now."""
        return max(self._limit // max(self._model.num_batches[self._client], 1), 1)

    async def open(self, index: int, stack: AsyncExitStack) -> None:
        """Start the request of a prompt. Raises `OverloadedError` if the engine has no room."""
        call = self.generation.call
        async with self._model.openings if self._num_prompts > 1 else nullcontext():
            opening = self._model.engine.stream(call.prompts[index], call.params, **call.template)
            self.requests[index] = request = await stack.enter_async_context(opening)
        self.generation.add(request)
        self._logprobs.add_prompt(request.usage.prompt_tokens)

    async def open_first(self, stack: AsyncExitStack) -> None:
        """Start as many requests as run at the same time, or as the engine has room for: at least one."""
        for index in range(self._concurrency):
            try:
                await self.open(index, stack)
            except penstock.OverloadedError as error:
                if index == 0 or isinstance(error, penstock.DeadlineError):
                    raise
                return

    async def _open_when_possible(self, index: int, stack: AsyncExitStack) -> None:
        """Start a request as soon as the engine has room, but fail if it has none for the first one."""
        async with self._opening:
            while index not in self.requests:
                try:
                    await self.open(index, stack)
                except penstock.DeadlineError:
                    raise  # there will be less time
                except penstock.OverloadedError:
                    if not self.requests:
                        raise
                    with _retrying(self._model) as seconds:
                        await anyio.sleep(seconds)

    async def for_each(self, work: _Work) -> None:
        """Run `work` for each request; the first error ends it."""
        if self._num_prompts == 1:
            if self.requests:
                await work(0, self.requests[0])
            else:
                await self._run_next(0, work)
            return
        async with anyio.create_task_group() as group:
            self._begin_task(group, work)
        if self._errors:
            raise self._errors.pop(0)  # a variable here would keep it: its traceback has this frame

    def _begin_task(self, group: TaskGroup, work: _Work) -> None:
        """Start a task for the next prompts, if the batch can have one more.

        Each task starts the next one when its first request has begun: all at once would be too much work
        without an interruption.
        """
        if len(self._scopes) < self._concurrency and not self._errors:
            self._scopes.append(scope := anyio.CancelScope())
            group.start_soon(self._run_task, group, scope, work)

    async def _run_task(self, group: TaskGroup, scope: CancelScope, work: _Work) -> None:
        with scope:
            try:
                for index in self._indices:
                    await self._run_next(index, work, group)
            except Exception as error:  # noqa: BLE001 - raised by `for_each`, outside the task group
                self._errors.append(error)
                for other in self._scopes:
                    other.cancel()

    async def _run_next(self, index: int, work: _Work, group: TaskGroup | None = None) -> None:
        async with AsyncExitStack() as stack:
            await self._open_when_possible(index, stack)
            if group is not None:
                self._begin_task(group, work)
            await work(index, self.requests[index])


@contextmanager
def _retrying(model: Model) -> Iterator[float]:
    """A time in which a request waits to try again; yields its length in seconds."""
    model.num_retrying += 1
    try:
        yield max(_RETRY_INTERVAL, model.num_retrying / _MOST_RETRIES)
    finally:
        model.num_retrying -= 1


def concurrency_of(info: penstock.ModelInfo, call: Call) -> int:
    """The number of prompts that are computed at the same time.

    Slightly more than the engine computes together, so the prompts of a batch do not fill the waiting queue.
    """
    limit = info.max_num_seqs * 5 // 4
    if info.max_waiting is not None:
        limit = min(limit, info.max_num_seqs + info.max_waiting)
    return max(limit * len(call.prompts) // call.num_outputs, 1)


@contextmanager
def _until(until: float, settings: ServerSettings) -> Iterator[None]:
    """Cancel the block at this time, and raise the error. Requests that would end later are refused."""
    token = deadline.set(time.monotonic() + until - anyio.current_time())
    try:
        with anyio.CancelScope(deadline=until) as scope:
            yield
    finally:
        deadline.reset(token)
    if scope.cancelled_caught:
        message = f"the request took more than {settings.request_timeout:g} seconds"
        raise ApiError(504, message, code="request_timeout")


def _deadline(settings: ServerSettings) -> float:
    return anyio.current_time() + (settings.request_timeout or math.inf)


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="unavailable", retry_after=5)


async def generate(state: State, generation: Generation, exchange: Exchange) -> list[penstock.Result]:
    """The results for all prompts, in order."""
    params, results = generation.call.params, dict[int, penstock.Result]()
    logprobs = _logprobs_of(state, exchange, generation)

    async def run() -> None:
        await state.adapters.restore(generation)
        # The engine has no request for each output of these, so there is no output so far.
        if params.num_beams > 1 or params.best_of is not None:
            await _select(generation, results, logprobs)
            return

        async def wait(index: int, request: penstock.Request) -> None:
            if logprobs.has_many:
                async for chunk in request:
                    logprobs.add_output(len(chunk.token_ids))
            results[index] = await request.result()

        with _Batch(generation, logprobs) as batch:
            await batch.for_each(wait)

    with state.calls.running(generation), _until(_deadline(state.settings), state.settings):
        await while_connected(exchange.receive, run)
    if generation.is_aborted and state.calls.is_draining:
        raise _stopping()
    for result in results.values():
        generation.end(result)
    return [results[index] for index in range(len(generation.call.prompts))]


def _logprobs_of(state: State, exchange: Exchange, generation: Generation) -> LogprobCount:
    return LogprobCount(state, exchange, generation.call, generation.model.engine.info.max_model_len)


async def _select(
    generation: Generation, results: dict[int, penstock.Result], logprobs: LogprobCount
) -> None:
    """Compute the results of which the engine selects the outputs."""
    call, engine = generation.call, generation.model.engine
    if logprobs.has_many:
        logprobs.add_all_outputs()
    with anyio.CancelScope() as scope:
        generation.add(scope)
        if len(call.prompts) == 1:
            results[0] = await engine.generate(call.prompts[0], call.params, **call.template)
            return
        async with engine.generate_many(call.prompts, call.params, ordered=False) as items:
            async for item in items:
                if item.result is None:
                    raise item.error or AssertionError
                logprobs.add_prompt(item.result.usage.prompt_tokens)
                results[item.index] = item.result
    if scope.cancelled_caught:
        raise ApiError(503, "the request was aborted", code="aborted")


class _Writer:
    """Writes a stream, and counts its bytes, so that the task that watches knows whether it is idle."""

    def __init__(
        self, exchange: Exchange, settings: ServerSettings, events: Events, logprobs: LogprobCount
    ) -> None:
        self._exchange = exchange
        self._logprobs = logprobs if logprobs.has_many else None
        self._settings = settings
        self._events = events
        #: Whether the stream has begun, and its last events have not: comments can be between the others.
        self.is_open = False

    async def write(self, prompt: int, request: penstock.Request) -> None:
        """Write the output of one request. Runs once per token and stream: no layer, few calls."""
        send, of, logprobs = self._exchange.send, self._events.of, self._logprobs
        async for chunk in request:
            if logprobs is not None:
                logprobs.add_output(len(chunk.token_ids))
            body = of(chunk, prompt, request)
            if (size := len(body)) > LARGE_PIECE:
                self._exchange.hold(size)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._exchange.num_bytes += size

    async def watch(self, scope: CancelScope) -> None:
        """Cancel the scope when the client disconnects or does not read; write comments while it is idle."""
        count = 0
        exchange = self._exchange
        while True:
            with anyio.move_on_after(self._settings.keep_alive_interval):
                await watch_connection(exchange.receive, scope)
                return
            if self.is_open and exchange.num_bytes == count:
                with anyio.move_on_after(self._settings.send_timeout) as wait:
                    comment = {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                    try:
                        await exchange.deliver(comment)
                    except DisconnectedError:
                        scope.cancel()
                if wait.cancelled_caught:
                    scope.cancel()
                    return
            count = exchange.num_bytes


async def stream(state: State, generation: Generation, events: Events, exchange: Exchange) -> None:
    """Stream the output for all prompts. Raises errors before the first byte; a later one is an event.

    Before the first byte, as many requests are started as run at the same time.
    """
    call = generation.call
    if call.params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", call.params.prompt_logprobs, "left out when stream is true")
    logprobs = _logprobs_of(state, exchange, generation)
    writer = _Writer(exchange, state.settings, events, logprobs)
    batch = _Batch(generation, logprobs)
    until = _deadline(state.settings)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            with _until(until, state.settings):
                await state.adapters.restore(generation)
                await batch.open_first(stack)
            await exchange.start_stream()
            writer.is_open = True
            last = b""
            try:
                with _until(until, state.settings):
                    await batch.for_each(writer.write)
                requests = [batch.requests[index] for index in range(len(call.prompts))]
                for request in requests:
                    generation.end(request)
                last = events.end(requests)
                if len(last) > LARGE_PIECE:
                    exchange.hold(len(last))
                if generation.is_aborted and state.calls.is_draining:
                    exchange.error = _stopping()
            except OSError as error:  # some servers raise it after a disconnect
                raise DisconnectedError from error
            except Exception as error:  # noqa: BLE001 - the status has been sent
                exchange.error = generation.error_of(error)
            if exchange.error is not None:
                last = events.error(exchange.error)
            writer.is_open = False
            await exchange.send_rest(last)

    with state.calls.running(generation), batch:
        await while_watched(writer.watch, run)
