"""Runs load points: closed loops with a number of requests in flight, open loops with a schedule."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.bench.watch import Watch, watching

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from penstock.bench.client import Record
    from penstock.bench.prompts import Body
    from penstock.bench.settings import BenchSettings, Load

    #: Sends a request that should start at a time.
    Send = Callable[[Body, float], Awaitable[Record]]

__all__ = ["Clock", "Measurement", "arrivals", "measure"]

_DEFAULT_PROMPTS = 100


class Clock:
    """The time of `time.perf_counter`, in seconds."""

    def now(self) -> float:
        """The current time."""
        return time.perf_counter()

    async def sleep_until(self, moment: float) -> None:
        """Wait for a time; lets other tasks run if it has passed."""
        await asyncio.sleep(max(moment - self.now(), 0))


@dataclass
class Measurement:
    """A load point: the requests that have ended, and the numbers of those in flight."""

    load: Load
    start: float = 0.0
    records: list[Record] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0
    watch: Watch = field(default_factory=Watch)

    @property
    def seconds(self) -> float:
        """The time from the start to the end of the last request."""
        return max((record.end for record in self.records), default=self.start) - self.start


def arrivals(load: Load, burstiness: float, seed: int) -> Iterator[float]:
    """The times of an open loop, in seconds after its start; the first is 0."""
    if math.isinf(load.request_rate):
        yield from itertools.repeat(0.0)
    chance = random.Random(f"{seed} arrivals {load.request_rate}")  # noqa: S311 - intervals
    mean = 1 / load.request_rate
    moment = 0.0
    while True:
        yield moment
        moment += mean if math.isinf(burstiness) else chance.gammavariate(burstiness, mean / burstiness)


async def measure(
    measurement: Measurement, settings: BenchSettings, bodies: Iterator[Body], send: Send, clock: Clock
) -> None:
    """Run the load point of a measurement, which has the requests that have ended at any time."""
    count = settings.num_prompts
    if count is None and settings.duration is None:
        count = _DEFAULT_PROMPTS
    if count is not None:  # made before the start
        bodies = iter(list(itertools.islice(bodies, count)))
    measurement.start = clock.now()
    load = measurement.load
    end = math.inf if settings.duration is None else measurement.start + settings.duration

    async def run(body: Body, scheduled: float) -> None:
        measurement.in_flight += 1
        measurement.peak_in_flight = max(measurement.peak_in_flight, measurement.in_flight)
        measurement.records.append(await send(body, scheduled))
        measurement.in_flight -= 1

    async def repeat() -> None:
        for body in bodies:
            if clock.now() >= end:
                return
            await run(body, clock.now())

    async with watching() as measurement.watch, asyncio.TaskGroup() as group:
        if load.concurrency is not None:
            for _ in range(load.concurrency):
                group.create_task(repeat())
            return
        offsets = arrivals(load, settings.burstiness, settings.seed)
        for body, offset in zip(bodies, offsets, strict=False):
            scheduled = measurement.start + offset
            if scheduled >= end:
                return
            await clock.sleep_until(scheduled)
            group.create_task(run(body, scheduled))
