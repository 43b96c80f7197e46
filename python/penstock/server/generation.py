"""Runs the requests of a generating route: waiting for all output, or streaming it.

A stream is written by one task per request of the engine, without a layer between it and the ASGI server: its
work is done for every token. Another task waits for the client to disconnect, which cancels the first one and
so the request, and writes comments while the stream is idle.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import anyio

from penstock.server.errors import ApiError, api_error
from penstock.server.http import watch_connection
from penstock.server.sse import DONE, KEEP_ALIVE, event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from anyio.abc import TaskGroup
    from starlette.types import Receive, Send

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


async def _while_connected(receive: Receive, work: Callable[[TaskGroup], Awaitable[None]]) -> bool:
    """Run `work` unless the client disconnects, which cancels it; returns whether it was run to its end.

    Its task group is cancelled when it returns.
    """
    errors: list[Exception] = []
    is_complete = False
    async with anyio.create_task_group() as group:
        group.start_soon(watch_connection, receive, group.cancel_scope)
        try:
            await work(group)
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

    async def run(_group: TaskGroup) -> None:
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
        is_complete = await _while_connected(exchange.receive, run)
    return [results[index] for index in range(len(prompts))] if is_complete else None


class _Writer:
    """Counts the events of a stream, so that another task knows whether it is idle."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.is_started = False
        self.count = 0

    async def write(self, request: penstock.Request, prompt: int, events: Events) -> None:
        """Write the output of one request. Runs once per token and stream: no layer, few calls."""
        send, of = self.send, events.of
        async for chunk in request:
            body = of(chunk, prompt, request)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self.count += 1

    async def keep_open(self, scope: anyio.CancelScope, settings: ServerSettings) -> None:
        """Write a comment if there was no event for a while; end the stream if the client does not read."""
        count = -1
        while True:
            await anyio.sleep(settings.keep_alive_interval)
            if self.is_started and self.count == count:
                with anyio.move_on_after(settings.send_timeout) as wait:
                    await self.send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                if wait.cancelled_caught:
                    scope.cancel()
                    return
            count = self.count


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
    writer = _Writer(exchange.send)

    async def run(group: TaskGroup) -> None:
        async with AsyncExitStack() as stack:
            for prompt in prompts:
                request = await stack.enter_async_context(
                    generation.model.engine.stream(prompt, params, **options)
                )
                generation.add(request)
            await exchange.start_stream()
            writer.is_started = True
            group.start_soon(writer.keep_open, group.cancel_scope, state.settings)
            try:
                await write()
                if generation.is_aborted and state.is_draining:
                    raise ApiError(503, "the server is stopping", code="unavailable")  # noqa: TRY301
                last = events.end(generation.requests) + DONE
            except Exception as error:  # noqa: BLE001 - the status has been sent
                last = event(api_error(error).body())
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

        async with anyio.create_task_group() as group:
            for prompt, request in enumerate(generation.requests):
                group.start_soon(write_one, request, prompt)
        if errors:
            raise errors[0]

    with _listed(state, generation):
        await _while_connected(exchange.receive, run)
