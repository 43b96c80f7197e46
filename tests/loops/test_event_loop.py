"""Slow work runs in worker threads, short work on the event loop."""

from __future__ import annotations

import json
import shutil
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from penstock import _chat_costs, _chat_sandbox, _core
from penstock.chat import Chat
from support.api.engines import PROMPT, SHORT, assert_at_rest, make_engine, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import jinja2

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Hi"}]


class Held:
    """Blocks a function until the test releases it."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.has_ended = threading.Event()
        self.release = threading.Event()
        self.threads: set[int] = set()

    def hold(self) -> None:
        """Called at the start of the function."""
        self.threads.add(threading.get_ident())
        self.has_begun.set()
        assert self.release.wait(20), "the event loop is blocked"


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture
def held_template(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Every template rendering waits until it is released."""
    held = Held()
    render = _chat_sandbox.render

    def wait_and_render(template: jinja2.Template, values: dict[str, Any], check: Any = None) -> str:
        held.hold()
        try:
            return render(template, values, check)
        finally:
            held.has_ended.set()

    monkeypatch.setattr(_chat_sandbox, "render", wait_and_render)
    return held


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await anyio.lowlevel.checkpoint()


async def test_slow_template_does_not_block_the_event_loop(
    engine: penstock.Engine, held_template: Held
) -> None:
    answers: list[penstock.Result] = []

    async def ask() -> None:
        answers.append(await engine.generate(MESSAGES, SHORT))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until(held_template.has_begun)
        assert (await engine.generate(PROMPT, SHORT)).finish_reason == "length"
        assert not answers
        held_template.release.set()
    assert answers[0].prompt_token_ids == tuple(
        engine.encode(engine.apply_chat_template(MESSAGES), add_special_tokens=False)
    )


async def test_large_chats_are_copied_and_rendered_one_at_a_time(
    engine: penstock.Engine, held_template: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying: list[int] = []

    class Recorded(Chat):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            copying.append(threading.get_ident())
            super().__init__(*arguments, **options)

    monkeypatch.setattr("penstock._session.Chat", Recorded)
    monkeypatch.setattr("penstock.chat.MAX_SMALL", 2)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.generate, MESSAGES, SHORT)
        await until(held_template.has_begun)
        group.start_soon(engine.generate, MESSAGES, SHORT)
        assert (await engine.generate(PROMPT, SHORT)).finish_reason == "length"
        assert len(copying) == 1  # the second one waits for the thread
        held_template.release.set()
    assert len(copying) == 2
    assert threading.get_ident() not in copying


async def test_cancelled_task_does_not_wait_for_the_template(
    engine: penstock.Engine, held_template: Held
) -> None:
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.generate, MESSAGES, SHORT)
            await until(held_template.has_begun)
            scope.cancel()
    assert scope.cancelled_caught
    before = engine.stats().requests_admitted
    held_template.release.set()
    wait_until(held_template.has_ended.is_set)
    assert engine.stats().requests_admitted == before  # the abandoned thread starts no request
    await assert_at_rest(engine)


async def test_messages_are_copied_when_submitted(engine: penstock.Engine, held_template: Held) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answers: list[penstock.Result] = []

    async def ask() -> None:
        answers.append(await engine.generate(messages, SHORT))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until(held_template.has_begun)
        messages[0]["content"] = "Something else"
        messages.append({"role": "assistant", "content": "No"})
        held_template.release.set()
    assert "Hi" in engine.decode(answers[0].prompt_token_ids)
    assert "else" not in engine.decode(answers[0].prompt_token_ids)


async def test_hostile_template_is_rejected_while_streams_continue(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_chat_costs, "MAX_SECONDS", 1.0)
    model = shutil.copytree(tiny_model, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    errors: list[str] = []
    async with make_engine(model) as engine:

        async def ask() -> None:
            with pytest.raises(penstock.InvalidRequestError) as caught:
                await engine.generate(MESSAGES, SHORT)
            errors.append(str(caught.value))

        num_meanwhile = 0
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            while not errors:
                await engine.generate(PROMPT, SHORT)
                num_meanwhile += 1
        assert "rejects" in errors[0]
        assert num_meanwhile > 5


async def test_short_prompt_uses_no_worker_thread(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(anyio.to_thread, "run_sync")
    for prompt in ("Why is the sky blue?", "word " * 80, PROMPT, [1] * 500):
        assert (await engine.generate(prompt, SHORT)).finish_reason == "length"


async def test_long_text_is_tokenised_in_a_worker_thread(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    native = engine._session.native

    class Slow:
        """A native engine whose `start_request` blocks."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def start_request(self, *arguments: Any, **options: Any) -> _core.Request:
            held.hold()
            return native.start_request(*arguments, **options)

    monkeypatch.setattr(engine._session, "_native", Slow())
    monkeypatch.setattr("penstock._session.LONG_TEXT", 4)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.generate, "Some words and some more", SHORT)
        await until(held.has_begun)
        held.release.set()
    assert threading.get_ident() not in held.threads
    monkeypatch.undo()
