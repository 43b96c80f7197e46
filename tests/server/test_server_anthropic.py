"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, with the official client and without."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

import penstock.server
from penstock.server.anthropic.conversion import chat_tools
from penstock.server.anthropic.handlers import LABELS, UNSUPPORTED
from penstock.server.protocol.anthropic import MessagesRequest, Tool
from penstock.server.sampling import SAMPLING_FIELDS
from support.api.engines import make_engine, wait_until
from support.server import scripted
from support.server.serving import Served, at_rest, held, post, scripted_server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER: dict[str, Any] = {"role": "user", "content": "Hello"}
MESSAGE: dict[str, Any] = {"messages": [USER], "max_tokens": 6, "seed": 1, "ignore_eos": True}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}
PIECES = ["<think>", "Let me ", "see.", "</think>", "I ", "ask.", "<tool_call>", '{"name": "weather", ']
PIECES += ['"arguments": ', '{"city": "B', 'ern"}', "}\n", "</tool_call>", "Wait."]
DELTAS = {("text_delta", "text"), ("thinking_delta", "thinking"), ("input_json_delta", "partial_json")}
DELTAS |= {("signature_delta", "signature")}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://localhost/a.png"}}
#: Calls a tool and returns its result.
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "warm?"}]},
    {"role": "system", "content": [{"type": "text", "text": "Ask."}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "21"}]},
            {"type": "text", "text": "Once more."},
            {"type": "tool_result", "tool_use_id": "call_2", "content": "22", "is_error": True},
            {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]
