"""Slow work of the server beside the event loop, and the threads that it has."""

from __future__ import annotations

import importlib
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from penstock.server import bodies
from penstock.server.responses import handlers
from penstock.server.sse import json_bytes
from support.api.engines import make_engine, wait_until
from support.server.serving import Served, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("chat", {"messages": CHAT, "max_tokens": 1}),
    "/v1/messages": ("anthropic.handlers", {"messages": CHAT, "max_tokens": 1}),
    "/v1/messages/count_tokens": ("anthropic.handlers", {"messages": CHAT}),
    "/v1/responses": ("responses.handlers", {"input": CHAT, "max_output_tokens": 1}),
}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Served]:
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine)) as server:
        yield server


@pytest.mark.parametrize("path", ROUTES)
def test_large_chats_are_converted_in_a_thread(
    server: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    name, body = ROUTES[path]
    module = importlib.import_module(f"penstock.server.{name}")
    original, threads = module.chat_messages, list[str]()

    def convert(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(*arguments)

    monkeypatch.setattr(module, "chat_messages", convert)
    assert server.ask(path, body)[0] == 200
    assert (
        server.ask(path, {**body, "metadata": {"user_id": "a" * 500}, "user": "a" * bodies.LARGE})[0] == 200
    )
    small, large = threads
    assert small != large
    assert "AnyIO worker" in large


def test_body_has_a_bound_of_fields(server: Served) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, **{f"x{index}": 1 for index in range(1023)}}
    status, answer, _ = server.ask("/v1/completions", body)
    assert (status, answer["error"]["message"]) == (400, "the body has 1025 fields: the limit is 1024")


@contextmanager
def tokenizer_threads_held(server: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All threads that tokenise outside of requests are busy, and one request waits for them."""
    may_continue = threading.Event()

    def wait(*_arguments: object) -> bytes:
        may_continue.wait(60)
        return b"{}"

    monkeypatch.setattr("penstock.server.tokens._detokenized", wait)
    slots = server.application.state.tokenizer_threads.slots
    connections = [server.send(post("/detokenize", {"tokens": [1]})) for _ in range(3)]
    try:
        wait_until(lambda: slots.num_waiting == 1)
        yield
    finally:
        may_continue.set()
        for connection in connections:
            assert b" 200 " in connection.recv(1000)
            connection.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1], "max_tokens": 4, "logprobs": 2}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "prompt_logprobs": 2}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
def test_responses_do_not_wait_for_tokenisation(
    server: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr("penstock.server.choices.MAX_INLINE", 0)
    with tokenizer_threads_held(server, monkeypatch):
        assert server.ask(path, body)[0] == 200


def test_waiting_tokenisations_have_a_bound(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("MAX_WAITING", "MAX_WAITING_OF_CLIENT"):
        monkeypatch.setattr(f"penstock.server.threads.{bound}", 1)
    with tokenizer_threads_held(server, monkeypatch):
        status, answer, headers = server.ask("/tokenize", {"prompt": "Hi"})
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "overloaded", "1")
        assert answer["error"]["message"] == "1 of your tokenisations wait: the limit is 1 now"
    assert server.ask("/tokenize", {"prompt": "Hi"})[0] == 200


def test_large_responses_are_made_in_a_thread(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def encoded(value: object) -> bytes:
        threads.append(threading.current_thread().name)
        return json_bytes(value)

    monkeypatch.setattr(handlers, "json_bytes", encoded)
    body = {"input": "Hi", "max_output_tokens": 4, "top_logprobs": 2, "store": False}
    for limit in (1000, 0):
        monkeypatch.setattr(handlers, "MAX_INLINE", limit)
        assert server.ask("/v1/responses", body)[0] == 200
    assert ["AnyIO worker" in name for name in threads] == [False, True]
