"""`penstock bench serve`: runs all load points and collects their numbers."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import penstock
from penstock._system import raise_descriptor_limit
from penstock.bench.client import UNREACHABLE, Client
from penstock.bench.prompts import bodies
from penstock.bench.run import Clock, Measurement, measure
from penstock.bench.sse import StreamError
from penstock.bench.summary import gaps, summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.bench.client import Record
    from penstock.bench.prompts import Body
    from penstock.bench.settings import BenchSettings

__all__ = ["Benchmark"]


@dataclass
class Benchmark:
    """A benchmark, with the load points that have begun."""

    settings: BenchSettings
    model: str = ""
    measurements: list[Measurement] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)

    def run(
        self, on_point: Callable[[dict[str, Any]], object], on_request: Callable[[Record], object]
    ) -> None:
        """Run all load points. Ctrl-C raises `KeyboardInterrupt`, after the numbers so far are in `points`.

        Raises `PenstockError` if the server does not answer the warm-up.
        """
        raise_descriptor_limit()  # one for each connection
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._run(on_point, on_request))

    async def _run(
        self, on_point: Callable[[dict[str, Any]], object], on_request: Callable[[Record], object]
    ) -> None:
        async with Client(self.settings) as client:
            self.model = self.settings.model or await _first_model(client)
            source = bodies(self.settings, self.model)
            await _warm_up(client, list(itertools.islice(source, self.settings.num_warmups)))

            async def send(body: Body, scheduled: float) -> Record:
                record = await client.send(body, scheduled)
                on_request(record)
                return record

            for load in self.settings.loads:
                measurement = Measurement(load)
                self.measurements.append(measurement)
                try:
                    await measure(measurement, self.settings, source, send, Clock())
                finally:
                    self.points.append(summarize(measurement, self.settings))
                on_point(self.points[-1])

    def distributions(self) -> Iterator[dict[str, list[float]]]:
        """The latencies of each load point that are plotted, in milliseconds."""
        for measurement in self.measurements:
            done = [record for record in measurement.records if record.error is None and record.times]
            yield {
                "ttft": [record.ttft * 1e3 for record in done],
                "itl": [gap * 1e3 for gap in gaps(done)],
                "e2el": [record.e2el * 1e3 for record in done],
            }

    def result(self, *, detailed: bool = False) -> dict[str, Any]:
        """All numbers, for JSON; with `detailed`, also those of each request."""
        settings = asdict(self.settings)
        del settings["api_key"]
        settings["url"] = self.settings.shown_url
        settings["request_rate"] = [_json_number(rate) for rate in self.settings.request_rate]
        settings["burstiness"] = _json_number(self.settings.burstiness)
        points = self.points
        if detailed:
            points = [
                {**point, "requests": [_details(record, measurement) for record in measurement.records]}
                for point, measurement in zip(self.points, self.measurements, strict=True)
            ]
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "penstock": penstock.__version__,
            "model_id": self.model,
            "settings": settings,
            "points": points,
        }


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The constructor of a fast event loop, if there is one."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def _json_number(value: float) -> float | str:
    """The number, or its name: JSON has no infinity."""
    return value if math.isfinite(value) else str(value)


async def _first_model(client: Client) -> str:
    try:
        return await client.first_model()
    except StreamError as error:
        raise _failure("/v1/models", error.kind, str(error)) from error


async def _warm_up(client: Client, requests: list[Body]) -> None:
    clock = Clock()
    records = await asyncio.gather(*(client.send(body, clock.now()) for body in requests))
    for record in records:
        if record.error is not None:
            raise _failure("warm-up", record.error, record.message)


def _failure(place: str, kind: str, message: str) -> penstock.PenstockError:
    if kind == UNREACHABLE:
        return penstock.PenstockError(f"{message}; start it (penstock serve MODEL), or correct --url")
    return penstock.PenstockError(f"{place}: {kind}: {message}")


def _details(record: Record, measurement: Measurement) -> dict[str, Any]:
    """The numbers of a request, in seconds; times are those after the start of the load point."""
    return {
        "scheduled": record.scheduled - measurement.start,
        "late_start": record.sent - record.scheduled,
        "ttft": record.ttft if record.times else None,
        "e2el": record.e2el,
        "itl": gaps([record]),
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "error": record.error,
    }
