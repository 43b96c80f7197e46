"""`/v1/responses`: items as messages, the fields of a request, and their errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest
from openai.types.responses import response_create_params

import penstock.server
from penstock.server.bodies import converted
from penstock.server.protocol.openai_responses import ResponsesRequest
from penstock.server.responses.conversion import (
    UNSUPPORTED,
    chat_messages,
    sampling_fields,
    template_variables,
)
from support.api.engines import make_engine
from support.paths import ROOT
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "Hello", "max_output_tokens": 2, "seed": 1, "ignore_eos": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "21"}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "unlike"}}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
#: A conversation with all types of items.
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": "Ask."},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "Is it "}, {"type": "text", "text": "warm?"}],
    },
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    },
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I ask.", "annotations": [], "logprobs": []}],
    },
    {**CALL, "id": "fc_1"},
    {**CALL, "call_id": "c2"},
    {**OUTPUT, "output": [{"type": "input_text", "text": "21"}]},
    {**OUTPUT, "call_id": "c2"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}], "encrypted_content": "x"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": "Well?"},
]


def chat_call(call_id: str) -> dict[str, Any]:
    """The call as a chat has it."""
    function = {"name": CALL["name"], "arguments": CALL["arguments"]}
    return {"id": call_id, "type": "function", "function": function}


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "system", "content": "Ask."},
    {"role": "user", "content": "Is it warm?"},
    {
        "role": "assistant",
        "content": "I ask.",
        "reasoning_content": "Hm.",
        "tool_calls": [chat_call("c1"), chat_call("c2")],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "21"},
    {"role": "tool", "tool_call_id": "c2", "content": "21"},
    {"role": "assistant", "content": "No.", "reasoning_content": "So."},
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": "Well?"},
]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Served]:
    with (
        make_engine(tiny_model, tool_parser="hermes") as engine,
        serving(penstock.server.app({"tiny": engine})) as server,
    ):
        yield server


def request_of(**fields: Any) -> ResponsesRequest:
    """The structure of a request."""
    return converted({"input": ITEMS, **fields}, ResponsesRequest)


# ---- conversion


@pytest.mark.parametrize("split", [0, 4, len(ITEMS)])
def test_items_become_messages_of_the_chat_template(split: int) -> None:
    items: Any = request_of().input
    assert chat_messages("Be brief.", items[:split], items[split:]) == MESSAGES


def test_unsupported_keywords_can_be_ignored() -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"not": {}}, "ignore_unsupported": True}
    fields = sampling_fields(request_of(tools=[{**TOOL, "ignore_unsupported": True}], text={"format": form}))
    assert fields["tools"][0]["function"]["ignore_unsupported"] is True
    expected = {"name": "a", "schema": {"not": {}}, "ignore_unsupported": True}
    assert fields["response_format"]["json_schema"] == expected


def test_tools_and_formats_have_the_form_of_chats() -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    request = request_of(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=9,
        parallel_tool_calls=False,
        text={"format": form, "verbosity": "low"},
        reasoning={"effort": "high"},
    )
    assert sampling_fields(request) == {
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 9,
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
        },
    }
    assert template_variables(request) == {"reasoning_effort": "high", "verbosity": "low"}
    plain = request_of(text={"format": {"type": "text"}})
    assert sampling_fields(plain) == {"tools": []}
    as_object = request_of(text={"format": {"type": "json_object"}})
    assert sampling_fields(as_object)["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "json_object"}, dict),
        ({"type": "json_schema", "name": "a", "schema": {"enum": ["yes", "no"]}}, str),
    ],
)
def test_text_format_constrains_the_output(server: Served, form: dict[str, Any], expected: type) -> None:
    body = {**BODY, "max_output_tokens": 400, "ignore_eos": False, "temperature": 0.0}
    body["logit_bias"] = {str(ord(space)): -100 for space in " \n\t\r"}
    status, answer, _ = server.ask(PATH, {**body, "text": {"format": form}})
    assert (status, answer["status"]) == (200, "completed")
    assert isinstance(json.loads(answer["output"][0]["content"][0]["text"]), expected)
    assert answer["text"]["format"] == form


# ---- fields


def test_null_for_every_optional_field_is_omission(server: Served) -> None:
    _, plain, _ = server.ask(PATH, BODY)
    names = get_type_hints(response_create_params.ResponseCreateParamsNonStreaming).keys()
    status, answer, _ = server.ask(PATH, {**dict.fromkeys(names), **BODY})
    assert status == 200
    assert answer["output"][0]["content"] == plain["output"][0]["content"]


def test_each_field_of_openai_has_a_meaning_or_an_error(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A field without a meaning would be an unknown one, with a warning."""
    names = set(get_type_hints(response_create_params.ResponseCreateParamsNonStreaming))
    names |= get_type_hints(response_create_params.ResponseCreateParamsStreaming).keys()
    assert {"input", "tools", "stream", "background"} <= names
    for name in sorted(names - BODY.keys()):
        server.ask(PATH, {**BODY, name: {"unlike": "any value"}})
    server.ask(PATH, {**BODY, "invented": 1})
    warned = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert warned == ["request field 'invented' is unknown and ignored"]


