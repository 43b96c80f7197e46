"""Calls in worker threads, without a limit of their number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_in_thread"]

Returned = TypeVar("Returned")


async def run_in_thread(function: Callable[[], Returned], *, abandon_on_cancel: bool = True) -> Returned:
    """Call `function` in a worker thread, regardless of any limiter.

    AnyIO does not see the errors: its frame, which is in their traceback, would keep them, and with them the
    arguments of all frames, until the garbage collector runs.
    """
    results: list[Returned] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    limiter = anyio.CapacityLimiter(math.inf)
    await anyio.to_thread.run_sync(call, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
    if errors:
        raise errors.pop()
    return results.pop()