CONVERTED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it warm?"},
    {"role": "system", "content": "Ask."},
    {
        "role": "assistant",
        "content": "I ask.",
        "reasoning": "Hm.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Rome"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "21"},
    {"role": "user", "content": "Once more."},
    {"role": "tool", "tool_call_id": "call_2", "content": "22", "is_error": True},
    {"role": "user", "content": "Well?"},
]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    longer = {"max_position_embeddings": 8192}
    with make_engine(tiny_model, tool_parser="hermes", config_overrides=longer) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(max_body_bytes=100_000)
    with serving(penstock.server.app({"tiny": engine}, settings)) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def thinking(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a model that answers `thinks` with `PIECES`."""
    with scripted_server(tiny_model, tmp_path_factory.mktemp("thinking"), PIECES) as server:
        yield server


@pytest.fixture
def thinks(thinking: Served) -> dict[str, Any]:
    """A request that is answered with `PIECES`."""
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    sampling = {"temperature": 2.0, "ignore_eos": True, "seed": thinking.application.script.seed}
    return {"messages": scripted.MESSAGES, "tools": tools, "max_tokens": len(PIECES), **sampling}


@pytest.fixture
def calling(engine: penstock.Engine) -> dict[str, Any]:
    """Arguments of the client that make the model call a tool, with few white space."""
    bias = {str(engine.encode(space)[0]): -100 for space in " \n\t\r"}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    return {
        "model": "tiny",
        "messages": [USER],
        "max_tokens": 200,
        "tools": [WEATHER],
        "tool_choice": choice,
        "extra_body": {"logit_bias": bias, "seed": 1},
    }


def events_of(server: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; checks their names."""
    status, text, headers = server.ask(PATH, {**body, "stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    found = []
    for part in text.decode().removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


def error_of(answer: dict[str, Any]) -> tuple[str, str]:
    """The type and the message of an error; checks its form."""
    assert answer.keys() == {"type", "error"}
    assert answer["type"] == "error"
    assert answer["error"].keys() == {"type", "message"}
    return answer["error"]["type"], answer["error"]["message"]


# ---- responses


def test_tool_passes_on_how_its_schema_is_read() -> None:
    tool = Tool("f", input_schema={"not": {}}, strict=True, ignore_unsupported=False)
    expected = {"name": "f", "parameters": {"not": {}}, "strict": True, "ignore_unsupported": False}
    assert chat_tools([tool]) == [{"type": "function", "function": expected}]


def test_message_has_the_output_of_the_engine(server: Served, engine: penstock.Engine) -> None:
    expected = engine.blocking.generate([USER], max_tokens=6, seed=1, ignore_eos=True)
    status, answer, _ = server.ask(PATH, {**MESSAGE, "model": "tiny"})
    assert status == 200
    assert answer.pop("id").startswith("msg_")
    usage = answer.pop("usage")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": expected.content}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
    }
    assert usage["output_tokens"] == 6
    assert usage["cache_creation_input_tokens"] == 0
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt == len(expected.prompt_token_ids)


def test_repeated_prompt_has_cached_tokens_in_usage(server: Served) -> None:
    body = {**MESSAGE, "messages": [{"role": "user", "content": "again " * 100}]}
    _, first, _ = server.ask(PATH, body)
    _, second, _ = server.ask(PATH, body)
    cached = second["usage"]["cache_read_input_tokens"]
    assert cached > 0
    assert cached + second["usage"]["input_tokens"] == first["usage"]["input_tokens"]


def test_null_for_every_optional_message_field_is_omission(server: Served) -> None:
    names = ["model", "stream", "stop_sequences", "system", "temperature", "thinking", "tool_choice"]
    names += ["metadata", "tools", "top_k", "top_p", "output_config", "service_tier"]
    _, plain, _ = server.ask(PATH, MESSAGE)
    status, answer, _ = server.ask(PATH, {**dict.fromkeys(names), **MESSAGE})
    assert status == 200
    assert answer["content"] == plain["content"]


def test_unknown_field_and_user_id_have_no_effect(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    _, plain, _ = server.ask(PATH, MESSAGE)
    fields = {"metadata": {"user_id": "u"}, "anthropic_future": 1, "cache_control": {"type": "ephemeral"}}
    for _ in range(2):
        status, answer, _ = server.ask(PATH, {**MESSAGE, **fields})
        assert (status, answer["content"]) == (200, plain["content"])
    warnings = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert warnings == ["request field 'anthropic_future' is unknown and ignored"]


def test_stop_sequence_is_reported_and_not_in_the_text(server: Served) -> None:
    _, answer, _ = server.ask(PATH, MESSAGE)
    text = answer["content"][0]["text"]
    stop = text[2]
    _, answer, _ = server.ask(PATH, {**MESSAGE, "stop_sequences": ["not there", stop]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert "".join(block["text"] for block in answer["content"]) == text[: text.index(stop)]


def test_end_of_text_is_the_end_of_the_turn(server: Served) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["yes"]}}
    body = {**MESSAGE, "max_tokens": 50, "ignore_eos": False, "output_config": {"format": form}}
    _, answer, _ = server.ask(PATH, body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert json.loads(answer["content"][0]["text"]) == "yes"
    events = events_of(server, body)
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_last_assistant_message_is_continued(server: Served, engine: penstock.Engine) -> None:
    messages = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]}]
    expected = engine.blocking.generate(
        [USER, {"role": "assistant", "content": "Hi"}],
        continue_final_message=True,
        max_tokens=6,
        seed=1,
        ignore_eos=True,
    )
    _, answer, _ = server.ask(PATH, {**MESSAGE, "messages": messages})
    assert answer["content"][0]["text"] == expected.content


def test_null_for_every_optional_field_equals_an_omitted_one(server: Served) -> None:
    names = {*SAMPLING_FIELDS, *LABELS, *UNSUPPORTED, *MessagesRequest.__struct_fields__}
    _, plain, _ = server.ask(PATH, MESSAGE)
    status, answer, _ = server.ask(PATH, {**dict.fromkeys(names), **MESSAGE})
    assert (status, answer["content"]) == (200, plain["content"])


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": t} for t in ("Be ", "brief.")]])
def test_blocks_become_messages_of_the_chat_template(engine: penstock.Engine, system: object) -> None:
    from penstock.server.anthropic.conversion import chat_messages
    from penstock.server.bodies import converted
    from penstock.server.protocol.anthropic import CountRequest

    request = converted({"messages": TURNS, "system": system}, CountRequest)
    assert chat_messages(request) == CONVERTED
    engine.apply_chat_template(CONVERTED)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
def test_thinking_and_effort_are_template_variables(fields: dict[str, Any], options: dict[str, Any]) -> None:
    from penstock.server.anthropic.conversion import template_variables
    from penstock.server.bodies import converted
    from penstock.server.protocol.anthropic import CountRequest

    request = converted({"messages": [USER], **fields}, CountRequest)
    assert template_variables(request) == options


# ---- edits of the context

ALL_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
CLEAR_USES: dict[str, Any] = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "input_tokens", "value": 30_000},
    "keep": {"type": "tool_uses", "value": 3},
    "clear_at_least": {"type": "input_tokens", "value": 5000},
    "exclude_tools": ["weather"],
    "clear_tool_inputs": False,
}
EDITS = [
    {},
    {"edits": []},
    {"edits": [ALL_THINKING]},
    {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}]},
    {"edits": [CLEAR_USES, {**CLEAR_USES, "clear_tool_inputs": ["weather"], "exclude_tools": None}]},
    {"edits": [{"type": "compact_20260112", "instructions": "Be brief.", "pause_after_compaction": True}]},
    {"edits": [{"type": "another_20270101", "more": [1]}]},
]


