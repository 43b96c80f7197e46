"""Measures the load generator itself: its CPU time and the lag of its event loop."""

from __future__ import annotations

import asyncio
import time
from array import array
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["Watch", "watching"]

_INTERVAL = 0.01


@dataclass
class Watch:
    """The use of this process, which has one busy thread."""

    started: float = field(default_factory=time.perf_counter)
    cpu_started: float = field(default_factory=time.process_time)
    #: Delays of regular wake-ups of the event loop, in seconds.
    lags: array[float] = field(default_factory=lambda: array("d"))
    #: CPU seconds per second.
    cpu: float = 0.0

    def update(self) -> None:
        """Compute the use so far."""
        elapsed = time.perf_counter() - self.started
        self.cpu = (time.process_time() - self.cpu_started) / elapsed if elapsed > 0 else 0.0


@asynccontextmanager
async def watching(now: Callable[[], float] = time.perf_counter) -> AsyncIterator[Watch]:
    """Measure until the block is left; `now` is the clock of the lags."""
    watch = Watch()

    async def tick() -> None:
        while True:
            before = now()
            await asyncio.sleep(_INTERVAL)
            watch.lags.append(max(now() - before - _INTERVAL, 0.0))

    task = asyncio.create_task(tick())
    try:
        yield watch
    finally:
        task.cancel()
        watch.update()
