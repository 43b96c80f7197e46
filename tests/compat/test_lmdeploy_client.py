"""LMDeploy's `APIClient` with a server of Penstock."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

import pytest

import penstock.server
from penstock.compat.lmdeploy.errors import UnsupportedError
from penstock.compat.lmdeploy.serve.openai.api_client import APIClient, get_model_list
from support.api.engines import make_engine
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPTIONS: dict[str, Any] = {"max_tokens": 6, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(api_keys=("secret",))
    with serving(penstock.server.app({"tiny": engine}, settings)) as server:
        yield server


@pytest.fixture
def client(server: Served) -> APIClient:
    return APIClient(server.url, api_key="secret")


def test_client_lists_the_models(client: APIClient, engine: penstock.Engine) -> None:
    assert client.available_models == ["tiny"]
    with serving(penstock.server.app({"open": engine})) as server:
        assert get_model_list(f"{server.url}/v1/models") == ["open"]


def test_client_encodes_texts_and_chats(client: APIClient, engine: penstock.Engine) -> None:
    assert client.encode("Hello") == ([*engine.encode("Hello")], len(engine.encode("Hello")))
    text = engine.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert client.encode("Hello", do_preprocess=True)[0] == engine.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("messages", ["Hello", [{"role": "user", "content": "Hello"}]])
def test_chat_has_the_output_of_the_engine(messages: Any, client: APIClient, engine: penstock.Engine) -> None:
    expected = engine.blocking.generate(
        [{"role": "user", "content": "Hello"}], temperature=0.7, top_p=1.0, repetition_penalty=1.0, **OPTIONS
    )
    [answer] = client.chat_completions_v1("tiny", messages, **OPTIONS)
    assert answer["choices"][0]["message"]["content"] == expected.content
    chunks = list(client.chat_completions_v1("tiny", messages, stream=True, **OPTIONS))
    text = "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks)
    assert (text, chunks[-1]["choices"][0]["finish_reason"]) == (expected.content, "length")


def test_completion_has_the_output_of_the_engine(client: APIClient, engine: penstock.Engine) -> None:
    sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 1.0, "top_k": 40, "repetition_penalty": 1.0}
    expected = engine.blocking.generate("Hello", **sampling, **OPTIONS)
    [answer] = client.completions_v1("tiny", "Hello", **OPTIONS)
    assert answer["choices"][0]["text"] == expected.text
    chunks = list(client.completions_v1("tiny", "Hello", stream=True, **OPTIONS))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected.text


def test_refusal_of_the_server_has_its_reason(client: APIClient) -> None:
    with pytest.raises(HTTPError) as caught:
        list(client.chat_completions_v1("tiny", "Hello", temperature=9))
    assert json.load(caught.value)["error"]["param"] == "temperature"


def test_sessions_of_the_server_are_refused_by_name(client: APIClient) -> None:
    for call in (client.chat_interactive_v1, client.chat, client.end_session):
        with pytest.raises(UnsupportedError, match="chat_interactive_v1 is not supported"):
            call("Hello", session_id=1)