@pytest.mark.parametrize("edits", EDITS)
def test_edits_of_the_context_are_not_made(server: Served, edits: dict[str, Any]) -> None:
    _, plain, _ = server.ask(PATH, MESSAGE)
    body = {**MESSAGE, "context_management": edits}
    status, answer, _ = server.ask(f"{PATH}?beta=true", body)
    assert (status, answer["content"]) == (200, plain["content"])
    assert "context_management" not in plain
    assert answer["context_management"] == {"applied_edits": []}
    [delta] = [event for event in events_of(server, body) if event["type"] == "message_delta"]
    assert delta["context_management"] == {"applied_edits": []}
    status, count, _ = server.ask(f"{COUNT}?beta=true", {"messages": [USER], "context_management": edits})
    assert status == 200
    assert count["context_management"] == {"original_input_tokens": count["input_tokens"]}


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize(
    ("edits", "name"),
    [
        ("all", "context_management"),
        ([ALL_THINKING], "context_management"),
        ({"edits": ALL_THINKING}, "context_management.edits"),
        ({"edits": ["clear_thinking_20251015"]}, "context_management.edits[0]"),
        ({"edits": [{"keep": "all"}]}, "context_management.edits[0].type"),
        ({"edits": [ALL_THINKING, {"type": 1}]}, "context_management.edits[1].type"),
        ({"edits": [{**ALL_THINKING, "keep": "none"}]}, "context_management.edits[0].keep"),
        ({"edits": [{**ALL_THINKING, "keep": 1}]}, "context_management.edits[0].keep"),
        ({"edits": [{**CLEAR_USES, "keep": {"value": 1}}]}, "context_management.edits[0].keep.type"),
        ({"edits": [{**CLEAR_USES, "trigger": {"type": "tool_uses", "value": -1}}]}, "trigger.value"),
        ({"edits": [{**CLEAR_USES, "exclude_tools": "weather"}]}, "exclude_tools"),
        ({"edits": [ALL_THINKING] * 65}, "context_management.edits"),
    ],
)
def test_malformed_edits_are_named(server: Served, path: str, edits: object, name: str) -> None:
    status, answer, _ = server.ask(path, {**MESSAGE, "context_management": edits})
    kind, message = error_of(answer)
    assert (status, kind) == (400, "invalid_request_error")
    assert name in message


