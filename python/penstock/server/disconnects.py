"""Clients that disconnect: their work ends."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from starlette.types import Receive

__all__ = ["DisconnectedError", "watch_connection", "while_connected", "while_watched"]

Returned = TypeVar("Returned")


class DisconnectedError(Exception):
    """The client has closed the connection."""


async def watch_connection(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel the scope when the client disconnects. The body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def while_watched(
    watch: Callable[[anyio.CancelScope], Coroutine[Any, Any, None]], work: Callable[[], Awaitable[Returned]]
) -> Returned:
    """Run `work` unless `watch` cancels it, because the client has disconnected.

    Both are tasks: a task costs more with each coroutine below the one that waits, and `work` may wait for
    every token of an output.
    """
    results: list[Returned] = []
    errors: list[Exception] = []
    # AnyIO would keep the error of a cancelled task, and with it the frames that have the request.
    watching = anyio.CancelScope()

    async def run_watch() -> None:
        with watching:
            await watch(group.cancel_scope)

    async def run_work() -> None:
        try:
            results.append(await work())
        except Exception as error:  # noqa: BLE001 - raised below, outside the task group
            errors.append(error)
        watching.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(run_watch)
        group.start_soon(run_work)
    if errors:
        raise errors.pop()  # its traceback has this frame: a variable here would keep both
    if not results:
        raise DisconnectedError
    return results[0]


async def while_connected(receive: Receive, work: Callable[[], Awaitable[Returned]]) -> Returned:
    """Run `work` unless the client disconnects. The body has been read."""
    return await while_watched(partial(watch_connection, receive), work)
