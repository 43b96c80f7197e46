"""Runs the requests of a generating route: waiting for all output, or streaming it.

A stream is written by one task per request of the engine, without a layer between it and the ASGI server: its
work is done for every token. Another task waits for the client to disconnect, which cancels the first one and
so the request, and writes comments while the stream is idle.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from penstock.server.errors import ApiError, api_error
from penstock.server.http import DisconnectedError, watch_connection
from penstock.server.sse import KEEP_ALIVE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence

    from anyio import CancelScope

    import penstock
    from penstock.server.events import Events
    from penstock.server.http import Exchange
    from penstock.server.settings import ServerSettings
    from penstock.server.state import Generation, State

__all__ = ["generate", "stream"]


@contextmanager
def _listed(state: State, generation: Generation) -> Iterator[None]:
    state.generations[generation.id] = generation
    try:
        yield
    finally:
        del state.generations[generation.id]


async def _while_connected(
    work: Callable[[], Awaitable[None]], watch: Callable[[CancelScope], Coroutine[Any, Any, None]]
) -> bool:
    """Run `work` unless `watch` cancels it; returns whether it was run to its end."""
    errors: list[Exception] = []
    is_complete = False
    async with anyio.create_task_group() as group:
        group.start_soon(watch, group.cancel_scope)
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - raised below, outside the task group
            errors.append(error)
        is_complete = True
        group.cancel_scope.cancel()
    if errors:
        raise errors[0]
    return is_complete


async def generate(
    state: State,
    generation: Generation,
    prompts: Sequence[penstock.Prompt],
    params: penstock.SamplingParams,
    options: Mapping[str, Any],
    exchange: Exchange,
) -> list[penstock.Result] | None:
    """The results for all prompts, in order; `None` if the client has disconnected."""
    results: dict[int, penstock.Result] = {}
    engine = generation.model.engine

    async def run() -> None:
        if len(prompts) == 1 and params.num_beams == 1 and params.best_of is None:
            async with engine.stream(prompts[0], params, **options) as request:
                generation.add(request)
                results[0] = await request.result()
            return
        with anyio.CancelScope() as scope:
            generation.on_abort = scope.cancel
            if len(prompts) == 1:
                results[0] = await engine.generate(prompts[0], params, **options)
            else:
                async with engine.generate_many(prompts, params, ordered=False, **options) as items:
                    async for item in items:
                        if item.result is None:
                            raise item.error or AssertionError
                        results[item.index] = item.result
        if scope.cancelled_caught:
            raise ApiError(503, "the request was aborted", code="aborted")

    with _listed(state, generation):
        is_complete = await _while_connected(run, partial(watch_connection, exchange.receive))
    if not is_complete:
        return None
    for result in results.values():
        generation.model.measures.add(result, params)
    return [results[index] for index in range(len(prompts))]


class _Writer:
    """Writes a stream, and counts its events, so that the task that watches knows whether it is idle."""

    def __init__(self, exchange: Exchange, settings: ServerSettings) -> None:
        self._exchange = exchange
        self._settings = settings
        self.is_started = False
        self._count = 0

    async def write(self, request: penstock.Request, prompt: int, events: Events) -> None:
        """Write the output of one request. Runs once per token and stream: no layer, few calls."""
        send, of = self._exchange.send, events.of
        async for chunk in request:
            body = of(chunk, prompt, request)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._count += 1

    async def watch(self, scope: CancelScope) -> None:
        """Cancel the scope when the client disconnects or does not read; write comments while it is idle."""
        count = 0
        while True:
            with anyio.move_on_after(self._settings.keep_alive_interval):
                await watch_connection(self._exchange.receive, scope)
                return
            if self.is_started and self._count == count:
                with anyio.move_on_after(self._settings.send_timeout) as wait:
                    comment = {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                    await self._exchange.send(comment)
                if wait.cancelled_caught:
                    scope.cancel()
                    return
            count = self._count


async def stream(
    state: State,
    generation: Generation,
    prompts: Sequence[penstock.Prompt],
    params: penstock.SamplingParams,
    options: Mapping[str, Any],
    events: Events,
    exchange: Exchange,
) -> None:
    """Stream the output for all prompts. Raises errors before the first byte; a later one is an event."""
    writer = _Writer(exchange, state.settings)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            for prompt in prompts:
                request = await stack.enter_async_context(
                    generation.model.engine.stream(prompt, params, **options)
                )
                generation.add(request)
            await exchange.start_stream()
            writer.is_started = True
            try:
                await write()
                for request in generation.requests:
                    generation.model.measures.add(request, params)
                last = events.end(generation.requests)
                if generation.is_aborted and state.is_draining:
                    last = events.error(ApiError(503, "the server is stopping", code="unavailable"))
            except OSError as error:  # some servers raise it after a disconnect
                raise DisconnectedError from error
            except Exception as error:  # noqa: BLE001 - the status has been sent
                last = events.error(api_error(error))
            await exchange.send({"type": "http.response.body", "body": last})

    async def write() -> None:
        if len(generation.requests) == 1:
            await writer.write(generation.requests[0], 0, events)
            return
        errors: list[Exception] = []

        async def write_one(request: penstock.Request, prompt: int) -> None:
            try:
                await writer.write(request, prompt, events)
            except Exception as error:  # noqa: BLE001 - raised below, outside the task group
                errors.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for prompt, request in enumerate(generation.requests):
                group.start_soon(write_one, request, prompt)
        if errors:
            raise errors[0]

    with _listed(state, generation):
        await _while_connected(run, writer.watch)
