"""Prompts that are longer than the model can read: the code and the phrases that clients look for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

import penstock.server
from support.api.engines import make_engine
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CODE = "context_length_exceeded"
#: More tokens than the model has positions; more bytes than any prompt of the model.
TEXTS = {"tokens": "ab" * 300, "uncounted tokens": "ab" * 1000, "bytes": "ab" * 9000}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Served]:
    with make_engine(tiny_model) as engine, serving(penstock.server.app({"tiny": engine})) as server:
        yield server


@pytest.mark.parametrize("unit", TEXTS)
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/v1/completions", lambda text: {"prompt": text}, "prompt"),
        (
            "/v1/completions",
            lambda text: {"prompt": ["a", text], "n": 1, "best_of": 3, "temperature": 1.0},
            "prompt",
        ),
        ("/v1/completions", lambda text: {"prompt": text, "echo": True, "max_tokens": 0}, "prompt"),
        ("/v1/responses", lambda text: {"input": text}, "input"),
        ("/v1/embeddings", lambda text: {"input": text}, "input"),
        ("/v1/embeddings", lambda text: {"input": ["a", text]}, "input[1]"),
    ],
)
def test_error_has_the_code_and_phrase_of_openai(
    server: Served, path: str, body: Any, param: str, unit: str
) -> None:
    fields = body(TEXTS[unit])
    can_stream = path != "/v1/embeddings" and not {"best_of", "echo"} & fields.keys()
    for more in ({}, {"stream": True})[: 1 + can_stream]:
        status, answer, _ = server.ask(path, {**fields, **more})
        error = answer["error"]
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert (error["code"], error["param"]) == (CODE, param)
        assert error["message"].startswith("prompt is too long: ")
        assert f" {unit.rsplit(maxsplit=1)[-1]} > " in error["message"]
        assert "this model's maximum context length is 512 tokens" in error["message"]
        assert error["message"].endswith(f"; {param} must be shorter")


def test_message_has_the_size_and_the_limit(server: Served) -> None:
    for prompt in ([1] * 600, "A" * 600):
        _, answer, _ = server.ask("/v1/completions", {"prompt": prompt})
        assert answer["error"]["message"].startswith("prompt is too long: 600 tokens > 511 maximum;")
        assert answer["error"]["code"] == CODE


def test_message_of_a_prompt_of_two_lengths_has_no_size(server: Served) -> None:
    _, answer, _ = server.ask("/v1/completions", {"prompt": "A" * 1025})
    assert answer["error"]["message"].startswith("prompt is too long: more than 1024 tokens > 511 maximum;")
    assert answer["error"]["code"] == CODE


def test_late_prompt_of_a_stream_ends_it_with_the_code(tiny_model: Path) -> None:
    prompts = [[1]] * 8 + [[1] * 600]
    with make_engine(tiny_model, max_num_seqs=2) as engine, serving(penstock.server.app(engine)) as server:
        *_, last = server.events("/v1/completions", {"prompt": prompts, "max_tokens": 1})
    assert (last["error"]["code"], last["error"]["param"]) == (CODE, "prompt")


def test_other_errors_of_a_prompt_have_no_code(server: Served) -> None:
    for prompt in ([], [600], ""):
        status, answer, _ = server.ask("/v1/completions", {"prompt": prompt})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, None, "prompt")


def test_client_of_openai_reads_the_code(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": TEXTS["tokens"]}]
            )
        assert (caught.value.code, caught.value.param) == (CODE, "messages")
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            client.responses.create(model="tiny", input=TEXTS["tokens"])
        assert (caught.value.code, caught.value.param) == (CODE, "input")
