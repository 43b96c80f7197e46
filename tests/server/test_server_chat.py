"""`/v1/chat/completions`: responses, streams and their options, with the official client and without."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

import penstock.server
from penstock.server.chat import UNSUPPORTED
from penstock.server.protocol.openai_chat import ChatRequest
from penstock.server.sampling import LABELS, SAMPLING_FIELDS
from support.api.engines import make_engine, wait_until
from support.server.serving import Served, at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 6, "seed": 1, "ignore_eos": True}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    longer = {"max_position_embeddings": 8192}
    with make_engine(tiny_model, tool_parser="hermes", config_overrides=longer) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(keep_alive_interval=0.05)
    with serving(penstock.server.app({"tiny": engine}, settings)) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def calling(engine: penstock.Engine) -> dict[str, Any]:
    """A request that calls a tool, with few white space."""
    bias = {str(engine.encode(space)[0]): -100 for space in " \n\t\r"}
    return {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 200,
        "tools": [WEATHER],
        "parallel_tool_calls": False,
        "logit_bias": bias,
        "seed": 1,
    }


def text_of(events: list[Any], index: int = 0) -> str:
    """The content of one choice of a stream."""
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


# ---- responses


def test_chat_answers_as_the_engine_does(server: Served, engine: penstock.Engine) -> None:
    expected = engine.blocking.generate(MESSAGES, max_tokens=6, seed=1, ignore_eos=True)
    status, answer, _ = server.ask(PATH, {**CHAT, "model": "tiny"})
    assert status == 200
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == expected.content
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(expected.prompt_token_ids), 6)
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6


def test_null_for_every_optional_field_equals_an_omitted_one(server: Served) -> None:
    names = {
        *penstock.SamplingOptions.__annotations__,
        *SAMPLING_FIELDS,
        *LABELS,
        *UNSUPPORTED,
        *ChatRequest.__struct_fields__,
    }
    _, plain, _ = server.ask(PATH, CHAT)
    status, answer, _ = server.ask(PATH, {**dict.fromkeys(names), **CHAT})
    assert status == 200
    assert answer["choices"] == plain["choices"]


def test_chat_has_n_choices_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=4, n=2, seed=3, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        for token in choice.logprobs.content:
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 2
        joined = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
        assert joined.decode(errors="replace").startswith(choice.message.content or "")


def test_zero_top_logprobs_need_no_logprobs(server: Served) -> None:
    status, answer, _ = server.ask(PATH, {**CHAT, "logprobs": False, "top_logprobs": 0})
    assert (status, answer["choices"][0]["logprobs"]) == (200, None)
    status, answer, _ = server.ask(PATH, {**CHAT, "top_logprobs": 1})
    assert (status, answer["error"]["param"]) == (400, "top_logprobs")


def test_max_completion_tokens_is_named_in_its_error(server: Served) -> None:
    fields = {"messages": MESSAGES, "max_completion_tokens": 0}
    status, answer, _ = server.ask(PATH, fields)
    assert (status, answer["error"]["param"]) == (400, "max_completion_tokens")
    assert answer["error"]["message"].startswith("max_completion_tokens=0 ")


@pytest.mark.needs("memory_limit")
def test_template_variables_reach_the_template(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(request_templates=True)
    variables = {"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}
    body = {**CHAT, **variables, "chat_template": "{{ reasoning_effort }}{{ a }}", "return_token_ids": True}
    with serving(penstock.server.app(engine, settings)) as server:
        _, answer, _ = server.ask(PATH, body)
        assert answer["prompt_token_ids"] == engine.encode("low1")
        status, _, _ = server.ask(PATH, {**body, "chat_template_kwargs": {"messages": []}})
        assert status == 400


def test_last_message_is_continued(server: Served, engine: penstock.Engine) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Hi"}]
    fields = {"messages": messages, "continue_final_message": True, "return_token_ids": True}
    _, answer, _ = server.ask(PATH, {**CHAT, **fields})
    text = engine.apply_chat_template(messages, continue_final_message=True)
    assert answer["prompt_token_ids"] == engine.encode(text, add_special_tokens=False)


def test_required_tool_call_has_valid_arguments(client: openai.OpenAI, calling: dict[str, Any]) -> None:
    answer = client.chat.completions.create(**calling, tool_choice="required")
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call: Any = choice.message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert choice.message.content is None


def test_streamed_tool_call_joins_to_the_same_call(client: openai.OpenAI, calling: dict[str, Any]) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    keywords: Any = {**calling, "tool_choice": choice}
    whole: Any = client.chat.completions.create(**keywords)
    name = arguments = ""
    reasons = []
    for chunk in client.chat.completions.create(**keywords, stream=True):
        [choice] = chunk.choices
        reasons.append(choice.finish_reason)
        for delta in choice.delta.tool_calls or ():
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
    assert reasons[-1] == "tool_calls"
    expected = whole.choices[0].message.tool_calls[0].function
    assert (name, arguments) == (expected.name, expected.arguments)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
    ids=["openai", "vllm", "vllm-text", "former"],
)
def test_schema_in_each_spelling_gives_such_an_object(server: Served, fields: dict[str, Any]) -> None:
    status, answer, _ = server.ask(PATH, {"messages": MESSAGES, "max_tokens": 100, "seed": 1, **fields})
    assert status == 200
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["ok"], bool)


@pytest.mark.parametrize(
    "fields", [{"choice": ["yes", "no"]}, {"regex": "yes|no"}, {"grammar": 'start: "yes"'}]
)
def test_constraint_limits_the_output(server: Served, fields: dict[str, Any]) -> None:
    for given in (
        {"structured_outputs": fields},
        {f"guided_{name}": value for name, value in fields.items()},
        fields,
    ):
        status, answer, _ = server.ask(PATH, {"messages": MESSAGES, "max_tokens": 20, **given})
        assert status == 200
        assert answer["choices"][0]["message"]["content"] in ("yes", "no")


def test_constraint_without_valid_source_is_status_400(server: Served) -> None:
    for value in (
        {"regex": "a" * 20, "choice": ["a"]},
        {"structural_tag": "{}"},
        {"json": "{"},
        ["json"],
        {"regex": "("},
    ):
        status, answer, _ = server.ask(PATH, {**CHAT, "ignore_eos": False, "structured_outputs": value})
        assert status == 400, value
        assert answer["error"]["type"] == "invalid_request_error"


def test_long_text_of_a_schema_is_not_decoded(server: Served) -> None:
    fields = {"structured_outputs": {"json": f"[{'1,' * 600_000}1]"}}
    status, answer, _ = server.ask(PATH, {**CHAT, "ignore_eos": False, **fields})
    assert (status, answer["error"]["param"]) == (400, "structured_outputs.json")
    assert "at most 1048576 characters" in answer["error"]["message"]


def test_token_ids_are_returned_on_request(server: Served, engine: penstock.Engine) -> None:
    _, answer, _ = server.ask(PATH, {**CHAT, "return_token_ids": True, "logprobs": True})
    expected = engine.blocking.generate(MESSAGES, max_tokens=6, seed=1, ignore_eos=True)
    assert tuple(answer["prompt_token_ids"]) == expected.prompt_token_ids
    assert tuple(answer["choices"][0]["token_ids"]) == expected.token_ids
    events = server.events(PATH, {**CHAT, "return_token_ids": True})
    streamed = [token for event in events[1:-1] for token in event["choices"][0]["token_ids"]]
    assert tuple(streamed) == expected.token_ids


def test_token_ids_replace_texts_of_logprobs(server: Served) -> None:
    _, answer, _ = server.ask(
        PATH, {**CHAT, "return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": True}
    )
    [choice] = answer["choices"]
    texts = [token["token"] for token in choice["logprobs"]["content"]]
    assert texts == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


# ---- streams


def test_stream_has_role_text_reason_and_done(server: Served) -> None:
    _, answer, _ = server.ask(PATH, CHAT)
    first, *events, done = server.events(PATH, CHAT)
    assert done == "[DONE]"
    assert first["object"] == "chat.completion.chunk"
    nothing = {"reasoning": None, "reasoning_content": None}
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", **nothing}
    assert all(event["choices"][0]["delta"].items() >= nothing.items() for event in events)
    assert answer["choices"][0]["message"].items() >= nothing.items()
    assert text_of([first, *events, done]) == answer["choices"][0]["message"]["content"]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [*[None] * (len(events) - 1), "length"]
    assert all("usage" not in event for event in events)
    assert len({event["id"] for event in events}) == 1


def test_stream_with_usage_ends_with_a_chunk_of_usage(server: Served) -> None:
    options = {"stream_options": {"include_usage": True}}
    *events, usage, done = server.events(PATH, {**CHAT, **options})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert all(event["usage"] is None for event in events)


def test_continuous_usage_counts_up(server: Served) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    _role, *events, last, _done = server.events(PATH, {**CHAT, **options, "return_token_ids": True})
    count = 0
    for event in events:
        count += len(event["choices"][0]["token_ids"])
        assert event["usage"]["completion_tokens"] == count
    assert last["usage"]["completion_tokens"] == count == 6


def test_continuous_usage_without_usage_is_none(server: Served) -> None:
    options = {"stream_options": {"continuous_usage_stats": True}}
    *events, _done = server.events(PATH, {**CHAT, **options})
    assert all("usage" not in event for event in events)


def test_stream_has_the_ids_of_the_prompt_once(server: Served) -> None:
    fields = {**CHAT, "n": 2, "return_token_ids": True}
    _, answer, _ = server.ask(PATH, fields)
    first, *events, _done = server.events(PATH, fields)
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in events)


def test_stream_of_n_choices_equals_the_response(server: Served) -> None:
    _, answer, _ = server.ask(PATH, {**CHAT, "n": 3})
    events = server.events(PATH, {**CHAT, "n": 3})
    for choice in answer["choices"]:
        assert text_of(events, choice["index"]) == choice["message"]["content"]


def test_streamed_logprobs_equal_those_of_the_response(server: Served) -> None:
    options = {"logprobs": True, "top_logprobs": 1}
    _, answer, _ = server.ask(PATH, {**CHAT, **options})
    events = server.events(PATH, {**CHAT, **options})
    streamed = [
        token
        for event in events[:-1]
        for token in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == answer["choices"][0]["logprobs"]["content"]


def test_reasoning_has_both_names(tiny_model: Path) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 60, "structured_outputs": {"regex": "<think>so</think>yes"}}
    with (
        make_engine(tiny_model, reasoning_parser="think") as engine,
        serving(penstock.server.app(engine)) as server,
    ):
        _, answer, _ = server.ask(PATH, fields)
        events = server.events(PATH, fields)
        _, plain, _ = server.ask(PATH, {**fields, "include_reasoning": False})
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "so"
    assert message["content"] == "yes"
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta[name] or "" for delta in deltas) == "so"
    assert text_of(events) == "yes"
    assert plain["choices"][0]["message"]["reasoning"] is None


def test_asynchronous_client_streams(server: Served) -> None:
    async def read() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            keywords: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "seed": 1}
            answer = await client.chat.completions.create(**keywords)
            stream = await client.chat.completions.create(**keywords, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return answer.choices[0].message.content, "".join(texts)

    whole, streamed = asyncio.run(read())
    assert whole == streamed


# ---- disconnects


def test_disconnect_in_a_stream_frees_the_blocks(server: Served, engine: penstock.Engine) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8000, "ignore_eos": True, "stream": True}
    tokens = engine.stats().generation_tokens
    connection = server.send(post(PATH, body))
    assert b" 200 " in connection.recv(1000)
    connection.close()
    wait_until(lambda: at_rest(engine) and not server.application.state.calls.generations)
    assert engine.stats().generation_tokens < tokens + 8000


@pytest.mark.parametrize("fields", [{"stream": True}, {"n": 4}, {"best_of": 2}])
def test_disconnect_before_a_token_frees_the_blocks(
    server: Served, engine: penstock.Engine, fields: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8000, "ignore_eos": True, **fields}
    with held(engine):
        tokens = engine.stats().generation_tokens
        connection = server.send(post(PATH, body))
        wait_until(lambda: engine.stats().running > 1)
        connection.close()
        wait_until(lambda: not server.application.state.calls.generations)
    wait_until(lambda: at_rest(engine))
    assert engine.stats().generation_tokens < tokens + 16


def test_disconnect_in_the_body_leaves_no_request(server: Served, engine: penstock.Engine) -> None:
    server.send(post(PATH, b'{"messages": [', length=1000)).close()
    wait_until(lambda: server.application.state.calls.num_active == 0 and at_rest(engine))
