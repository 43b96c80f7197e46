"""Runs the requests of a batch, a bounded number of them at the same time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import penstock
    from penstock.server.batch.lines import Line

__all__ = ["concurrency", "run_lines"]


#: Bytes of the lines of unfinished requests.
_MAX_BYTES = 64 << 20


def concurrency(info: penstock.ModelInfo, longest: int) -> int:
    """The number of requests that are unfinished at the same time; the longest line has this many bytes.

    Slightly more than the engine computes together, and at most half of its queue: the other half is for
    requests of others.
    """
    waiting = info.max_num_seqs // 4
    if info.max_waiting is not None:
        waiting = min(waiting, info.max_waiting // 2)
    return min(info.max_num_seqs + waiting, max(_MAX_BYTES // longest, 1))


async def run_lines(
    read: Callable[[], Awaitable[list[Line] | None]], number: int, work: Callable[[Line], Awaitable[None]]
) -> None:
    """Call `work` for each line, `number` of them at the same time. The first error ends it.

    `read` returns the next lines, or nothing at the end.
    """
    lines: deque[Line] = deque()
    reading = anyio.Lock()
    is_ended = False
    errors: list[Exception] = []

    async def next_line() -> Line | None:
        nonlocal is_ended
        async with reading:
            while not (lines or is_ended):
                found = await read()
                is_ended = found is None
                lines.extend(found or ())
            return lines.popleft() if lines else None

    async def run() -> None:
        try:
            while (line := await next_line()) is not None:
                await work(line)
        except Exception as error:  # noqa: BLE001 - raised below, outside the task group
            errors.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for _ in range(number):
            group.start_soon(run)
    if errors:
        raise errors[0]