@pytest.mark.needs("sources")
def test_fields_without_effect_are_documented(server: Served) -> None:
    labels = {
        "max_tool_calls": 1,
        "prompt_cache_key": "a",
        "prompt_cache_options": {"mode": "implicit"},
        "prompt_cache_retention": "24h",
        "reasoning": {"summary": "auto"},
        "safety_identifier": "a",
        "service_tier": "flex",
        "stream_options": {"include_obfuscation": False},
        "user": "a",
    }
    guide = (ROOT / "docs" / "server.md").read_text()
    _, plain, _ = server.ask(PATH, BODY)
    for name, value in labels.items():
        status, answer, _ = server.ask(PATH, {**BODY, name: value})
        assert (status, answer["output"][0]["content"]) == (200, plain["output"][0]["content"])
        assert f"`{name}`" in guide


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_field_that_cannot_be_honoured_is_refused(server: Served, name: str) -> None:
    status, answer, _ = server.ask(PATH, {**BODY, name: "auto"})
    assert (status, answer["error"]["param"]) == (400, name)


def allowed(*names: object) -> dict[str, Any]:
    """A choice of these tools."""
    return {"type": "allowed_tools", "mode": "auto", "tools": [{"name": name} for name in names]}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "text"}]}]}, "input[0].content[0]"),
        ({"input": [CALL]}, "input"),
        ({"input": [{**CALL, "name": None}, OUTPUT]}, "input[0].name"),
        ({"input": [OUTPUT]}, "input[0].call_id"),
        ({"input": [CALL, OUTPUT, OUTPUT]}, "input[2].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "a"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "all"}}, "tool_choice.mode"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tools": [TOOL], "tool_choice": allowed("weather", "a")}, "tool_choice.tools[1].name"),
        ({"tools": [TOOL], "tool_choice": allowed(["weather"])}, "tool_choice.tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": {}}}, "tool_choice.name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": SCHEMA}, "ignore_eos": False}, "text.format"),
        ({"include": ["everything"]}, "include"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {"a": "b" * 513}}, "metadata[...]"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"chat_template": "a"}, "chat_template"),
    ],
)
def test_invalid_field_is_named(server: Served, fields: dict[str, Any], name: str) -> None:
    status, answer, _ = server.ask(PATH, {**BODY, **fields})
    assert (status, answer["error"]["param"]) == (400, name)
    assert name in answer["error"]["message"]


@pytest.mark.needs("memory_limit")
def test_template_of_a_request_needs_the_setting(tiny_model: Path) -> None:
    settings = penstock.server.ServerSettings(request_templates=True)
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine, settings)) as server:
        status, answer, _ = server.ask(PATH, {**BODY, "chat_template": "{{ messages[0].content }}"})
    assert (status, answer["usage"]["input_tokens"]) == (200, len("Hello"))
