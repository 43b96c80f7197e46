"""The fields of OpenAI's and Anthropic's requests: honoured, refused, or documented as without effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_type_hints

import anthropic.types.message_create_params as anthropic_messages
import openai.types.chat.completion_create_params as openai_chats
import openai.types.completion_create_params as openai_completions
import pytest

import penstock.server
from penstock.server import chat, completions
from penstock.server.anthropic import handlers
from penstock.server.protocol.anthropic import MessagesRequest
from penstock.server.protocol.openai_chat import ChatRequest
from penstock.server.protocol.openai_completions import CompletionRequest
from penstock.server.sampling import LABELS, SAMPLING_FIELDS
from support.api.engines import make_engine
from support.paths import ROOT
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet
    from pathlib import Path

CHAT = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "Hello"}
BODY: dict[str, Any] = {"messages": [USER], "max_tokens": 4, "seed": 1, "ignore_eos": True}
GUIDE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, BODY, name) for name in sorted(chat.UNSUPPORTED)),
    *(("/v1/completions", {"prompt": "a"}, name) for name in sorted(completions.UNSUPPORTED)),
    *(("/v1/messages", BODY, name) for name in sorted(handlers.UNSUPPORTED)),
]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, tool_parser="hermes") as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    with serving(penstock.server.app(engine)) as server:
        yield server


# ---- all fields of the clients


@pytest.mark.needs("sources")
@pytest.mark.parametrize(
    ("params", "structure", "unsupported", "labels"),
    [
        (openai_chats.CompletionCreateParamsStreaming, ChatRequest, chat.UNSUPPORTED, LABELS),
        (
            openai_completions.CompletionCreateParamsStreaming,
            CompletionRequest,
            completions.UNSUPPORTED,
            LABELS,
        ),
        (
            anthropic_messages.MessageCreateParamsStreaming,
            MessagesRequest,
            handlers.UNSUPPORTED,
            handlers.LABELS | LABELS,
        ),
    ],
    ids=["chats", "completions", "messages"],
)
def test_each_field_of_a_client_has_a_decision(
    params: type, structure: Any, unsupported: dict[str, Any], labels: AbstractSet[str]
) -> None:
    names = get_type_hints(params).keys()
    assert {"model", "stream"} <= names
    honoured = {*structure.__struct_fields__, *SAMPLING_FIELDS}
    assert names - honoured - unsupported.keys() - labels == set()
    assert not {*structure.__struct_fields__} & unsupported.keys()
    for name in labels:
        assert f"`{name}`" in GUIDE


@pytest.mark.parametrize(("path", "body", "name"), REFUSED)
def test_field_that_cannot_be_honoured_is_refused(
    server: Served, path: str, body: dict[str, Any], name: str
) -> None:
    status, answer, _ = server.ask(path, {**body, name: "any"})
    assert status == 400
    assert answer["error"]["message"].startswith(f"{name}=")


def test_value_that_asks_for_nothing_is_accepted(server: Served) -> None:
    _, plain, _ = server.ask(CHAT, BODY)
    fields = {"modalities": ["text"], "functions": [], "function_call": "auto", "echo": False}
    for name, value in {**dict.fromkeys(LABELS, "any"), **fields}.items():
        status, answer, _ = server.ask(CHAT, {**BODY, name: value})
        assert (status, answer["choices"]) == (200, plain["choices"])


def test_unknown_field_is_warned_about_once_per_server(
    engine: penstock.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        caplog.clear()
        with serving(penstock.server.app(engine)) as server:
            for _ in range(2):
                assert server.ask(CHAT, {**BODY, "invented": 1})[0] == 200
        messages = [record.getMessage() for record in caplog.records]
        assert messages.count("request field 'invented' is unknown and ignored") == 1


def test_unknown_fields_in_the_log_have_a_bound(
    engine: penstock.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(penstock.server.app(engine)) as server:
        for half in range(2):
            fields = {f"invented_{half}_{index}": 1 for index in range(200)}
            assert server.ask(CHAT, {**BODY, **fields})[0] == 200
    assert sum("is unknown and ignored" in record.getMessage() for record in caplog.records) == 256


# ---- messages


@pytest.mark.parametrize(
    ("given", "equal"),
    [
        ({"role": "developer", "content": "Hi"}, {"role": "system", "content": "Hi"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
            {"role": "user", "content": "AB"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "No."},
        ),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": "No."}),
        ({"role": "user", "content": "Hi", "name": "Ann"}, {"role": "user", "content": "Hi"}),
        (
            {"role": "assistant", "content": "Hi", "reasoning": "Hm.", "audio": None, "function_call": None},
            {"role": "assistant", "content": "Hi"},
        ),
    ],
)
def test_form_of_a_message_makes_the_prompt_of_a_plain_one(
    server: Served, engine: penstock.Engine, given: dict[str, Any], equal: dict[str, Any]
) -> None:
    text = engine.apply_chat_template([equal, USER])
    expected = engine.encode(text, add_special_tokens=False)
    _, answer, _ = server.ask(CHAT, {**BODY, "messages": [given, USER], "return_token_ids": True})
    assert answer["prompt_token_ids"] == expected
    assert server.ask("/tokenize", {"messages": [given, USER]})[1]["tokens"] == expected


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": 1}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "refusal"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "function", "content": "1"}, "messages[0].role"),
        ({"role": 1, "content": "1"}, "messages[0].role"),
        ({"role": "assistant", "function_call": {"name": "a"}}, "messages[0].function_call"),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "tool_calls": "a"}, "messages[0].tool_calls"),
        ("Hello", "messages[0]"),
        (None, "messages[0]"),
        (1, "messages[0]"),
    ],
)
def test_invalid_message_is_named(server: Served, message: Any, param: str) -> None:
    for path in (CHAT, "/tokenize"):
        status, answer, _ = server.ask(path, {"messages": [message, USER]})
        assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize(
    "messages",
    [[USER] * 16385, [{"role": "user", "content": [{"type": "text", "text": "a"}] * 16385}]],
    ids=["messages", "parts"],
)
def test_messages_and_their_parts_have_a_bound(server: Served, messages: list[dict[str, Any]]) -> None:
    for path in (CHAT, "/tokenize"):
        status, answer, _ = server.ask(path, {"messages": messages})
        assert (status, answer["error"]["param"]) == (400, "messages")


# ---- tools and other values


@pytest.mark.parametrize("stream", [True, False])
def test_allowed_tools_are_the_only_ones(tiny_model: Path, *, stream: bool) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("sun")]}}
    with make_engine(tiny_model, tool_parser="hermes") as engine:
        fields = {"messages": [USER], "max_tokens": 60, "seed": 1}
        expected = engine.blocking.generate(
            [USER], max_tokens=60, seed=1, tools=[tool("sun")], tool_choice="required"
        )
        with serving(penstock.server.app(engine)) as server:
            body = {**fields, "tools": [tool("rain"), tool("sun")], "tool_choice": choice}
            if stream:
                events = server.events(CHAT, body)
                deltas = [event["choices"][0]["delta"] for event in events[:-1]]
                calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            else:
                calls = server.ask(CHAT, body)[1]["choices"][0]["message"].get("tool_calls", [])
    names = [call["function"]["name"] for call in calls if call["function"].get("name")]
    assert names == [call.name for call in expected.tool_calls]
    assert set(names) == {"sun"}


@pytest.mark.parametrize(
    ("allowed", "param"),
    [
        ({"mode": "all", "tools": [tool("sun")]}, "tool_choice.allowed_tools.mode"),
        ({"mode": "auto", "tools": [tool("snow")]}, "tool_choice.allowed_tools.tools"),
        ({"mode": "auto", "tools": []}, "tool_choice.allowed_tools.tools"),
        ({"mode": "auto", "tools": {}}, "tool_choice.allowed_tools.tools"),
        ({"mode": "auto", "tools": [1]}, "tool_choice.allowed_tools.tools"),
        ("all", "tool_choice.allowed_tools.mode"),
    ],
)
def test_invalid_allowed_tools_are_named(server: Served, allowed: object, param: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    status, answer, _ = server.ask(CHAT, {**BODY, "tools": [tool("sun")], "tool_choice": choice})
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.needs("memory_limit")
def test_verbosity_and_effort_are_variables_of_the_template(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(request_templates=True)
    fields = {"chat_template": "{{ verbosity }}/{{ reasoning_effort }}", "return_token_ids": True}
    with serving(penstock.server.app(engine, settings)) as server:
        body = {**BODY, **fields, "verbosity": "low", "reasoning_effort": "high"}
        assert server.ask(CHAT, body)[1]["prompt_token_ids"] == engine.encode("low/high")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"use_beam_search": "false", "n": 2}, "use_beam_search"),
        ({"use_beam_search": True, "n": 2, "stream": True, "seed": None}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"600": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools"),
        ({"tools": [tool("sun")], "tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1_000_000}, "n"),
        ({"n": True}, "n"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"seed": 2**64}, "seed"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"bad_token_ids": [512]}, "bad_token_ids"),
        ({"eos_token_ids": [512], "ignore_eos": False}, "eos_token_ids"),
        ({"stop_token_sequences": [[1, 512]]}, "stop_token_sequences"),
        ({"bad_token_sequences": [[512, 1]]}, "bad_token_sequences"),
    ],
)
def test_invalid_value_is_named(server: Served, fields: dict[str, Any], param: str) -> None:
    status, answer, _ = server.ask(CHAT, {**BODY, **fields})
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            CHAT,
            {"seed": 1.0, "max_tokens": 4.0, "n": 2.0, "top_k": 5.0, "top_logprobs": 2.0, "logprobs": True},
        ),
        (CHAT, {"max_completion_tokens": 3.0, "seed": -1.0, "prompt_logprobs": 1.0}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0.0, "echo": True, "logprobs": 1.0}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3.0, "top_logprobs": 1.0, "seed": 1.0}),
        ("/v1/messages", {"max_tokens": 4.0, "min_tokens": 2.0}),
        ("/v1/embeddings", {"input": "a", "dimensions": 2.0}),
    ],
)
def test_number_without_a_fraction_is_an_integer(server: Served, path: str, fields: dict[str, Any]) -> None:
    body = {**(BODY if path in (CHAT, "/v1/messages") else {"seed": 1}), **fields}
    plain = {name: int(value) if type(value) is float else value for name, value in body.items()}
    names = ("choices", "content", "data")
    found = []
    for form in (plain, body):
        status, answer, _ = server.ask(path, form)
        assert status == 200, answer
        found.append([answer.get(name) for name in names])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 1.5), ("max_tokens", 2.5), ("top_k", 1e300), ("n", 0.0), ("top_logprobs", 0.5)],
)
def test_other_number_is_no_integer(server: Served, name: str, value: float) -> None:
    status, answer, _ = server.ask(CHAT, {**BODY, name: value})
    assert (status, answer["error"]["param"]) == (400, name)


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity"])
def test_number_that_is_not_finite_is_named(server: Served, value: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "temperature": {value}}}'
    status, answer, _ = server.ask(CHAT, body.encode())
    assert (status, answer["error"]["param"]) == (400, "temperature")


def test_max_completion_tokens_precedes_max_tokens(server: Served) -> None:
    _, answer, _ = server.ask(CHAT, {**BODY, "max_tokens": 4, "max_completion_tokens": 2})
    assert answer["usage"]["completion_tokens"] == 2
