"""Runs the requests of a generating route: waiting for all output, or streaming it.

A stream is written by one task per request of the engine, without a layer between it and the ASGI server: its
work is done for every token. Another task waits for the client to disconnect, which cancels the first one and
so the request, and writes comments while the stream is idle.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio

import penstock
from penstock.server.errors import ApiError, api_error, invalid
from penstock.server.http import DisconnectedError, watch_connection, while_connected, while_watched
from penstock.server.sse import KEEP_ALIVE
from penstock.server.state import Generation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from anyio import CancelScope

    from penstock.server.events import Events
    from penstock.server.http import Exchange
    from penstock.server.settings import ServerSettings
    from penstock.server.state import Call, State

__all__ = ["begin", "generate", "stream"]

Item = TypeVar("Item")


def begin(state: State, exchange: Exchange, prefix: str, model_name: str | None, call: Call) -> Generation:
    """The generation of a call, with a new id that has this prefix. Checks the limits of the server."""
    model, name = state.model(model_name)
    params, settings = call.params, state.settings
    limit = min(settings.max_outputs, settings.max_outputs_per_key or settings.max_outputs)
    if call.num_outputs > limit:
        field = max(("n", "best_of", "num_beams"), key=lambda name: getattr(params, name) or 1)
        message = f"{field}: the request has {call.num_outputs} outputs; the limit is {limit}"
        raise ApiError(400, message, param=field)
    if params.priority < 0 and not settings.trust_priority and exchange.key not in state.admin_keys:
        raise invalid("priority", params.priority, "0 or more: only administrators can have less")
    if params.use_prefix_cache:
        params = params.replace(cache_salt=state.cache_salt(exchange.key, params.cache_salt))
        call = replace(call, params=params)
    exchange.generation = Generation(prefix, model, name, call, exchange.key)
    return exchange.generation


async def _for_each(
    items: Sequence[Item], work: Callable[[int, Item], Awaitable[None]], concurrency: int
) -> None:
    """Run `work` for all items, with their indices, this many at the same time. The first error ends it.

    An item that the engine has no room for is run after another one, unless there is none.
    """
    if len(items) == 1:
        await work(0, items[0])
        return
    waiting = deque(enumerate(items))
    num_workers = min(concurrency, len(items))
    errors: list[Exception] = []

    async def run() -> None:
        nonlocal num_workers
        while waiting:
            index, item = waiting.popleft()
            try:
                await work(index, item)
            except penstock.OverloadedError as error:
                if num_workers == 1:
                    errors.append(error)
                waiting.appendleft((index, item))
                break
            except Exception as error:  # noqa: BLE001 - raised below, outside the task group
                errors.append(error)
                group.cancel_scope.cancel()
        num_workers -= 1

    async with anyio.create_task_group() as group:
        for _ in range(num_workers):
            group.start_soon(run)
    if errors:
        raise errors[0]


def _concurrency(info: penstock.ModelInfo, call: Call) -> int:
    """The number of prompts that are computed at the same time.

    Slightly more than the engine computes together, so the prompts of a batch do not fill the waiting queue.
    """
    limit = info.max_num_seqs * 5 // 4
    if info.max_waiting is not None:
        limit = min(limit, info.max_num_seqs + info.max_waiting)
    return max(limit * len(call.prompts) // call.num_outputs, 1)


@contextmanager
def _until(deadline: float, settings: ServerSettings) -> Iterator[None]:
    """Cancel the block at the deadline, and raise the error."""
    with anyio.CancelScope(deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        message = f"the request took more than {settings.request_timeout:g} seconds"
        raise ApiError(504, message, code="request_timeout")


def _deadline(settings: ServerSettings) -> float:
    return anyio.current_time() + (settings.request_timeout or math.inf)


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="unavailable", retry_after=5)


async def generate(state: State, generation: Generation, exchange: Exchange) -> list[penstock.Result]:
    """The results for all prompts, in order."""
    results: dict[int, penstock.Result] = {}
    engine, call = generation.model.engine, generation.call
    # The engine has no request for each output of these, so there is no output so far.
    is_selected = call.params.num_beams > 1 or call.params.best_of is not None

    async def run(index: int, prompt: penstock.Prompt) -> None:
        if is_selected:
            with anyio.CancelScope() as scope:
                generation.add(scope)
                results[index] = await engine.generate(prompt, call.params, **call.template)
            if scope.cancelled_caught:
                raise ApiError(503, "the request was aborted", code="aborted")
            return
        async with engine.stream(prompt, call.params, **call.template) as request:
            generation.add(request)
            results[index] = await request.result()

    with state.running(generation):
        concurrency = 1 if len(call.prompts) == 1 else _concurrency(engine.info, call)
        with _until(_deadline(state.settings), state.settings):
            await while_connected(exchange, partial(_for_each, call.prompts, run, concurrency))
    if generation.is_aborted and state.is_draining:
        raise _stopping()
    for result in results.values():
        generation.end(result)
    return [results[index] for index in range(len(call.prompts))]


class _Writer:
    """Writes a stream, and counts its bytes, so that the task that watches knows whether it is idle."""

    def __init__(self, exchange: Exchange, settings: ServerSettings, events: Events) -> None:
        self._exchange = exchange
        self._settings = settings
        self._events = events
        self.is_started = False

    async def write(self, prompt: int, request: penstock.Request) -> None:
        """Write the output of one request. Runs once per token and stream: no layer, few calls."""
        send, of = self._exchange.send, self._events.of
        async for chunk in request:
            body = of(chunk, prompt, request)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._exchange.num_bytes += len(body)

    async def watch(self, scope: CancelScope) -> None:
        """Cancel the scope when the client disconnects or does not read; write comments while it is idle."""
        count = 0
        exchange = self._exchange
        while True:
            with anyio.move_on_after(self._settings.keep_alive_interval):
                await watch_connection(exchange.receive, scope)
                return
            if self.is_started and exchange.num_bytes == count:
                with anyio.move_on_after(self._settings.send_timeout) as wait:
                    comment = {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                    await exchange.send(comment)
                if wait.cancelled_caught:
                    scope.cancel()
                    return
            count = exchange.num_bytes


async def stream(state: State, generation: Generation, events: Events, exchange: Exchange) -> None:
    """Stream the output for all prompts. Raises errors before the first byte; a later one is an event."""
    call = generation.call
    if call.params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", call.params.prompt_logprobs, "left out when stream is true")
    writer = _Writer(exchange, state.settings, events)
    requests: list[penstock.Request] = []

    deadline = _deadline(state.settings)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            with _until(deadline, state.settings):
                for prompt in call.prompts:
                    opening = generation.model.engine.stream(prompt, call.params, **call.template)
                    requests.append(await stack.enter_async_context(opening))
                    generation.add(requests[-1])
            await exchange.start_stream()
            writer.is_started = True
            last = b""
            try:
                with _until(deadline, state.settings):
                    await _for_each(requests, writer.write, len(requests))
                for request in requests:
                    generation.end(request)
                last = events.end(requests)
                if generation.is_aborted and state.is_draining:
                    exchange.error = _stopping()
            except OSError as error:  # some servers raise it after a disconnect
                raise DisconnectedError from error
            except Exception as error:  # noqa: BLE001 - the status has been sent
                exchange.error = api_error(error)
            if exchange.error is not None:
                last = events.error(exchange.error)
            await exchange.send({"type": "http.response.body", "body": last})
            exchange.num_bytes += len(last)

    with state.running(generation):
        await while_watched(writer.watch, run)
