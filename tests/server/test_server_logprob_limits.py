"""The number of log probabilities of a request has a limit, and their memory counts as that of a body."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from support.api.engines import make_engine, wait_until
from support.server.serving import at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
LIMIT = 3000
IDS = list(range(100, 150))
MESSAGES = [{"role": "user", "content": "Hello"}]
#: About 12 thousand log probabilities of the outputs.
OUTPUTS = {"max_tokens": 70, "ignore_eos": True, "n": 8}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": [IDS] * 3, "echo": True, "logprobs": 20}, "logprobs"),
        ({"prompt": IDS, "echo": True, "logprobs": 20, "n": 3}, "logprobs"),
        ({"prompt": IDS, "prompt_logprobs": 20, "n": 3}, "prompt_logprobs"),
        ({"prompt": "A" * 150, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": "A", "best_of": 8, **OUTPUTS, "logprobs": 20}, "logprobs"),
        ({"messages": MESSAGES * 20, "prompt_logprobs": 20}, "prompt_logprobs"),
    ],
    ids=["prompts", "choices", "prompt", "text", "best", "chat"],
)
def test_too_many_are_refused_before_they_are_made(
    engine: penstock.Engine, fields: dict[str, Any], field: str
) -> None:
    settings = penstock.server.ServerSettings(max_logprobs_per_request=LIMIT)
    before = engine.stats()
    with serving(penstock.server.app(engine, settings)) as server:
        with held(engine):
            path = CHAT if "messages" in fields else PATH
            status, answer, _ = server.ask(path, {"max_tokens": 1, **fields})
        assert (status, answer["error"]["param"]) == (400, field)
        message = answer["error"]["message"]
        assert message.startswith(f"{field}=20 is not allowed: the request asks for ")
        assert message.endswith(f" log probabilities or more; the limit is {LIMIT}")
        wait_until(partial(at_rest, engine))
        assert engine.stats().prompt_tokens - before.prompt_tokens <= 1


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_request_ends_when_its_outputs_have_too_many(engine: penstock.Engine, *, is_streamed: bool) -> None:
    settings = penstock.server.ServerSettings(max_logprobs_per_request=LIMIT)
    application = penstock.server.app(engine, settings)
    before = engine.stats().generation_tokens
    fields = {"prompt": "A", "logprobs": 20, **OUTPUTS}
    with serving(application) as server:
        if is_streamed:
            error = server.events(PATH, fields)[-1]["error"]
        else:
            status, answer, _ = server.ask(PATH, fields)
            assert status == 400
            error = answer["error"]
        assert error["message"].endswith(f"; the limit is {LIMIT}")
        wait_until(partial(at_rest, engine))
        assert engine.stats().generation_tokens - before < 8 * 70
        assert server.ask(PATH, {**fields, "n": 2})[0] == 200
    assert application.state.body_bytes.total == 0


def test_those_of_unfinished_requests_count_as_bodies(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(api_keys=("a",), max_total_body_bytes=300_000)
    application = penstock.server.app(engine, settings)
    state = application.state
    body = {"prompt": IDS, "prompt_logprobs": 20, "max_tokens": 1}
    size = 64 * 21 * len(IDS)
    with serving(application) as server:
        request = post(PATH, body).replace(b"\r\n", b"\r\nX-Api-Key: a\r\n", 1)
        with held(engine), server.send(request), server.send(request), server.send(request):
            wait_until(lambda: state.body_bytes.total >= 3 * size)
            status, answer, headers = server.ask(PATH, body, headers={"X-Api-Key": "a"})
            assert (status, answer["error"]["code"]) == (429, "too_many_requests")
            assert headers["retry-after"] == "1"
        wait_until(lambda: state.body_bytes.total == 0)
        status, answer, _ = server.ask(PATH, body, headers={"X-Api-Key": "a"})
        assert status == 200, answer
        assert len(answer["choices"][0]["prompt_logprobs"]) == len(IDS)
    assert state.body_bytes.total == 0


def test_outputs_are_counted_while_they_are_made(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(max_total_body_bytes=200_000)
    application = penstock.server.app(engine, settings)
    fields = {"prompt": "A", "logprobs": 20, **OUTPUTS}
    with serving(application) as server:
        status, answer, headers = server.ask(PATH, fields)
        assert (status, "retry-after" in headers) == (413, False)
        assert "this request are too large: the limit is 200000 bytes" in answer["error"]["message"]
        wait_until(partial(at_rest, engine))
        assert server.ask(PATH, {**fields, "logprobs": None})[0] == 200
    assert application.state.body_bytes.total == 0


def test_embeddings_count_as_bodies(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(max_total_body_bytes=20_000)
    application = penstock.server.app(engine, settings)
    with serving(application) as server:
        status, answer, _ = server.ask("/v1/embeddings", {"input": ["A"] * 64})
        assert status == 413, answer
        assert server.ask("/v1/embeddings", {"input": ["A"] * 4})[0] == 200
    assert application.state.body_bytes.total == 0
