"""The load generator's parts: schedules, percentiles, goals and events, with an injected clock."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from array import array
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import numpy as np
import pytest

from penstock.bench.client import Record
from penstock.bench.plot import terminal_plot
from penstock.bench.prompts import Body
from penstock.bench.run import Clock, Measurement, arrivals, measure
from penstock.bench.settings import BenchSettings, Load
from penstock.bench.sse import EventReader, StreamError
from penstock.bench.summary import summarize
from penstock.bench.watch import watching

if TYPE_CHECKING:
    from collections.abc import Sequence

URL = "http://127.0.0.1:1"


class FakeClock(Clock):
    """A time that passes only in `sleep_until`, which is late by `late` seconds."""

    def __init__(self, late: float = 0.0) -> None:
        self.time = 100.0
        self.late = late

    def now(self) -> float:
        """The current time."""
        return self.time

    async def sleep_until(self, moment: float) -> None:
        """Set the time, after other tasks have run."""
        await anyio.lowlevel.checkpoint()
        self.time = max(self.time, moment + self.late)


def settings_of(**fields: Any) -> BenchSettings:
    return BenchSettings(url=URL, **fields)


def record(
    times: Sequence[float], *, tokens: int | None = None, end: float | None = None, sent: float = 0.0
) -> Record:
    """A request that was scheduled at 0, with output at these times."""
    last = times[-1] if times else sent
    made = Record(0.0, sent, tokens or 1, end=last if end is None else end, times=array("d", times))
    made.input_tokens, made.output_tokens = 10, tokens
    return made


def measured(records: list[Record], load: Load | None = None) -> Measurement:
    return Measurement(load or Load(1), start=0.0, records=records, peak_in_flight=len(records))


def first(times: Any, count: int) -> list[float]:
    return list(itertools.islice(times, count))


# ---- loads


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_intervals_have_the_rate_and_the_burstiness(burstiness: float, variation: float) -> None:
    times = first(arrivals(Load(request_rate=8.0), burstiness, 1), 20_000)
    intervals = np.diff(times)
    assert times[0] == 0.0
    assert intervals.mean() == pytest.approx(1 / 8, rel=0.05)
    assert intervals.std() / intervals.mean() == pytest.approx(variation, abs=0.06)


def test_schedule_follows_the_seed() -> None:
    load = Load(request_rate=8.0)
    assert first(arrivals(load, 1.0, 1), 50) == first(arrivals(load, 1.0, 1), 50)
    assert first(arrivals(load, 1.0, 1), 50) != first(arrivals(load, 1.0, 2), 50)
    assert first(arrivals(Load(), 1.0, 1), 3) == [0.0, 0.0, 0.0]


def test_open_loop_starts_requests_while_others_run() -> None:
    settings = settings_of(request_rate=[4.0], num_prompts=20, seed=7)
    clock, starts, all_started = FakeClock(), [], asyncio.Event()

    async def send(_body: Body, scheduled: float) -> Record:
        starts.append((scheduled, clock.now()))
        if len(starts) == 20:
            all_started.set()
        await all_started.wait()  # no request ends before the last has started
        return Record(scheduled, clock.now(), 1, end=clock.now())

    measurement = Measurement(settings.loads[0])
    source = itertools.repeat(Body(b"", 1))
    asyncio.run(measure(measurement, settings, source, send, clock))
    expected = [100.0 + offset for offset in first(arrivals(Load(request_rate=4.0), 1.0, 7), 20)]
    assert starts == [(moment, moment) for moment in expected]
    assert (measurement.peak_in_flight, measurement.in_flight, len(measurement.records)) == (20, 0, 20)


def test_latency_counts_from_the_scheduled_time() -> None:
    settings = settings_of(request_rate=[1.0], burstiness=math.inf, num_prompts=5)
    clock = FakeClock(late=3.0)

    async def send(_body: Body, scheduled: float) -> Record:
        now = clock.now()
        return Record(scheduled, now, 1, end=now + 0.5, times=array("d", [now + 0.25]))

    measurement = Measurement(settings.loads[0])
    asyncio.run(measure(measurement, settings, itertools.repeat(Body(b"", 1)), send, clock))
    found = summarize(measurement, settings)
    assert [made.scheduled for made in measurement.records] == [100.0, 101.0, 102.0, 103.0, 104.0]
    assert found["p50_ttft_ms"] == pytest.approx(3250)
    assert found["p50_e2el_ms"] == pytest.approx(3500)
    assert found["client"]["p99_late_start_ms"] == pytest.approx(3000)
    assert "cannot start requests at this rate: they are late by 3000 ms (p99)" in found["warnings"][0]


@pytest.mark.parametrize("load", [{"concurrency": [3]}, {"request_rate": [2.0], "burstiness": math.inf}])
def test_no_request_starts_after_the_duration(load: dict[str, Any]) -> None:
    settings = settings_of(**load, duration=5.0)
    clock = FakeClock()

    async def send(_body: Body, scheduled: float) -> Record:
        await clock.sleep_until(clock.now() + 0.4)
        return Record(scheduled, scheduled, 1, end=clock.now())

    measurement = Measurement(settings.loads[0])
    asyncio.run(measure(measurement, settings, itertools.repeat(Body(b"", 1)), send, clock))
    starts = [made.scheduled - 100.0 for made in measurement.records]
    assert max(starts) < 5.0
    assert max(starts) >= 4.0


def test_lag_of_a_blocked_event_loop_is_measured() -> None:
    async def block() -> float:
        clock = FakeClock()
        async with watching(clock.now) as watch:
            for time in (100.0, 100.2):  # the loop is blocked during the second wait
                clock.time, count = time, len(watch.lags)
                while len(watch.lags) == count:
                    await anyio.lowlevel.checkpoint()
        return max(watch.lags)

    assert asyncio.run(block()) == pytest.approx(0.2 - 0.01)


# ---- numbers


def test_latencies_equal_those_of_numpy() -> None:
    chance = random.Random(3)
    percents = (0, 1, 37.5, 50, 90, 99, 99.9, 100)
    records = []
    for _ in range(101):
        times = list(itertools.accumulate(chance.expovariate(20) for _ in range(chance.randint(1, 40))))
        records.append(record(times, tokens=len(times), end=times[-1] + 0.01))
    found = summarize(measured(records), settings_of(metric_percentiles=percents))
    tpot = [
        (made.times[-1] - made.times[0]) / (len(made.times) - 1) for made in records if len(made.times) > 1
    ]
    expected = {
        "ttft": [made.times[0] for made in records],
        "tpot": tpot,
        "itl": np.concatenate([np.diff(made.times) for made in records]),
        "e2el": [made.end for made in records],
    }
    for name, seconds in expected.items():
        values = np.asarray(seconds) * 1e3
        assert found[f"mean_{name}_ms"] == pytest.approx(values.mean())
        assert found[f"std_{name}_ms"] == pytest.approx(values.std())
        assert found[f"median_{name}_ms"] == pytest.approx(np.median(values))
        for percent in percents:
            assert found[f"p{percent:g}_{name}_ms"] == pytest.approx(np.percentile(values, percent)), name


def test_rates_and_goodput_by_hand() -> None:
    """4 seconds; goals of 200 ms, 50 ms and 1500 ms."""
    records = [
        record([0.1, 0.2, 0.3], tokens=3, end=1.5),  # TTFT 100, TPOT 100: too slow
        record([0.2, 0.25, 0.3], tokens=3, end=1.5),  # TTFT 200, TPOT 50, E2EL 1500: just good
        record([0.1], tokens=1, end=4.0),  # E2EL 4000: too slow
        record([0.1], tokens=1, end=0.5),  # one token has no TPOT: good
        record([], tokens=0, end=0.5),  # no text: not good
    ]
    failed = record([], end=0.1)
    failed.error, failed.message = "HTTP 429", "slow down"
    settings = settings_of(goodput={"ttft": 200, "tpot": 50.0001, "e2el": 1500})
    found = summarize(measured([*records, failed]), settings)
    assert (found["completed"], found["failed"], found["errors"]) == (5, 1, {"HTTP 429": 1})
    assert found["request_throughput"] == 5 / 4.0
    assert found["request_goodput"] == 2 / 4.0
    assert found["output_throughput"] == 8 / 4.0
    assert found["total_token_throughput"] == (8 + 50) / 4.0
    assert found["warnings"] == ["1 x HTTP 429: slow down"]


def test_usage_counts_and_differences_are_warnings() -> None:
    records = [record([0.1, 0.2], tokens=9), record([0.1, 0.2])]
    for made in records:
        made.max_tokens = 9
    found = summarize(measured(records), settings_of(ignore_eos=True))
    assert (found["total_output_tokens"], found["output_events"]) == (11, 4)
    missing, short, events = found["warnings"]
    assert missing.startswith("1 responses have no usage")
    assert short.startswith("1 responses do not have max_tokens")
    assert events.startswith("11 tokens came in 4 events")


def test_empty_load_point_has_numbers() -> None:
    found = summarize(measured([]), settings_of(goodput={"ttft": 1.0}))
    assert (found["request_goodput"], found["mean_ttft_ms"], found["duration"]) == (0.0, None, 0.0)
    json.dumps(found, allow_nan=False)


def test_busy_load_generator_is_a_warning() -> None:
    settings = settings_of()
    measurement = measured([record([1.0], tokens=1)])
    measurement.watch.cpu = 0.9
    assert "is the bottleneck" in summarize(measurement, settings)["warnings"][0]
    measurement.watch.cpu = 0.1
    measurement.watch.lags.extend([0.025] * 10)
    assert summarize(measurement, settings)["warnings"] == [
        "the load generator waits for the CPU: its times are late by 25 ms (p99)"
    ]
    measurement.watch.lags[:] = array("d", [0.015] * 10)
    assert summarize(measurement, settings)["warnings"] == []


@pytest.mark.parametrize(("seconds", "error"), [(0.5, None), (1.5, "OSError")])
def test_cpu_use_of_the_start_is_no_warning(seconds: float, error: str | None) -> None:
    measurement = measured([record([seconds], tokens=1)])
    measurement.records[0].error = error
    measurement.watch.cpu = 1.04
    assert not any("bottleneck" in warning for warning in summarize(measurement, settings_of())["warnings"])


def test_fewer_requests_in_flight_than_asked_is_a_warning() -> None:
    settings = settings_of(concurrency=[64, 3], num_prompts=3)
    measurements = [Measurement(load, peak_in_flight=3) for load in settings.loads]
    warnings = [summarize(measurement, settings)["warnings"] for measurement in measurements]
    assert warnings == [["at most 3 requests were in flight: a higher number of prompts is necessary"], []]


def test_repeated_prompts_are_a_warning() -> None:
    records = [record([0.1], tokens=1) for _ in range(5)]
    for made in records[2:]:
        made.is_repeated = True
    [warning] = summarize(measured(records), settings_of())["warnings"]
    assert warning.startswith("3 of 5 requests have the prompt of an earlier one")


def test_several_choices_are_a_warning() -> None:
    records = [record([0.1], tokens=1)]
    [warning] = summarize(measured(records), settings_of(extra_body={"n": 4}))["warnings"]
    assert warning.startswith("n is not 1")
    assert summarize(measured(records), settings_of(extra_body={"n": 1}))["warnings"] == []


def test_terminal_plot_has_bars_in_proportion() -> None:
    rows = [(10.0, 20.0, 40.0), (5.0, 5.0, 5.0)]
    points = [
        {"max_concurrency": count, "request_rate": None}
        | {f"{name}_{metric}_ms": value for metric in ("ttft", "itl", "e2el") for name, value in named}
        for count, row in zip((1, 64), rows, strict=True)
        for named in [list(zip(("p50", "p90", "p99"), row, strict=True))]
    ]
    lines = terminal_plot(points, settings_of()).splitlines()
    assert lines[1] == f" 1 |{'█' * 12}{'▓' * 12}{'▒' * 24}  10.0  20.0  40.0"
    assert lines[2] == f"64 |{'█' * 6}{' ' * 42}  5.0  5.0  5.0"


# ---- events


def stream_of(events: list[Any], newline: str = "\n") -> bytes:
    parts = [event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events]
    lines = [part if part.startswith(":") else f"data: {part}" for part in parts]
    return "".join(line + newline * 2 for line in lines).encode()


USAGE = {"prompt_tokens": 3, "completion_tokens": 4}
EVENTS: list[Any] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None},
    {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": None},
    ": keep-alive",
    {"choices": [{"index": 0, "delta": {"content": '\n"text": "x" \\'}}], "usage": None},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "ü"}}], "usage": None},
    {"choices": [{"index": 0, "text": '"'}], "usage": None},
    {"choices": [{"index": 0, "delta": {"content": ""}, "note": 'a "content": "b"'}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": None},
    {"choices": [], "usage": USAGE},
    "[DONE]",
]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_events_with_text_are_counted_however_they_are_cut(size: int, newline: str) -> None:
    data = stream_of(EVENTS, newline)
    reader = EventReader()
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size], float(start))
    assert reader.end(0.0) == USAGE
    assert len(reader.times) == 4
    assert list(reader.times) == sorted(reader.times)


TEXT = b'data: {"choices": [{"text": "a"}]}\n\n'
STOP = b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
COUNTS = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\n'


@pytest.mark.parametrize(
    "end",
    [
        COUNTS + b"data:[DONE]\n\n",
        COUNTS + b"data: [DONE]\n",
        COUNTS + b"data: [DONE]",
        COUNTS + b"event: done\nid: 7\ndata: [DONE]\n\n",
        COUNTS + b"id: 7\n: comment\n\ndata: [DONE]\n\n",
        STOP + COUNTS,
        COUNTS + STOP,
        COUNTS,
        COUNTS.rstrip(),
    ],
)
def test_stream_can_end_in_each_way_of_the_format(end: bytes) -> None:
    reader = EventReader()
    reader.feed(TEXT + end, 1.0)
    assert reader.end(2.0) == USAGE
    assert list(reader.times) == [1.0]


@pytest.mark.parametrize("key", ["text", "content", "reasoning", "reasoning_content", "arguments", "name"])
def test_text_of_each_key_is_output(key: str) -> None:
    reader = EventReader()
    reader.feed(stream_of([{"choices": [{"delta": {key: "a"}}]}, {"choices": [{"delta": {key: ""}}]}]), 1.0)
    assert list(reader.times) == [1.0]


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ("x", {}),
        ([1], {}),
        ({"prompt_tokens": "5", "completion_tokens": 4}, {"completion_tokens": 4}),
        ({"prompt_tokens": None, "completion_tokens": -1, "details": {}}, {}),
        ({"prompt_tokens": 10**400, "completion_tokens": 1.5}, {}),
    ],
)
def test_usage_that_is_no_count_is_left_out(usage: object, counts: dict[str, int]) -> None:
    reader = EventReader()
    reader.feed(stream_of([EVENTS[1], {"choices": [], "usage": usage}, "[DONE]"]), 0.0)
    assert reader.end(0.0) == counts


@pytest.mark.parametrize(
    ("events", "kind", "message"),
    [
        ([EVENTS[1], {"error": {"message": "broken"}}], "error event", "broken"),
        ([EVENTS[1], {"error": "broken"}, "[DONE]"], "error event", "broken"),
        ([EVENTS[1]], "incomplete stream", r"without \[DONE\]"),
        ([EVENTS[1], "{", "[DONE]"], "invalid event", "data: {"),
        ([EVENTS[1], "[" * 100_000, "[DONE]"], "invalid event", r"data: \[\["),
        ([EVENTS[1], {"choices": [3, {}], "usage": USAGE}], "incomplete stream", "without a finish reason"),
        ([], "incomplete stream", r"without \[DONE\]"),
    ],
)
def test_stream_that_fails_has_a_kind(events: list[Any], kind: str, message: str) -> None:
    reader = EventReader()
    reader.feed(stream_of(events), 0.0)
    with pytest.raises(StreamError, match=message) as error:
        reader.end(0.0)
    assert error.value.kind == kind


def test_message_of_a_server_is_one_printable_line() -> None:
    error = StreamError("HTTP 500", "\x1b[2J a\n\tb\x00" + "x" * 1000)
    assert str(error).startswith("[2J a b x")
    assert len(str(error)) == 200


def test_event_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bench.sse._MAX_EVENT_BYTES", 100)
    reader = EventReader()
    with pytest.raises(StreamError, match="more than 100 bytes"):
        reader.feed(b"data: " + b"x" * 100, 0.0)