def test_request_of_a_coding_agent_is_answered(thinking: Served) -> None:
    """The fields and headers that Claude Code sends by default."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    extra = {"eager_input_streaming": True, "defer_loading": False, "input_examples": [{"city": "Rome"}]}
    body = {
        "model": "default",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "Be brief.", **cached}, {"type": "text", "text": "", **cached}],
        "messages": [
            *TURNS[:3],
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": [], **cached},
                    {"type": "text", "text": "<system-reminder>Hm.</system-reminder>", "citations": None},
                ],
            },
        ],
        "tools": [{**WEATHER, **extra, **cached, "type": "custom", "strict": False}],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "user_a_account__session_b"},
        "thinking": {"type": "enabled", "budget_tokens": 31_999, "display": "summarized"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [ALL_THINKING]},
        "mcp_servers": [],
        "container": None,
        "speed": "standard",
        "diagnostics": {"previous_message_id": None},
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,context-management-2025-06-27,effort-2025-11-24",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-app": "cli",
        "X-Stainless-Helper-Method": "stream",
        "Authorization": "Bearer none",
    }
    for stream in (False, True):
        sent = {**body, "stream": stream}
        status, answer, _ = thinking.ask(f"{PATH}?beta=true", sent, headers=headers)
        assert status == 200, answer
    fields = {name: value for name, value in body.items() if name != "max_tokens"}
    status, answer, _ = thinking.ask(f"{COUNT}?beta=true", fields, headers=headers)
    assert status == 200, answer
    assert thinking.ask("/", method="HEAD", headers=headers)[0] == 200


def test_client_reads_that_no_edit_was_made(client: anthropic.Anthropic) -> None:
    keywords: Any = {"model": "tiny", "messages": [USER], "context_management": {"edits": [CLEAR_USES]}}
    message = client.beta.messages.create(**keywords, max_tokens=1)
    assert message.context_management is not None
    assert message.context_management.applied_edits == []
    count = client.beta.messages.count_tokens(**keywords)
    assert count.context_management is not None
    assert count.context_management.original_input_tokens == count.input_tokens


def test_former_name_of_the_output_format_is_honoured(server: Served) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["yes"]}}
    body = {**MESSAGE, "max_tokens": 50, "ignore_eos": False, "output_format": form}
    _, answer, _ = server.ask(PATH, body)
    assert json.loads(answer["content"][0]["text"]) == "yes"
    both = {**body, "output_config": {"format": form}}
    for wrong, name in ((both, "output_format="), ({**body, "output_format": {}}, "output_format.type=")):
        status, answer, _ = server.ask(PATH, wrong)
        assert (status, error_of(answer)[1].startswith(name)) == (400, True)


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_too_long_prompt_has_the_phrase_of_anthropic(server: Served, path: str) -> None:
    size = 9000 if path == PATH else 300_000
    body = {**MESSAGE, "messages": [{"role": "user", "content": "ab" * size}]}
    with serving(penstock.server.app(server.application.state.models["tiny"].engine)) as open_server:
        status, answer, _ = open_server.ask(path, body)
    kind, message = error_of(answer)
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith("prompt is too long: ")


# ---- the official client


def test_client_counts_the_tokens_that_the_message_uses(client: anthropic.Anthropic) -> None:
    keywords: Any = {"model": "tiny", "messages": TURNS, "system": "Be brief."}
    count = client.messages.count_tokens(**keywords).input_tokens
    usage = client.messages.create(**keywords, max_tokens=1).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_client_counts_the_tokens_of_tools(thinking: Served, thinks: dict[str, Any]) -> None:
    tools = {"messages": thinks["messages"], "tools": thinks["tools"]}
    _, answer, _ = thinking.ask(COUNT, tools)
    _, message, _ = thinking.ask(PATH, thinks)
    usage = message["usage"]
    assert answer == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_client_streams_the_message_that_it_gets(client: anthropic.Anthropic) -> None:
    keywords: Any = {"model": "tiny", "messages": [USER], "max_tokens": 20}
    keywords["extra_body"] = {"temperature": 0.0, "top_k": 5}
    whole: Any = client.messages.create(**keywords)
    with client.messages.stream(**keywords) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text"]
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.anyio
async def test_async_client_gets_and_streams_messages(
    server: Served, anyio_backend: tuple[str, dict[str, Any]]
) -> None:
    assert anyio_backend
    async with anthropic.AsyncAnthropic(base_url=server.url, auth_token="none", max_retries=0) as client:  # noqa: S106
        keywords: Any = {"model": "tiny", "messages": [USER], "max_tokens": 8}
        keywords["extra_body"] = {"temperature": 0.0}
        whole: Any = await client.messages.create(**keywords)
        async with client.messages.stream(**keywords) as stream:
            final: Any = await stream.get_final_message()
    assert final.content[0].text == whole.content[0].text


def test_client_gets_a_call_with_valid_input(client: anthropic.Anthropic, calling: dict[str, Any]) -> None:
    message: Any = client.messages.create(**calling)
    assert message.stop_reason == "tool_use"
    [block] = message.content
    assert block.type == "tool_use"
    assert block.name == "weather"
    assert block.input["city"] in ("Paris", "Rome")


def test_client_joins_a_streamed_call(client: anthropic.Anthropic, calling: dict[str, Any]) -> None:
    calling["tool_choice"] = {"type": "tool", "name": "weather"}
    whole: Any = client.messages.create(**calling)
    with client.messages.stream(**calling) as stream:
        final: Any = stream.get_final_message()
    [block] = final.content
    assert final.stop_reason == "tool_use"
    assert block.type == "tool_use"
    assert block.name == "weather"
    assert block.input == whole.content[0].input


def test_client_raises_the_errors_of_its_statuses(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(api_keys=("secret",))
    keywords: Any = {"model": "tiny", "messages": [USER], "max_tokens": 1}
    with serving(penstock.server.app({"tiny": engine}, settings)) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="other", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                client.messages.create(**keywords)
            body: Any = caught.value.body
            assert error_of(body)[0] == "authentication_error"
        with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
            assert client.messages.create(**keywords).usage.output_tokens == 1
            with pytest.raises(anthropic.NotFoundError):
                client.messages.create(**{**keywords, "model": "huge"})
            with pytest.raises(anthropic.BadRequestError, match="max_tokens=0 "):
                client.messages.create(**{**keywords, "max_tokens": 0})


# ---- streams


def test_events_of_a_message_are_in_order(server: Served) -> None:
    _, answer, _ = server.ask(PATH, MESSAGE)
    events = events_of(server, MESSAGE)
    names = [event["type"] for event in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) <= {"content_block_delta", "ping"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    message = events[0]["message"]
    assert message.pop("id").startswith("msg_")
    usage = message.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }
    assert events[2] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert {delta["index"] for delta in deltas} == {0}
    assert {delta["delta"]["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["delta"]["text"] for delta in deltas) == answer["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    final = events[-2]["usage"]
    assert final["output_tokens"] == 6
    assert final["input_tokens"] == usage["input_tokens"]


def test_thinking_text_and_calls_are_blocks(thinking: Served, thinks: dict[str, Any]) -> None:
    _, answer, _ = thinking.ask(PATH, thinks)
    *others, call = answer["content"]
    assert others == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "I ask.Wait."},
    ]
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Bern"}}


def test_blocks_of_a_stream_have_their_own_indices(thinking: Served, thinks: dict[str, Any]) -> None:
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events_of(thinking, thinks)[2:-2]:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(blocks))
            blocks.append({**event["content_block"], "deltas": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            kind = event["delta"].pop("type")
            [(field, text)] = event["delta"].items()
            assert (kind, field) in DELTAS
            blocks[-1]["deltas"] += text
        is_open = event["type"] in ("content_block_start", "content_block_delta", "ping")
    assert not is_open
    # A chunk of several tokens has the text after a call before it.
    assert [block["type"] for block in blocks[:3]] == ["thinking", "text", "tool_use"]
    kinds = ("thinking", "text", "tool_use")
    deltas = {kind: "".join(block["deltas"] for block in blocks if block["type"] == kind) for kind in kinds}
    assert deltas == {"thinking": "Let me see.", "text": "I ask.Wait.", "tool_use": '{"city": "Bern"}'}
    assert (blocks[0]["signature"], blocks[2]["input"]) == ("", {})


@pytest.mark.parametrize("setting", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_thinking_that_is_not_wanted_is_omitted(
    thinking: Served, thinks: dict[str, Any], setting: dict[str, Any]
) -> None:
    thinks["thinking"] = setting
    _, answer, _ = thinking.ask(PATH, thinks)
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
    events = [event for event in events_of(thinking, thinks) if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in events[:2]] == ["text", "tool_use"]


def test_incomplete_arguments_are_kept_as_text(thinking: Served, thinks: dict[str, Any]) -> None:
    thinks["max_tokens"] = PIECES.index('ern"}')
    _, answer, _ = thinking.ask(PATH, thinks)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][-1]["input"] == {"INVALID_JSON": '{"city": "B'}


def test_error_in_a_stream_is_an_error_event(engine: penstock.Engine) -> None:
    application = penstock.server.app({"tiny": engine})
    request = post(PATH, {**MESSAGE, "max_tokens": 5000, "stream": True})
    with serving(application) as server, server.send(request) as connection:
        data = connection.recv(1024)
        application.state.calls.is_draining = True
        application.state.calls.abort_all()
        while not data.endswith(b"\r\n0\r\n\r\n"):
            part = connection.recv(65536)
            assert part
            data += part
    body = data.split(b"event: error\ndata: ")[1].partition(b"\n")[0]
    assert error_of(json.loads(body))[0] == "overloaded_error"
    assert b"message_stop" not in data


@pytest.mark.parametrize("stream", [True, False])
def test_aborted_message_is_an_overloaded_error(
    server: Served, engine: penstock.Engine, *, stream: bool
) -> None:
    body = {**MESSAGE, "max_tokens": 5000, "stream": stream}
    with held(engine):
        connection = server.send(post(PATH, body))
        wait_until(lambda: engine.stats().running == 2)
        [name] = server.application.state.calls.generations
        assert server.ask("/abort", {"request_id": name})[1] == {"aborted": 1}
    data = b""
    while b"overloaded_error" not in data:
        part = connection.recv(65536)
        assert part
        data += part
    connection.close()
    assert (b" 200 " if stream else b" 503 ") in data.partition(b"\r\n")[0]
    assert b"message_stop" not in data
    assert (b"event: error\n" in data) is stream


def test_response_has_the_request_id_of_the_api(client: anthropic.Anthropic, server: Served) -> None:
    message = client.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "a"}])
    assert message._request_id
    headers = {"X-Request-Id": "label-1", "anthropic-version": "2099-01-01"}
    for body in (MESSAGE, {}):
        assert server.ask(PATH, body, headers=headers)[2]["request-id"] == "label-1"


def test_disconnect_cancels_a_streamed_message(server: Served, engine: penstock.Engine) -> None:
    body = {**MESSAGE, "max_tokens": 5000, "stream": True}
    with server.send(post(PATH, body)) as connection:
        assert b"200" in connection.recv(1024)
    wait_until(lambda: at_rest(engine))


# ---- errors


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role='tool'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type='image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "type='document'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [USER, TURNS[2]]}, "messages[1]"),
        ({"system": [{"type": "image"}]}, "system[0].type='image'"),
        ({"temperature": -1}, "temperature=-1"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type="),
        ({"tools": [WEATHER], "tool_choice": {"type": "all"}}, "tool_choice.type='all'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "a"}}, "tool_choice.name='a'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type='any'"),
        ({"thinking": {"type": "deep"}}, "thinking.type='deep'"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type='xml'"),
        ({"n": 2}, "n=2"),
    ],
)
def test_invalid_field_is_named_in_anthropics_form(server: Served, fields: dict[str, Any], name: str) -> None:
    status, answer, _ = server.ask(PATH, {**MESSAGE, **fields})
    kind, message = error_of(answer)
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith(name) or (name.startswith("type=") and name in message)


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_middleware_errors_have_anthropics_form(engine: penstock.Engine, path: str) -> None:
    settings = penstock.server.ServerSettings(api_keys=("secret",), max_body_bytes=1000)
    key = {"x-api-key": "secret"}
    with serving(penstock.server.app({"tiny": engine}, settings)) as server:
        large = {**MESSAGE, "messages": [{"role": "user", "content": "a" * 1000}]}
        cases = (
            (401, "authentication_error", server.ask(path, MESSAGE)),
            (413, "request_too_large", server.ask(path, large, headers=key)),
            (404, "not_found_error", server.ask(path, {**MESSAGE, "model": "huge"}, headers=key)),
            (405, "invalid_request_error", server.ask(path, headers=key)),
            (400, "invalid_request_error", server.ask(path, b"{", headers=key)),
        )
        for status, kind, (found, answer, _) in cases:
            assert (found, error_of(answer)[0]) == (status, kind)
        server.application.state.calls.is_draining = True
        found, answer, headers = server.ask(PATH, MESSAGE, headers=key)
        assert (found, error_of(answer)[0]) == (503, "overloaded_error")
        assert "retry-after" in headers


def test_too_many_messages_are_a_rate_limit_error(tiny_model: Path) -> None:
    settings = penstock.server.ServerSettings(max_outputs_per_key=1)
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine, settings)) as server:
        application = server.application
        with held(engine), server.send(post(PATH, MESSAGE)):
            wait_until(lambda: application.state.calls.num_active == 1)
            status, answer, headers = server.ask(PATH, MESSAGE)
    assert (status, error_of(answer)[0]) == (429, "rate_limit_error")
    assert headers["retry-after"] == "1"


def test_failed_message_is_an_api_error(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("penstock.server.anthropic.handlers.chat_messages", fail)
    for path in (PATH, COUNT):
        status, answer, _ = server.ask(path, MESSAGE)
        assert (status, error_of(answer)) == (500, ("api_error", "internal error"))
