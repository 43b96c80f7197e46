"""Many clients with long prompts, and threads that wait for the engine: bounded threads, no deadlock."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

import penstock
from penstock import _chat_sandbox, _client, _workers
from support.api.engines import (
    LONG,
    PROMPT,
    SHORT,
    assert_at_rest,
    limit_threads,
    make_engine,
    resident_bytes,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def demo_engine(demo_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(demo_model) as engine:
        yield engine


class Rendering:
    """Template renderings that begin, wait for `release`, and end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.num_begun = 0
        self.num_running = 0
        self._lock = threading.Lock()
        self._render = _chat_sandbox.render
        monkeypatch.setattr(_chat_sandbox, "render", self._hold)

    def _hold(self, *arguments: Any) -> str:
        with self._lock:
            self.num_begun += 1
            self.num_running += 1
        assert self.release.wait(20), "the event loop is blocked"
        try:
            return self._render(*arguments)
        finally:
            with self._lock:
                self.num_running -= 1


@pytest.fixture
def rendering(monkeypatch: pytest.MonkeyPatch) -> Rendering:
    return Rendering(monkeypatch)


async def until(is_true: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not is_true():
            await anyio.lowlevel.checkpoint()


def longest_text(engine: penstock.Engine) -> int:
    """The most bytes of a prompt."""
    with pytest.raises(penstock.InvalidRequestError) as caught:
        engine.blocking.generate("x" * (64 << 20), SHORT)
    assert caught.value.limit is not None
    return int(caught.value.limit.split()[2])


async def test_text_with_more_bytes_than_any_prompt_is_refused(engine: penstock.Engine) -> None:
    limit = longest_text(engine)
    assert limit % engine.info.max_model_len == 0
    text = "é" * (limit // 2 + 1)
    num_bytes = len(text.encode())
    for call in (engine.generate, engine.start_request, engine.score):
        with pytest.raises(penstock.InvalidRequestError, match=f"{num_bytes} bytes") as caught:
            await call(text)
        assert (caught.value.field, caught.value.value) == ("prompt", num_bytes)
        assert caught.value.limit == f"at most {limit} bytes"
    with pytest.raises(penstock.InvalidRequestError, match="tokens"):
        await engine.generate("x" * limit, SHORT)


async def test_overloaded_engine_refuses_before_it_prepares(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def hold(_tokens: object, _logits: object) -> None:
        assert release.wait(20)

    def fail(*_arguments: object) -> str:
        raise AssertionError

    async with make_engine(tiny_model, max_num_seqs=1, max_waiting=1) as engine:
        try:
            running = await engine.start_request(PROMPT, SHORT, logits_processors=[hold])
            waiting = await engine.start_request(PROMPT, SHORT)
            monkeypatch.setattr(_chat_sandbox, "render", fail)
            monkeypatch.setattr("penstock._workers.run_in_thread", fail)
            for prompt, options in (
                (MESSAGES, {}),
                ("x" * 2400, {}),
                ("Hi", {"regex": "a+"}),
                (MESSAGES, {"num_beams": 2}),
                ("x" * 2400, {"num_beams": 2}),
            ):
                with pytest.raises(penstock.OverloadedError, match="max_waiting"):
                    await engine.generate(prompt, max_tokens=8, **options)
                with pytest.raises(penstock.OverloadedError, match="max_waiting"):
                    engine.blocking.generate(prompt, max_tokens=8, **options)
        finally:
            release.set()
        monkeypatch.undo()
        await running.result()
        await waiting.result()
        assert (await engine.generate(MESSAGES, SHORT)).finish_reason == "length"


async def test_cancelled_rendering_keeps_its_slot_until_it_ends(
    engine: penstock.Engine, rendering: Rendering, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_threads(monkeypatch, 2)
    for _ in range(5):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(engine.generate, MESSAGES, SHORT)
                await until(lambda: rendering.num_begun == 2)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
    assert rendering.num_running == 2
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(engine.generate, MESSAGES, SHORT)
        await anyio.wait_all_tasks_blocked()
        assert (rendering.num_begun, rendering.num_running) == (2, 2)
        rendering.release.set()
    await assert_at_rest(engine)


async def test_cancelled_tokenisation_ends_early(
    demo_engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = demo_engine._session
    text = "some words " * (longest_text(demo_engine) // 11)
    has_begun = threading.Event()
    errors: list[BaseException] = []

    def submit(*arguments: Any) -> Any:
        has_begun.set()
        try:
            return type(session).submit(session, *arguments)
        except BaseException as error:
            errors.append(error)
            raise

    monkeypatch.setattr(session, "submit", submit)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(demo_engine.generate, text, SHORT)
            await until(has_begun.is_set)
            scope.cancel()
    wait_until(lambda: bool(errors))
    assert [type(error) for error in errors] == [_workers.AbandonedError], errors
    monkeypatch.undo()
    await assert_at_rest(demo_engine)


@pytest.mark.needs("proc")
async def test_clients_that_give_up_leave_few_threads_and_flat_memory(demo_engine: penstock.Engine) -> None:
    text = "some words " * (480_000 // 11)
    before = threading.active_count()
    num_threads: list[int] = []

    async def give_up() -> None:
        with anyio.move_on_after(0.05):
            await demo_engine.generate(text, SHORT)
        num_threads.append(threading.active_count() - before)

    async def flood(num_clients: int) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(num_clients):
                group.start_soon(give_up)

    await flood(2 * _workers.MAX_THREADS)
    memory = resident_bytes()
    for _ in range(5):
        await flood(40)
    assert (
        max(num_threads) <= 2 * _workers.MAX_THREADS + 4
    )  # a thread frees its slot shortly before it is idle
    assert resident_bytes() - memory < 200 << 20
    await assert_at_rest(demo_engine)


async def test_long_texts_wait_for_each_other_and_not_short_ones(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_workers, "MAX_TEXT_CHARS", 200 << 10)
    limit_threads(monkeypatch, 3)
    begun, release, ended = list[int](), threading.Event(), list[object]()

    def tokenise(_: object) -> None:
        begun.append(1)
        release.wait(20)

    async def generate(ask: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(penstock.InvalidRequestError):  # it has more tokens than any prompt
            ended.append(await ask())
        ended.append(ask)

    text = "x" * (70 << 10)
    prompts: list[Any] = [text, [{"role": "user", "content": text}]]
    async with anyio.create_task_group() as group:
        async with anyio.create_task_group() as cancelled:
            cancelled.start_soon(partial(_workers.run_slow, tokenise, num_chars=70 << 10))
            await until(lambda: len(begun) == 1)
            cancelled.cancel_scope.cancel()  # its thread goes on
        group.start_soon(partial(_workers.run_slow, tokenise, num_chars=100 << 10))
        await until(lambda: len(begun) == 2)
        for prompt in prompts:
            group.start_soon(generate, partial(engine.generate, prompt, SHORT))
        group.start_soon(generate, partial(engine.generate, text, max_tokens=1, num_beams=2))
        group.start_soon(generate, partial(engine.score, text))
        await anyio.wait_all_tasks_blocked()
        await engine.generate(MESSAGES, SHORT)
        assert ended == []
        release.set()
    assert len(ended) == 4


async def test_clients_take_turns_at_the_slots_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    release, order = threading.Event(), list[int | None]()

    async def call(client: int | None, function: Callable[[], object]) -> None:
        _client.client.set(client)
        await _workers.run_slow(lambda _: function())

    limit_threads(monkeypatch, 1)
    async with anyio.create_task_group() as group:
        group.start_soon(call, 1, lambda: release.wait(20))
        await anyio.wait_all_tasks_blocked()
        for client in (1, 1, 1, 2, None, 2):
            group.start_soon(call, client, lambda client=client: order.append(client))
            await anyio.wait_all_tasks_blocked()
        async with anyio.create_task_group() as cancelled:
            cancelled.start_soon(call, 3, lambda: order.append(3))
            await anyio.wait_all_tasks_blocked()
            cancelled.cancel_scope.cancel()
        release.set()
    assert order == [1, 2, None, 1, 2, 1], "the first of them waits for a slot, the others for a turn"
    assert await _workers.run_slow(lambda _: 7) == 7


async def test_threads_that_all_wait_for_the_engine_get_answers(engine: penstock.Engine) -> None:
    """The routes of a synchronous web application take all threads of AnyIO's default limiter."""
    limiter = anyio.to_thread.current_default_thread_limiter()
    reasons: list[str] = []

    def answer() -> None:
        result = anyio.from_thread.run(engine.generate, MESSAGES, SHORT)
        reasons.append(result.finish_reason)

    async with anyio.create_task_group() as group:
        for _ in range(int(limiter.total_tokens)):
            group.start_soon(anyio.to_thread.run_sync, answer)
    assert reasons == ["length"] * int(limiter.total_tokens)


async def test_calls_beyond_any_queue_wait_by_default(engine: penstock.Engine) -> None:
    lengths: list[int] = []

    async def ask() -> None:
        lengths.append(len((await engine.generate(PROMPT, SHORT)).token_ids))

    async with anyio.create_task_group() as group:
        for _ in range(1500):
            group.start_soon(ask)
    assert lengths == [8] * 1500
    assert engine.info.max_waiting is None


async def test_engine_starts_from_the_only_thread_of_the_limiter(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    limiter = anyio.to_thread.current_default_thread_limiter()
    total, limiter.total_tokens = limiter.total_tokens, 1
    try:
        await anyio.to_thread.run_sync(anyio.from_thread.run, engine.start)
        assert (await engine.generate(PROMPT, LONG)).finish_reason == "length"
    finally:
        limiter.total_tokens = total
        await engine.aclose()
