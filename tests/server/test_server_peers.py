"""Requests of programs that were written for vLLM, SGLang, LMDeploy and OpenAI.

`tests/data/peers/request_defaults.json` has the fields of their requests with the peer's own defaults, which
clients that send all fields send with every call.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_type_hints

import openai.types.chat.completion_create_params as openai_chats
import openai.types.completion_create_params as openai_completions
import openai.types.embedding_create_params as openai_embeddings
import pytest

import penstock.server
from penstock.server.protocol.peers import PEER_FIELDS, PEER_LABELS
from support.api.engines import make_engine
from support.paths import DATA, ROOT
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GUIDE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
PEERS: dict[str, dict[str, Any]] = json.loads((DATA / "peers" / "request_defaults.json").read_text())
#: The path of a route and the fields that have no default.
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    "completions": ("/v1/completions", {"prompt": "Hello"}),
    "embeddings": ("/v1/embeddings", {"input": "Hello"}),
}
CASES = [(peer, route) for peer, fields in PEERS.items() for route in ROUTES if route in fields]
#: The output does not depend on chance, and is short.
SHORT = {"seed": 1, "max_tokens": 4}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    with serving(penstock.server.app(engine)) as server:
        yield server


def result_of(answer: dict[str, Any]) -> Any:
    """The part of a response that depends on the request alone."""
    return answer.get("choices", answer.get("data"))


@pytest.mark.parametrize(("peer", "route"), CASES)
def test_defaults_of_a_peer_change_nothing(
    peer: str, route: str, server: Served, engine: penstock.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    path, required = ROUTES[route]
    fields = PEERS[peer][route]
    short = SHORT if route != "embeddings" else {}
    sampling = {name: fields[name] for name in ("temperature", "top_p", "top_k") if name in fields}
    _, plain, _ = server.ask(path, {**required, **sampling, **short})
    for name, value in fields.items():
        status, answer, _ = server.ask(path, {**required, **sampling, **short, name: value, **short})
        assert (status, result_of(answer)) == (200, result_of(plain)), (name, answer)
    with serving(penstock.server.app(engine)) as fresh:  # it names each unknown field once
        status, answer, _ = fresh.ask(path, {**required, **fields, **short})
    assert (status, result_of(answer)) == (200, result_of(plain)), answer
    assert "is unknown and ignored" not in caplog.text


@pytest.mark.parametrize(
    ("params", "route"),
    [
        (openai_chats.CompletionCreateParamsStreaming, "chat"),
        (openai_completions.CompletionCreateParamsStreaming, "completions"),
        (openai_embeddings.EmbeddingCreateParams, "embeddings"),
    ],
)
def test_list_of_openai_has_the_fields_of_its_package(params: type, route: str) -> None:
    listed = {"model", *ROUTES[route][1], *PEERS["openai"][route]}
    assert get_type_hints(params).keys() == listed


@pytest.mark.parametrize("name", sorted(PEER_FIELDS))
def test_field_of_a_peer_that_is_not_honoured_is_refused_by_name(name: str, server: Served) -> None:
    for path, required in ROUTES.values():
        status, answer, _ = server.ask(path, {**required, name: "any"})
        assert status == 400
        assert answer["error"]["message"].startswith(f"{name}='any' is not allowed: it must be ")
        assert answer["error"]["param"] == name


@pytest.mark.needs("sources")
def test_fields_without_effect_are_documented() -> None:
    assert [name for name in sorted(PEER_LABELS) if f"`{name}`" not in GUIDE] == []


@pytest.mark.parametrize(
    ("fields", "equal"),
    [
        ({"min_new_tokens": 3}, {"min_tokens": 3}),
        ({"no_stop_trim": True, "stop": "e"}, {"include_stop_str_in_output": True, "stop": "e"}),
        ({"json_schema": '{"const": 1}'}, {"guided_json": {"const": 1}}),
        ({"max_completion_tokens": 2, "max_tokens": 9}, {"max_tokens": 2}),
    ],
)
@pytest.mark.parametrize("route", ["chat", "completions"])
def test_field_with_another_name_means_the_same(
    route: str, fields: dict[str, Any], equal: dict[str, Any], server: Served
) -> None:
    path, required = ROUTES[route]
    _, expected, _ = server.ask(path, {**required, "seed": 1, "max_tokens": 8, **equal})
    status, answer, _ = server.ask(path, {**required, "seed": 1, "max_tokens": 8, **fields})
    assert (status, answer["choices"], answer["usage"]) == (200, expected["choices"], expected["usage"])


def test_two_names_with_other_values_are_refused(server: Served) -> None:
    path, required = ROUTES["chat"]
    status, answer, _ = server.ask(path, {**required, "min_tokens": 1, "min_new_tokens": 2})
    assert (status, answer["error"]["param"]) == (400, "min_new_tokens")


def test_chat_can_be_one_text(server: Served) -> None:
    path, required = ROUTES["chat"]
    options = {"return_token_ids": True, **SHORT}
    _, expected, _ = server.ask(path, {**required, **options})
    status, answer, _ = server.ask(path, {"messages": "Hello", **options})
    assert (status, answer["prompt_token_ids"]) == (200, expected["prompt_token_ids"])


def test_side_of_truncation_is_that_of_the_request(server: Served, engine: penstock.Engine) -> None:
    ids = engine.encode("Hello, world")
    body = {"prompt": "Hello, world", "truncate_prompt_tokens": 3, "return_token_ids": True, **SHORT}
    for side, kept in ((None, ids[-3:]), ("left", ids[-3:]), ("right", ids[:3])):
        _, answer, _ = server.ask("/v1/completions", {**body, "truncation_side": side})
        assert answer["choices"][0]["prompt_token_ids"] == kept
    status, answer, _ = server.ask("/v1/completions", {**body, "truncation_side": "middle"})
    assert (status, answer["error"]["param"]) == (400, "truncation_side")


def test_embedding_without_activation_is_not_normalised(server: Served) -> None:
    _, expected, _ = server.ask("/v1/embeddings", {"input": "Hello", "normalize": False})
    _, answer, _ = server.ask("/v1/embeddings", {"input": "Hello", "use_activation": False})
    assert answer["data"] == expected["data"]
    for name in ("truncate_prompt_tokens", "messages"):
        status, answer, _ = server.ask("/v1/embeddings", {"input": "Hello", name: [1]})
        assert (status, answer["error"]["param"]) == (400, name)
