"""Operating an engine: health, counters and histograms, draining, sleeping and waking."""

from __future__ import annotations

import copy
import errno
import math
import shutil
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import penstock
from support import hooks
from support.api.engines import (
    LONG,
    PROMPT,
    SHORT,
    assert_at_rest,
    assert_at_rest_blocking,
    bits_of,
    engine_threads,
    make_engine,
    resident_bytes,
    start_python,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.loops

LOSING_TOKEN = 77


async def becomes(is_true: Callable[[], bool]) -> None:
    """Wait for a condition that other tasks bring about."""
    with anyio.fail_after(20):
        while not is_true():
            await anyio.lowlevel.checkpoint()


async def drained_by(engine: penstock.Engine, group: Any) -> anyio.CancelScope:
    """Begin to close an engine without a limit on the drain, in a task with this scope."""
    scope = anyio.CancelScope()

    async def close() -> None:
        with scope:
            await engine.aclose(drain=math.inf)

    group.start_soon(close)
    await becomes(lambda: engine.health().state == "draining")
    return scope


# ---- counters and histograms


def test_stop_string_counts_as_a_stop(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        text = engine.blocking.generate(PROMPT, LONG).text
        result = engine.blocking.generate(PROMPT, LONG, stop=[text[20:24]])
        assert result.finish_reason == "stop"
        wait_until(lambda: engine.stats().requests_finished == 2)
        stats = engine.stats()
        assert (stats.finished_length, stats.finished_stop, stats.finished_cancelled) == (1, 1, 0)


def test_rejected_requests_are_counted(tiny_model: Path) -> None:
    gate = threading.Event()

    def wait(_tokens: object, _logits: object) -> None:
        gate.wait()

    with make_engine(tiny_model, max_num_seqs=1, max_waiting=1) as engine:
        try:
            running = engine.blocking.start_request(PROMPT, LONG, logits_processors=[wait])
            waiting = engine.blocking.start_request(PROMPT, LONG)
            for _ in range(3):
                with pytest.raises(penstock.OverloadedError):
                    engine.blocking.start_request(PROMPT, LONG)
            with pytest.raises(penstock.OverloadedError):
                engine.blocking.start_request("x", regex="a+")  # refused before the grammar is compiled
            stats = engine.stats()
        finally:
            gate.set()
        assert (stats.requests_admitted, stats.requests_rejected) == (2, 4)
        running.cancel()
        waiting.cancel()


def test_histograms_count_every_token_and_step(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        empty = engine.stats().time_to_first_token
        assert (empty.count, empty.sum, sum(empty.counts)) == (0, 0.0, 0)
        assert len(empty.counts) == len(empty.buckets) + 1
        timings = [engine.blocking.generate(PROMPT, SHORT).timings for _ in range(3)]
        stats = engine.stats()
        assert stats.time_to_first_token.count == 3
        assert stats.inter_token_latency.count == 3 * 7
        assert stats.queue_time.count == 3
        assert stats.queue_time.sum == pytest.approx(sum(times.queued for times in timings))
        assert stats.time_to_first_token.sum == pytest.approx(
            sum(times.first_token or 0 for times in timings)
        )
        assert (stats.tokens_per_step.count, stats.tokens_per_step.sum) == (stats.steps, 3 * (4 + 7))
        assert all(histogram.buckets == tuple(sorted(histogram.buckets)) for histogram in histograms(stats))
        assert copy.deepcopy(stats) == stats
        assert stats.to_dict()["queue_time"]["count"] == 3


def histograms(stats: penstock.Stats) -> list[penstock.Histogram]:
    return [stats.time_to_first_token, stats.inter_token_latency, stats.queue_time, stats.tokens_per_step]


# ---- health


@pytest.mark.anyio
async def test_health_of_a_working_engine(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    with pytest.raises(penstock.EngineStoppedError, match="not open"):
        engine.health()
    async with engine:
        idle = engine.health()
        assert (idle.state, idle.running, idle.waiting, idle.step_age) == ("open", 0, 0, None)
        request = await engine.start_request(PROMPT, LONG)
        await becomes(lambda: engine.stats().paused == 1)  # its output is not read, so nothing is computed
        health = engine.health()
        assert (health.state, health.running, health.step_age) == ("open", 1, None)
        request.cancel()
    with pytest.raises(penstock.EngineStoppedError, match="closed"):
        engine.health()


def test_health_has_the_age_of_a_step_that_hangs(tiny_model: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def hang(*_arguments: object) -> None:
        entered.set()
        release.wait()

    with make_engine(tiny_model) as engine:
        request = engine.blocking.start_request(PROMPT, SHORT, logits_processors=[hang])
        entered.wait()
        first = engine.health().step_age
        assert first is not None
        wait_until(lambda: (engine.health().step_age or 0) > first + 0.01)
        release.set()
        request.result()
        wait_until(lambda: engine.health().step_age is None)


@pytest.mark.needs("hooks")
@pytest.mark.anyio
async def test_health_of_a_lost_device_raises(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    engine._session.adopt(hooks.losing_engine(tiny_model, engine.config, LOSING_TOKEN))
    async with engine:
        with pytest.raises(penstock.EngineStoppedError):
            await engine.generate([*PROMPT, LOSING_TOKEN], SHORT)
        with pytest.raises(penstock.EngineStoppedError, match="lose the device"):
            engine.health()


# ---- draining


@pytest.mark.needs("proc")
@pytest.mark.anyio
async def test_drain_lets_open_requests_finish(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, max_num_seqs=3)
    await engine.start()
    lengths: list[int] = []

    async def generate(**options: Any) -> None:
        result = await engine.generate(PROMPT, max_tokens=100, ignore_eos=True, **options)
        lengths.append(len(result.token_ids))

    async with anyio.create_task_group() as group:
        for seed in range(6):
            group.start_soon(partial(generate, seed=seed))
        group.start_soon(partial(generate, num_beams=2))  # starts requests one after another
        await becomes(lambda: engine.stats().requests_admitted >= 7)
        await engine.aclose(drain=math.inf)
        assert not engine_threads()
    assert lengths == [100] * 7


@pytest.mark.needs("hooks")
@pytest.mark.anyio
async def test_drain_does_not_wait_for_a_failed_beam_search(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    engine._session.adopt(hooks.failing_engine(tiny_model, engine.config, LOSING_TOKEN))
    with pytest.raises(penstock.GenerationError) as caught:  # its traceback refers to the search
        await engine.generate([*PROMPT, LOSING_TOKEN], max_tokens=8, num_beams=2)
    await engine.aclose(drain=math.inf)
    assert caught.value.__traceback__ is not None


@pytest.mark.anyio
async def test_draining_engine_refuses_new_requests(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    await engine.start()
    request = await engine.start_request(PROMPT, LONG)
    async with anyio.create_task_group() as group:
        await drained_by(engine, group)
        assert not engine.is_running
        for start in (engine.start_request, engine.generate):
            with pytest.raises(penstock.EngineStoppedError, match="closing"):
                await start(PROMPT, SHORT)
        with pytest.raises(penstock.EngineStoppedError, match="closing"):
            engine.blocking.generate("x" * 5000, SHORT)
        assert len((await request.result()).token_ids) == 400  # read, it finishes, and the drain ends
    with pytest.raises(penstock.EngineStoppedError, match="closed"):
        engine.health()


@pytest.mark.anyio
async def test_requests_open_after_the_drain_are_cancelled(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    await engine.start()
    request = await engine.start_request(PROMPT, LONG)  # not read, so it does not finish
    await engine.aclose(drain=0.01)
    assert (await request.result()).finish_reason == "cancelled"


@pytest.mark.anyio
async def test_drain_of_an_idle_engine_returns_at_once(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    await engine.aclose(drain=math.inf)
    async with make_engine(tiny_model) as engine:
        await engine.aclose(drain=math.inf)
        await engine.aclose(drain=math.inf)


@pytest.mark.needs("proc")
@pytest.mark.anyio
async def test_cancelled_drain_closes_the_engine(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    await engine.start()
    request = await engine.start_request(PROMPT, LONG)
    async with anyio.create_task_group() as group:
        scope = await drained_by(engine, group)
        scope.cancel()
    assert scope.cancelled_caught
    assert (await request.result()).finish_reason == "cancelled"
    assert not engine_threads()


@pytest.mark.anyio
async def test_close_ends_the_drain_of_another_task(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    await engine.start()
    request = await engine.start_request(PROMPT, LONG)
    async with anyio.create_task_group() as group:
        await drained_by(engine, group)
        await engine.aclose()
    assert (await request.result()).finish_reason == "cancelled"


@pytest.mark.needs("proc")
@pytest.mark.anyio
async def test_drain_without_a_free_descriptor_raises_and_closes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    engine = make_engine(tiny_model)
    await engine.start()
    request = await engine.start_request(PROMPT, LONG)
    monkeypatch.setattr("penstock.engine.Port", fail)
    with pytest.raises(OSError, match="too many open files"):
        await engine.aclose(drain=math.inf)
    assert (await request.result()).finish_reason == "cancelled"
    assert not engine_threads()
    await engine.aclose(drain=math.inf)  # nothing to wait for, so no descriptor is needed


@pytest.mark.parametrize("drain", [-1, math.nan, "1", True, None])
def test_bad_drain_is_refused_and_closes_nothing(tiny_model: Path, drain: Any) -> None:
    with make_engine(tiny_model) as engine:
        for call in (engine.close, engine.blocking.close, engine.blocking.sleep):
            with pytest.raises(penstock.ConfigError, match=r"drain=.*number of seconds from 0") as caught:
                call(drain=drain)
            assert caught.value.field == "drain"
        assert_at_rest_blocking(engine)


def test_blocking_drain_lets_open_requests_finish(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    engine.blocking.start()
    request = engine.blocking.start_request(PROMPT, LONG)
    closing = threading.Thread(target=partial(engine.close, drain=math.inf))
    closing.start()
    wait_until(lambda: engine.health().state == "draining")
    assert len(request.result().token_ids) == 400
    closing.join()
    other = make_engine(tiny_model)
    other.blocking.start()
    unread = other.blocking.start_request(PROMPT, LONG)
    other.close(drain=0.01)
    assert unread.result().finish_reason == "cancelled"


@pytest.mark.needs("signals")
def test_sigint_ends_a_blocking_drain(tiny_model: Path) -> None:
    process = start_python(
        """
import math, os, sys, threading, penstock
engine = penstock.Engine(sys.argv[1], threads=1)
engine.blocking.start()
request = engine.blocking.start_request([10, 20, 30, 40], max_tokens=400, ignore_eos=True)

def tell():
    while engine.health().state != "draining":
        os.sched_yield()
    print("draining", flush=True)

threading.Thread(target=tell).start()
try:
    engine.close(drain=math.inf)
except KeyboardInterrupt:
    print(request.result().finish_reason, flush=True)
""",
        tiny_model,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"draining\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (output, errors, process.returncode) == (b"cancelled\n", b"", 0)


# ---- sleeping


@pytest.mark.needs("proc")
@pytest.mark.anyio
async def test_wake_gives_the_same_bits_as_before_sleep(tiny_model: Path) -> None:
    options = LONG.replace(logprobs=True, temperature=1)
    async with make_engine(tiny_model, kv_cache_bytes=64 << 20) as engine:
        before = await engine.generate(PROMPT, options)
        num_blocks, awake = engine.info.num_blocks, resident_bytes()
        await engine.sleep()
        await engine.sleep()
        assert engine.health() == penstock.Health(state="asleep", running=0, waiting=0, step_age=None)
        assert not engine.is_running
        assert not engine_threads()
        assert engine.info.device != "cpu" or awake - resident_bytes() > engine.info.memory.weights
        assert engine.decode(engine.encode("Hello")) == "Hello"
        assert engine.stats().requests_finished == 1
        await engine.wake()
        await engine.wake()
        assert engine.is_running
        assert (engine.info.num_blocks, engine.stats().requests_finished) == (num_blocks, 0)
        assert bits_of(await engine.generate(PROMPT, options)) == bits_of(before)
        await assert_at_rest(engine)


@pytest.mark.anyio
async def test_requests_of_a_sleeping_engine_are_refused(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine:
        unread = await engine.start_request(PROMPT, LONG)
        await engine.sleep()
        assert (await unread.result()).finish_reason == "cancelled"
        for start in (engine.start_request, engine.generate):
            with pytest.raises(penstock.EngineStoppedError, match=r"asleep; call wake\(\) first"):
                await start(PROMPT, SHORT)
        for call in (engine.reset_prefix_cache, partial(engine.blocking.generate, PROMPT)):
            with pytest.raises(penstock.EngineStoppedError, match="asleep"):
                call()
        with pytest.raises(penstock.EngineStoppedError, match="asleep"):
            await engine.start()
    with pytest.raises(penstock.EngineStoppedError, match="closed"):
        await engine.wake()
    with pytest.raises(penstock.EngineStoppedError, match="closed"):
        await engine.sleep()


@pytest.mark.anyio
async def test_sleep_with_drain_lets_open_requests_finish(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine, anyio.create_task_group() as group:
        request = await engine.start_request(PROMPT, LONG)
        group.start_soon(partial(engine.sleep, drain=math.inf))
        await becomes(lambda: engine.health().state == "draining")
        assert len((await request.result()).token_ids) == 400
        await becomes(lambda: engine.health().state == "asleep")
        await engine.wake()
        await assert_at_rest(engine)


@pytest.mark.anyio
async def test_engine_that_was_never_opened_cannot_sleep(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    for call in (engine.sleep, engine.wake):
        with pytest.raises(penstock.EngineStoppedError, match="not open"):
            await call()
    async with engine:
        await assert_at_rest(engine)


@pytest.mark.anyio
async def test_failed_wake_can_be_repeated(tiny_model: Path, tmp_path: Path) -> None:
    model, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(tiny_model, model)
    async with make_engine(model) as engine:
        await engine.sleep()
        model.rename(away)
        with pytest.raises(penstock.ModelLoadError):
            await engine.wake()
        assert engine.health().state == "asleep"
        away.rename(model)
        await engine.wake()
        await assert_at_rest(engine)


@pytest.mark.anyio
async def test_cancelled_wake_leaves_the_engine_asleep(tiny_model: Path) -> None:
    reached, release = threading.Event(), threading.Event()
    release.set()

    def progress(_done: int, _total: int) -> None:
        reached.set()
        release.wait()

    async with make_engine(tiny_model, progress=progress) as engine:
        await engine.sleep()
        reached.clear()
        release.clear()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def cancel_while_loading() -> None:
                    await anyio.to_thread.run_sync(reached.wait)
                    with pytest.raises(penstock.EngineStoppedError, match="wait until wake"):
                        await engine.generate(PROMPT, SHORT)
                    scope.cancel()
                    release.set()

                group.start_soon(cancel_while_loading)
                await engine.wake()
        assert scope.cancelled_caught
        assert engine.health().state == "asleep"
        await engine.wake()
        await assert_at_rest(engine)


@pytest.mark.anyio
async def test_wake_cancelled_before_it_begins_can_be_repeated(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine:
        await engine.sleep()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await engine.wake()
        assert scope.cancelled_caught
        await engine.wake()
        await assert_at_rest(engine)


@pytest.mark.anyio
async def test_sleep_that_ends_late_leaves_a_woken_engine_open(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine, anyio.create_task_group() as group:
        request = await engine.start_request(PROMPT, LONG)
        group.start_soon(partial(engine.sleep, drain=math.inf))
        while engine.health().state != "draining":
            await anyio.lowlevel.checkpoint()
        late = engine._session.check_may_sleep()
        await engine.sleep()
        await engine.wake()
        assert engine._session.stop_to_sleep(late) is None
        assert (await request.result()).finish_reason == "cancelled"
        await assert_at_rest(engine)


@pytest.mark.needs("proc")
def test_blocking_sleep_and_wake(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        before = engine.blocking.generate(PROMPT, SHORT)
        engine.blocking.sleep()
        with pytest.raises(penstock.EngineStoppedError, match="asleep"):
            engine.blocking.generate(PROMPT, SHORT)
        engine.blocking.wake()
        assert bits_of(engine.blocking.generate(PROMPT, SHORT)) == bits_of(before)
        engine.blocking.sleep()
    assert not engine_threads()


def test_sleeping_engine_can_be_dropped(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    engine.blocking.start()
    engine.blocking.sleep()
    del engine  # without a ResourceWarning, which is an error in the tests
