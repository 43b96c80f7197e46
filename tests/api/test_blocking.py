"""`engine.blocking`: the API without an event loop, in threads."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import pytest

import penstock
from penstock.request import BlockingRequest
from support.api.engines import (
    LONG,
    PROMPT,
    SHORT,
    Gate,
    assert_at_rest_blocking,
    make_engine,
    resources,
    run_in_threads,
    start_python,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


def test_blocking_api_returns_the_async_results(engine: penstock.Engine) -> None:
    whole = engine.blocking.generate(PROMPT, LONG, logprobs=True)
    request = engine.blocking.start_request(PROMPT, LONG, logprobs=True)
    chunks = list(request)
    assert "".join(chunk.text for chunk in chunks) == whole.text == request.result().text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert request.result().logprobs == whole.logprobs
    assert request.finish_reason == "length"
    with engine.blocking.stream("Hello", LONG) as request:
        assert next(request).token_ids
    assert request.result().finish_reason == "cancelled"
    assert engine.blocking.generate([{"role": "user", "content": "hi"}], SHORT).finish_reason == "length"
    assert_at_rest_blocking(engine)


def test_blocking_api_raises_the_async_errors(engine: penstock.Engine) -> None:
    with pytest.raises(penstock.InvalidRequestError):
        engine.blocking.generate("")
    with pytest.raises(penstock.EngineStoppedError):
        penstock.Engine("model").blocking.generate("x")


def test_misused_call_error_names_the_correct_use(engine: penstock.Engine) -> None:
    with pytest.raises(penstock.InvalidRequestError, match="pass one prompt per call"):
        engine.blocking.generate(["one", "two"])  # type: ignore[arg-type]
    chats: Any = [[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]]
    with pytest.raises(penstock.InvalidRequestError, match=r"pass one prompt per call, or use generate_many"):
        engine.blocking.generate(chats)
    for model in (None, 1):
        with pytest.raises(TypeError, match=r"expected str, os\.PathLike or bytes"):
            penstock.Engine(model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"with engine\.blocking\.stream\(\.\.\.\) as request"):
        iter(engine.blocking.stream(PROMPT))
    with pytest.raises(penstock.EngineStoppedError, match="`with engine`"):
        penstock.Engine("model").blocking.generate(PROMPT)


@pytest.mark.anyio
async def test_stream_without_context_manager_raises_with_a_hint(engine: penstock.Engine) -> None:
    with pytest.raises(TypeError, match=r"async with engine\.stream"):
        await engine.stream(PROMPT)
    with pytest.raises(TypeError, match=r"async with engine\.stream"):
        async for _ in engine.stream(PROMPT):
            pass


def test_dropped_request_is_cancelled_with_a_warning(engine: penstock.Engine) -> None:
    request = engine.blocking.start_request(PROMPT, LONG)
    with pytest.warns(ResourceWarning, match="dropped before it finished"):
        del request
    assert_at_rest_blocking(engine)


def test_several_readers_divide_the_chunks(engine: penstock.Engine) -> None:
    expected = engine.blocking.generate(PROMPT, LONG)
    gate = Gate()
    request = engine.blocking.start_request(PROMPT, LONG, logits_processors=[gate])
    chunks: list[penstock.Chunk] = []

    def read(_: int) -> None:
        for chunk in request:
            chunks.append(chunk)  # noqa: PERF402 - threads share the list

    def open_gate() -> None:
        assert request.poll() is None
        gate.opened.set()

    run_in_threads(read, range(8), meanwhile=open_gate, seconds=60)
    assert sorted(token for chunk in chunks for token in chunk.token_ids) == sorted(expected.token_ids)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]


class Shared:
    """A native request with a chunk that another thread takes; the last chunk and the end arrive then."""

    is_forked = True  # nothing has to be cancelled
    finish_reason = "length"

    def __init__(self) -> None:
        self.chunks = [None, "last"]

    def has_chunk(self) -> bool:
        """Always."""
        return True

    def take(self) -> str | None:
        """The next one."""
        return self.chunks.pop(0)


def test_last_chunk_that_follows_a_taken_one_is_read() -> None:
    request: Any = BlockingRequest(*cast("Any", (None, Shared(), None)))
    assert request.read() == "last"


@pytest.mark.needs("proc")
def test_many_threads_share_one_engine(engine: penstock.Engine) -> None:
    expected = [
        engine.blocking.generate(PROMPT, LONG, max_tokens=40, seed=seed).token_ids for seed in range(64)
    ]

    def ask(seed: int) -> tuple[int, ...]:
        with engine.blocking.stream(PROMPT, LONG, max_tokens=40, seed=seed) as request:
            return tuple(token for chunk in request for token in chunk.token_ids)

    before = resources()
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(ask, range(64))) == expected
    assert_at_rest_blocking(engine)
    assert resources() == before


def test_request_is_cancelled_from_another_thread(engine: penstock.Engine) -> None:
    request = engine.blocking.start_request(PROMPT, LONG)
    thread = threading.Thread(target=request.cancel)
    thread.start()
    thread.join()
    assert request.result().finish_reason == "cancelled"


def test_closed_engine_wakes_blocked_threads(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, max_num_seqs=1)
    engine.blocking.start()
    requests = [engine.blocking.start_request(PROMPT, LONG) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda request: request.result().finish_reason, requests)
        engine.close()
        reasons = list(results)
    assert set(reasons) <= {"cancelled", "length"}
    assert "cancelled" in reasons


CTRL_C = """
import sys, penstock
with penstock.Engine(sys.argv[1], threads=1) as engine:
    running = engine.blocking.start_request([1], max_tokens=400, ignore_eos=True)
    try:
        print("waiting", flush=True)
        while True:
            engine.blocking.generate([1], max_tokens=400, ignore_eos=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finish_reason = running.result().finish_reason
    engine.blocking.generate([1], max_tokens=1)  # what was cancelled before it is gone after it
    print(finish_reason, engine.stats().running)
"""


@pytest.mark.needs("signals")
def test_ctrl_c_interrupts_a_wait_and_the_engine_continues(tiny_model: Path) -> None:
    process = start_python(CTRL_C, tiny_model)
    assert process.stdout is not None
    assert process.stdout.readline() == b"waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == b"interrupted\nlength 0\n", err
    assert err == b""


INTERRUPTS = """
import signal, sys, threading, penstock
opened = threading.Event()
signal.signal(signal.SIGALRM, signal.default_int_handler)
with penstock.Engine(sys.argv[1], threads=1) as engine:
    def wait(*_): opened.wait()
    request = engine.blocking.start_request([1], max_tokens=40, ignore_eos=True, logits_processors=[wait])
    for tenths in range(1, 201):
        try:
            signal.setitimer(signal.ITIMER_REAL, tenths / 10_000_000)
            request.read()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    opened.set()
    print(len([token for chunk in request for token in chunk.token_ids]))
"""


@pytest.mark.needs("signals")
def test_ctrl_c_at_any_moment_leaves_a_request_readable(tiny_model: Path) -> None:
    process = start_python(INTERRUPTS, tiny_model)
    out, err = process.communicate(timeout=60)
    assert (out, err) == (b"interrupted\n" * 200 + b"40\n", b"")
