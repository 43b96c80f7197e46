"""The worker threads of a server, for slow work beside the event loop: clients take turns at them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from penstock._client import MAX_WAITING, MAX_WAITING_OF_CLIENT, TurnLimiter
from penstock._threads import run_in_thread
from penstock.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Threads"]

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


class Threads:
    """A number of worker threads. A task that is cancelled keeps its thread until the work has ended."""

    def __init__(self, num_threads: int, waiting: str | None = None) -> None:
        """`waiting` names the work, for the error of a client with too much. Without it, all work waits."""
        self.slots = TurnLimiter(num_threads)
        self._waiting = waiting

    async def run(
        self, work: Callable[Arguments, Returned], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Returned:
        """Run this in a thread, as soon as one is free."""
        self._check_room()
        bound = partial(work, *args, **options)
        async with self.slots:
            return await run_in_thread(bound, abandon_on_cancel=False)

    def _check_room(self) -> None:
        """Refuse a client with more than its share of the tasks that wait, if `MAX_WAITING` wait."""
        if self._waiting is None or self.slots.num_waiting < MAX_WAITING:
            return
        if (found := self.slots.num_waiting_of_client) >= MAX_WAITING_OF_CLIENT:
            message = f"{found} of your {self._waiting} wait: the limit is {MAX_WAITING_OF_CLIENT} now"
            raise ApiError(429, message, code="overloaded", retry_after=1)
