"""The memory of requests: counted before it is taken, and freed when a request has ended."""

from __future__ import annotations

import gc
import json
import sys
from array import array
from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from penstock.server import choices
from penstock.server.bodies import size_of_values
from penstock.server.http import Exchange
from support.api.engines import wait_until
from support.server.serving import Served, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Longer than the engine allows for `max_model_len=256`, and shorter than the server does.
LONG = "word " * 20_000
MESSAGES = [{"role": "user", "content": LONG}]
IDS = list(range(100, 150))
RERANKS = {
    "/v1/rerank": ("query", "documents"),
    "/v1/score": ("text_1", "text_2"),
}


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[penstock.Engine]:
    with penstock.Engine(demo_model, max_model_len=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(rerank="qwen3", max_total_body_bytes=4 << 20)
    with serving(penstock.server.app({"demo": engine}, settings)) as server:
        yield server


# ---- refused requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": LONG, "documents": ["a", "b"]}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": [LONG] * 3}),
        ("/v1/completions", {"prompt": LONG, "stream": True}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/embeddings", {"input": [LONG] * 2}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/tokenize", {"prompt": LONG * 3}),
    ],
    ids=[
        "rerank",
        "text",
        "texts",
        "stream",
        "chat",
        "chat-stream",
        "embeddings",
        "responses",
        "messages",
        "tokenize",
    ],
)
def test_refused_request_needs_no_garbage_collector(server: Served, path: str, body: dict[str, Any]) -> None:
    gc.collect()
    gc.disable()
    try:
        status, answer, _ = server.ask(path, body)
        assert (status, "prompt is too long" in str(answer)) == (400, True)
        wait_until(lambda: not any(isinstance(found, Exchange) for found in gc.get_objects()))
    finally:
        gc.enable()


# ---- prompts of a reranker


@pytest.mark.parametrize("path", RERANKS)
def test_prompts_with_a_long_query_are_never_made(
    server: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    lengths: list[int] = []
    prompt = penstock.Reranker.prompt

    def count(self: penstock.Reranker, *parts: Any) -> str:
        made = prompt(self, *parts)
        lengths.append(len(made))
        return made

    monkeypatch.setattr(penstock.Reranker, "prompt", count)
    query, documents = RERANKS[path]
    status, answer, _ = server.ask(path, {query: LONG * 3, documents: ["a"] * 1024})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["message"].startswith("prompt is too long: 300")
    assert max(lengths) < 1000
    assert server.ask(path, {query: "a", documents: ["b"] * 8})[0] == 200
    assert len(lengths) == 1 + 1 + 8, "of each request the template, and its prompts"


@pytest.mark.parametrize("path", RERANKS)
def test_prompts_of_a_reranker_count_as_bodies(server: Served, path: str) -> None:
    """The prompts of the texts that are computed at the same time do not fit: none is computed."""
    query, documents = RERANKS[path]
    status, answer, _ = server.ask(path, {query: LONG * 2, documents: ["a"] * 1024})
    assert status == 413
    assert "the body and the response of this request are too large" in answer["error"]["message"]
    assert server.application.state.body_bytes.total == 0


# ---- prompts of completions


@pytest.mark.parametrize(
    "fields",
    [
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 30},
        {"add_special_tokens": False, "truncate_prompt_tokens": 30, "truncation_side": "left"},
    ],
    ids=["all", "truncated", "left"],
)
def test_token_ids_of_prompts_count_as_a_body(
    server: Served, engine: penstock.Engine, fields: dict[str, Any]
) -> None:
    prompts = ["one two three " * 20, "A text of some words."]
    body = json.dumps({"prompt": prompts, "max_tokens": 1, **fields}).encode()
    length = fields.get("truncate_prompt_tokens", 1000)
    num_ids = sum(min(length, engine.count_tokens(text)) for text in prompts)
    with held(engine), server.send(post("/v1/completions", body)):
        size = len(body) + size_of_values(body) + 2 * sys.getsizeof(array("I")) + 4 * num_ids
        wait_until(lambda: server.application.state.body_bytes.total == size)
    wait_until(lambda: server.application.state.body_bytes.total == 0)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"prompt": "word " * 100, "echo": True}, 2 * 500),
        ({"prompt": "w\u00f6rd " * 40, "echo": True}, 2 * 800),
        ({"prompt": IDS, "echo": True}, None),
        ({"prompt": IDS, "return_token_ids": True}, 8 * len(IDS)),
        ({"prompt": "word " * 100, "return_token_ids": True}, 8 * 500),
        ({"prompt": IDS, "echo": True, "max_tokens": 0}, None),
    ],
    ids=["text", "wide", "ids", "returned", "returned-text", "scored"],
)
def test_copies_of_a_prompt_count_before_it_is_computed(
    server: Served, engine: penstock.Engine, fields: dict[str, Any], size: int | None
) -> None:
    text = engine.decode(IDS)
    assert not text.isascii()
    size = 2 * 4 * len(text) if size is None else size
    body = json.dumps({"max_tokens": 1, "n": 8, **fields}).encode()
    with held(engine), server.send(post("/v1/completions", body)):
        expected = len(body) + size_of_values(body) + 8 * size
        wait_until(lambda: server.application.state.body_bytes.total == expected)
    wait_until(lambda: server.application.state.body_bytes.total == 0)


def test_response_of_many_copies_is_refused_at_once(
    server: Served, engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "_MAX_BYTES", 10_000)
    num_ids = engine.stats().prompt_tokens
    text = "word " * 100
    for prompt, n in ((text, 21), ([text] * 3, 7), (engine.encode(text), 21)):
        fields = {"prompt": prompt, "n": n, "max_tokens": 1, "echo": True}
        status, answer, _ = server.ask("/v1/completions", fields)
        assert (status, answer["error"]["param"]) == (400, "echo")
        assert answer["error"]["message"].startswith("the response has more than 10000 bytes")
    assert engine.stats().prompt_tokens == num_ids
