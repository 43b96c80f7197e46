"""What the tests of the Python API share: engines on the tiny model, and what must be the same afterwards."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: Deterministic and of a known length, whatever the weights say.
LONG = penstock.SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
SHORT = LONG.replace(max_tokens=8)
PROMPT: Sequence[int] = (10, 20, 30, 40)

#: How `anyio.run` starts each kind of event loop.
BACKENDS: list[dict[str, Any]] = [
    {"backend": "asyncio"},
    {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    {"backend": "trio"},
]


def make_engine(model: Path, **options: object) -> penstock.Engine:
    """A small engine; one thread, because that is the quickest for so small a model."""
    return penstock.Engine(model, **{"threads": 1, **options})  # type: ignore[arg-type]


def bits_of(result: penstock.Result) -> tuple[tuple[int, ...], tuple[float, ...] | None, str]:
    """What must be the same in two results of the same request."""
    return result.token_ids, result.logprobs, result.finish_reason


def bytes_of_blocks(model: Path, count: int) -> int:
    """The size of a KV cache of so many blocks."""
    with make_engine(model) as engine:
        return engine.info.memory.kv_cache // engine.info.num_blocks * count


def start_python(code: str, *arguments: object, stdin: int | None = None) -> subprocess.Popen[bytes]:
    """A Python process that SIGINT interrupts, even where this one ignores it (a shell's background job)."""
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", listen + code, *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_until(is_true: Callable[[], bool], seconds: float = 20) -> None:
    """For what other threads bring about; fails when they do not in time."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not come about in time"
        os.sched_yield()


def run_in_threads(run: Callable[[Any], object], arguments: Iterable[Any]) -> None:
    """`run` of each argument, all at once; returns when all are done."""
    threads = [threading.Thread(target=run, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Resources(NamedTuple):
    """What engines and requests hold of the system."""

    descriptors: int
    threads: list[str]


def resources() -> Resources:
    """What this process holds now, without what only cycles keep alive; of threads the engines' own alone."""
    gc.collect()
    num_descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return Resources(num_descriptors, engine_threads())


def engine_threads() -> list[str]:
    """Names of the threads that engines run in this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if name.startswith("penstock"))


def resident_bytes() -> int:
    """Memory of this process that is not shared with files."""
    _size, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


async def assert_at_rest(engine: penstock.Engine) -> None:
    """Nothing of any request is left, and the next one is normal.

    What was cancelled before the next request started is gone when that has ended: both went through the same
    mailbox, and steps complete in order.
    """
    result = await engine.generate(PROMPT, SHORT)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 8
    check_stats(engine)


def assert_at_rest_blocking(engine: penstock.Engine) -> None:
    """As `assert_at_rest`, without an event loop."""
    assert len(engine.blocking.generate(PROMPT, SHORT).token_ids) == 8
    check_stats(engine)


def check_stats(engine: penstock.Engine) -> None:
    """The engine holds nothing."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.paused) == (0, 0, 0)
    assert (stats.blocks_used, stats.blocks_reserved) == (0, 0)
    assert stats.requests_admitted == stats.requests_finished
