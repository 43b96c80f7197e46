"""Shared by the tests of the Python API: engines on the tiny model, and checks for leftover resources."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anyio.lowlevel import RunVar

import penstock
from penstock import _workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pytest

#: Deterministic, with a length that does not depend on the weights.
LONG = penstock.SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
SHORT = LONG.replace(max_tokens=8)
PROMPT: Sequence[int] = (10, 20, 30, 40)

#: How `anyio.run` starts each kind of event loop.
BACKENDS: list[dict[str, Any]] = [
    {"backend": "asyncio"},
    {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    {"backend": "trio"},
]


class Gate:
    """A logits processor that lets a request continue once it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, *_: object) -> None:
        """Wait."""
        self.opened.wait()


def make_engine(model: str | Path, **options: object) -> penstock.Engine:
    """A small engine with one thread, which is fastest for such a small model."""
    return penstock.Engine(model, **{"threads": 1, **options})  # type: ignore[arg-type]


def limit_threads(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the event loop have new worker threads, and this many for short work."""
    monkeypatch.setitem(_workers.NUM_THREADS, "short", number)
    monkeypatch.setattr(_workers, "_workers", RunVar("workers of a test"))


def bits_of(result: penstock.Result) -> tuple[tuple[int, ...], tuple[float, ...] | None, str]:
    """The fields that are equal in two results of the same request."""
    return result.token_ids, result.logprobs, result.finish_reason


def bytes_of_blocks(model: Path, count: int) -> int:
    """The size in bytes of a KV cache of `count` blocks."""
    with make_engine(model) as engine:
        return engine.info.memory.kv_cache // engine.info.num_blocks * count


def start_python(code: str, *arguments: object, stdin: int | None = None) -> subprocess.Popen[bytes]:
    """A Python process that SIGINT interrupts, even if this process ignores it (as a background job)."""
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", listen + code, *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def yield_processor() -> None:
    """Let other threads run; Windows has no `sched_yield`."""
    getattr(os, "sched_yield", functools.partial(time.sleep, 0))()


def wait_until(is_true: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for a condition that other threads bring about; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"still false after {seconds} s"
        yield_processor()


def run_in_threads(
    run: Callable[[Any], object],
    arguments: Iterable[Any],
    *,
    meanwhile: Callable[[], object] | None = None,
    seconds: float | None = None,
) -> None:
    """Call `run` with each argument, each in a thread, and then `meanwhile`; returns when all are done.

    With `seconds`, a thread that has not ended by then fails the test.
    """
    threads = [threading.Thread(target=run, args=(argument,), daemon=True) for argument in arguments]
    for thread in threads:
        thread.start()
    if meanwhile is not None:
        meanwhile()
    end = None if seconds is None else time.monotonic() + seconds
    for thread in threads:
        thread.join(None if end is None else max(0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread has not ended"


class Resources(NamedTuple):
    """System resources of engines and requests."""

    descriptors: int
    threads: list[str]


def resources() -> Resources:
    """The resources that this process holds, after a garbage collection; only threads of engines count."""
    gc.collect()
    num_descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return Resources(num_descriptors, engine_threads())


def engine_threads() -> list[str]:
    """The names of the engine threads in this process.

    A thread that has been joined is listed until the kernel has removed it; its flags say that it is exiting.
    """
    exiting = 0x4  # PF_EXITING
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            name, fields = (task / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            if not int(fields.split()[6]) & exiting:
                names.append(name)
    return sorted(name for name in names if name.startswith("penstock"))


def resident_bytes() -> int:
    """Memory of this process that is not shared with files."""
    _size, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


async def assert_at_rest(engine: penstock.Engine) -> None:
    """Check that no request is left, and that the next one succeeds.

    Requests cancelled before the next one started are gone when it has finished: both use the same mailbox,
    and steps complete in order.
    """
    result = await engine.generate(PROMPT, SHORT)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 8
    check_stats(engine)


def assert_at_rest_blocking(engine: penstock.Engine) -> None:
    """The same as `assert_at_rest`, without an event loop."""
    assert len(engine.blocking.generate(PROMPT, SHORT).token_ids) == 8
    check_stats(engine)


def check_stats(engine: penstock.Engine) -> None:
    """Check that the engine holds no request and no block."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.paused) == (0, 0, 0)
    assert (stats.blocks_used, stats.blocks_reserved) == (0, 0)
    assert stats.requests_admitted == stats.requests_finished
