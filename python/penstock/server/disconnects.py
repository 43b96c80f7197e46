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
    """Run `work` unless `watch` cancels it, because the client has disconnected."""
    outcome: list[Returned | Exception] = []
    async with anyio.create_task_group() as group:
        group.start_soon(watch, group.cancel_scope)
        try:
            outcome.append(await work())
        except Exception as error:  # noqa: BLE001 - raised below, outside the task group
            outcome.append(error)
        group.cancel_scope.cancel()
    if not outcome:
        raise DisconnectedError
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


async def while_connected(receive: Receive, work: Callable[[], Awaitable[Returned]]) -> Returned:
    """Run `work` unless the client disconnects. The body has been read."""
    return await while_watched(partial(watch_connection, receive), work)
