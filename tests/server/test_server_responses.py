"""`/v1/responses`: responses, streams and their items, with the official client and without."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import openai
import pydantic
import pytest

import penstock.server
from support.api.engines import make_engine, wait_until
from support.server import scripted
from support.server.serving import Served, at_rest, held, post, scripted_server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/responses"
USER: dict[str, Any] = {"role": "user", "content": "Hello"}
BODY: dict[str, Any] = {"input": "Hello", "max_output_tokens": 6, "seed": 1, "ignore_eos": True}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}
PIECES = ["<think>", "Let me ", "see.", "</think>", "I ", "ask.", "<tool_call>", '{"name": "weather", ']
PIECES += ['"arguments": ', '{"city": "B', 'ern"}', "}\n", "</tool_call>", "Wait."]


class Answer(pydantic.BaseModel):
    """The output that a test asks for."""

    word: Literal["yes", "no"]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    longer = {"max_position_embeddings": 8192}
    with make_engine(tiny_model, tool_parser="hermes", config_overrides=longer) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    with serving(penstock.server.app({"tiny": engine})) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def thinking(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a model that answers `thinks` with `PIECES`."""
    with scripted_server(tiny_model, tmp_path_factory.mktemp("thinking"), PIECES) as server:
        yield server


@pytest.fixture
def thinks(thinking: Served) -> dict[str, Any]:
    """A request that is answered with `PIECES`."""
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    sampling = {"temperature": 2.0, "ignore_eos": True, "seed": thinking.application.script.seed}
    return {"input": scripted.MESSAGES, "tools": tools, "max_output_tokens": len(PIECES), **sampling}


@pytest.fixture
def calling(engine: penstock.Engine) -> dict[str, Any]:
    """Arguments of the client that make the model call a tool, with few white space."""
    bias = {str(engine.encode(space)[0]): -100 for space in " \n\t\r"}
    return {
        "model": "tiny",
        "input": "Hello",
        "max_output_tokens": 200,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "extra_body": {"logit_bias": bias, "seed": 1},
    }


def events_of(server: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; checks their names and their numbers."""
    status, text, headers = server.ask(PATH, {**body, "stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    found = []
    for number, part in enumerate(text.decode().removesuffix("\n\n").split("\n\n")):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
        assert found[-1]["sequence_number"] == number
    return found


# ---- responses


def test_response_has_the_output_of_the_engine(server: Served, engine: penstock.Engine) -> None:
    expected = engine.blocking.generate([USER], max_tokens=6, seed=1, ignore_eos=True)
    status, answer, _ = server.ask(PATH, {**BODY, "metadata": {"a": "b"}, "user": "u"})
    assert status == 200
    [item] = answer.pop("output")
    label = answer["id"].removeprefix("resp_")
    part = {"type": "output_text", "text": expected.content, "annotations": [], "logprobs": []}
    assert item == {
        "id": f"msg_{label}_0",
        "type": "message",
        "role": "assistant",
        "status": "incomplete",
        "content": [part],
    }
    usage = answer.pop("usage")
    assert usage["output_tokens"] == 6
    assert usage["input_tokens"] == len(expected.prompt_token_ids)
    assert usage["total_tokens"] == usage["input_tokens"] + 6
    found = {name: answer[name] for name in ("object", "status", "incomplete_details", "error", "model")}
    assert found == {
        "object": "response",
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "error": None,
        "model": "tiny",
    }
    assert (answer["metadata"], answer["user"], answer["max_output_tokens"]) == ({"a": "b"}, "u", 6)


def test_instructions_are_the_first_message(server: Served, engine: penstock.Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    expected = engine.blocking.generate(messages, max_tokens=6, seed=1, ignore_eos=True)
    _, answer, _ = server.ask(PATH, {**BODY, "instructions": "Be brief."})
    assert answer["output"][0]["content"][0]["text"] == expected.content
    assert answer["instructions"] == "Be brief."


def test_repeated_input_has_cached_tokens_in_usage(server: Served) -> None:
    body = {**BODY, "input": "again " * 100}
    server.ask(PATH, body)
    _, answer, _ = server.ask(PATH, body)
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_reasoning_text_and_calls_are_items(thinking: Served, thinks: dict[str, Any]) -> None:
    _, answer, _ = thinking.ask(PATH, thinks)
    reasoning, message, call = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"].startswith("I ask.")
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "incomplete")
    assert json.loads(call["arguments"]) == {"city": "Bern"}
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_streamed_items_equal_those_of_the_response(thinking: Served, thinks: dict[str, Any]) -> None:
    thinks["max_output_tokens"] -= 1  # no text after the call
    _, whole, _ = thinking.ask(PATH, thinks)
    events = events_of(thinking, thinks)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"

    def plain(item: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in item.items() if name not in ("id", "call_id")}

    final = events[-1]["response"]["output"]
    assert list(map(plain, final)) == list(map(plain, whole["output"]))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final
    for name, texts in (
        ("output_text", ["I ask."]),
        ("reasoning_text", ["Let me see."]),
        ("function_call_arguments", ['{"city": "Bern"}']),
    ):
        deltas = [event for event in events if event["type"] == f"response.{name}.delta"]
        assert "".join(event["delta"] for event in deltas) == "".join(texts)
        [end] = [event for event in events if event["type"] == f"response.{name}.done"]
        assert [end.get("text", end.get("arguments"))] == texts
        assert {event["item_id"] for event in deltas} == {end["item_id"]}
    begun = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in begun] == [item["id"] for item in final]
    assert {item["status"] for item in begun} == {"in_progress"}
    parts = [event["type"] for event in events if "content_part" in event["type"]]
    assert parts == ["response.content_part.added", "response.content_part.done"] * 2


def test_text_after_a_call_is_kept(thinking: Served, thinks: dict[str, Any]) -> None:
    output = events_of(thinking, thinks)[-1]["response"]["output"]
    # A chunk of several tokens has the text after a call before it.
    assert [item["type"] for item in output[:3]] == ["reasoning", "message", "function_call"]
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    assert "".join(texts) == "I ask.Wait."


def test_stream_with_too_many_logprobs_ends_with_an_error(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.server.responses.events._MAX_LOGPROB_BYTES", 300)
    events = events_of(server, {**BODY, "top_logprobs": 2})
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["param"] == "top_logprobs"
    assert sum(len(json.dumps(event.get("logprobs"))) for event in events) < 2000


def test_streamed_logprobs_equal_those_of_the_response(server: Served) -> None:
    body = {**BODY, "top_logprobs": 2}
    _, whole, _ = server.ask(PATH, body)
    expected = whole["output"][0]["content"][0]["logprobs"]
    assert len(expected) == 6
    assert {len(entry["top_logprobs"]) for entry in expected} == {2}
    events = events_of(server, {**BODY, "include": ["message.output_text.logprobs"], "top_logprobs": 2})
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == expected
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    joined = [entry for entries in deltas for entry in entries]
    assert joined == expected[: len(joined)]
    assert joined


def test_response_without_output_has_an_empty_message(server: Served) -> None:
    body = {**BODY, "allowed_token_ids": [300], "stop_token_ids": [300]}
    _, whole, _ = server.ask(PATH, body)
    final = events_of(server, body)[-1]
    assert final["type"] == "response.completed"
    for response in (whole, final["response"]):
        assert response["status"] == "completed"
        assert [part["text"] for part in response["output"][0]["content"]] == [""]


# ---- the official client


def test_client_parses_the_stream_to_the_response(client: openai.OpenAI) -> None:
    keywords: Any = {"model": "tiny", "input": "Hello", "temperature": 0.0, "text_format": Answer}
    whole = client.responses.parse(**keywords)
    assert whole.status == "completed"
    assert isinstance(whole.output_parsed, Answer)
    with client.responses.stream(**keywords) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_parsed == whole.output_parsed
    assert "".join(texts) == whole.output_text == final.output_text


@pytest.mark.anyio
async def test_async_client_gets_and_streams_responses(
    server: Served, anyio_backend: tuple[str, dict[str, Any]]
) -> None:
    assert anyio_backend
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        keywords: Any = {"model": "tiny", "input": "Hello", "temperature": 0.0, "text_format": Answer}
        whole = await client.responses.parse(**keywords)
        async with client.responses.stream(**keywords) as stream:
            final = await stream.get_final_response()
    assert isinstance(whole.output_parsed, Answer)
    assert final.output_parsed == whole.output_parsed


def test_client_gets_and_streams_a_call(client: openai.OpenAI, calling: dict[str, Any]) -> None:
    whole = client.responses.create(**calling)
    [call] = whole.output
    assert call.type == "function_call"
    assert (call.name, call.status, whole.status) == ("weather", "completed", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    with client.responses.stream(**calling) as stream:
        snapshot = [e.snapshot for e in stream if e.type == "response.function_call_arguments.delta"][-1]
        [streamed] = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert snapshot == streamed.arguments == call.arguments


def test_client_continues_after_a_call(client: openai.OpenAI, calling: dict[str, Any]) -> None:
    first = client.responses.create(**calling)
    call: Any = first.output[0]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    keywords: Any = {"model": "tiny", "max_output_tokens": 6, "temperature": 0.0}
    second = client.responses.create(previous_response_id=first.id, input=[result], **keywords)
    items: Any = [USER, call.model_dump(), result]
    whole = client.responses.create(input=items, **keywords)
    assert second.output_text == whole.output_text
    assert second.usage is not None
    assert whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens


def test_allowed_tools_limit_the_calls(client: openai.OpenAI, calling: dict[str, Any]) -> None:
    tools = [WEATHER, {**WEATHER, "name": "forecast"}]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "forecast"}],
    }
    response: Any = client.responses.create(**{**calling, "tools": tools, "tool_choice": choice})
    assert response.output[0].name == "forecast"
    named = {"type": "function", "name": "forecast"}
    response = client.responses.create(**{**calling, "tools": tools, "tool_choice": named})
    assert response.output[0].name == "forecast"


# ---- failures


def test_disconnect_in_a_stream_frees_the_blocks(server: Served, engine: penstock.Engine) -> None:
    body = {**BODY, "max_output_tokens": 8000, "stream": True}
    with server.send(post(PATH, body)) as connection:
        assert b"response.output_text.delta" in connection.makefile("rb").read(4096)
        assert engine.stats().running == 1
    wait_until(lambda: at_rest(engine))


def test_aborted_response_has_failed(server: Served, engine: penstock.Engine) -> None:
    body = {**BODY, "max_output_tokens": 8000, "stream": True}
    with server.send(post(PATH, body)) as connection:
        head = connection.makefile("rb")
        while b"response.created" not in (line := head.readline()):
            assert line
        created = json.loads(head.readline().removeprefix(b"data: "))
        assert server.ask("/abort", {"request_id": created["response"]["id"]})[0] == 200
        lines = head.read().splitlines()
    [failed] = [lines[index + 1] for index, line in enumerate(lines) if line == b"event: response.failed"]
    response = json.loads(failed.removeprefix(b"data: "))["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the request was aborted"}
    assert response["output"][0]["status"] == "incomplete"
    wait_until(lambda: at_rest(engine))
    status, _, _ = server.ask(PATH, {**BODY, "previous_response_id": response["id"]})
    assert status == 400


def test_error_after_the_first_byte_is_an_event(
    server: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("penstock.server.responses.events.ResponseEvents.end", fail)
    *_, error, failed = events_of(server, BODY)
    assert error["type"] == "error"
    assert (error["code"], error["message"]) == ("internal_error", "internal error")
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["message"] == "internal error"
    kinds = [
        event.type
        for event in client.responses.create(model="tiny", input="Hello", max_output_tokens=2, stream=True)
    ]
    assert kinds[-2:] == ["error", "response.failed"]


def test_waiting_response_is_cancelled_by_a_disconnect(server: Served, engine: penstock.Engine) -> None:
    with held(engine):
        with server.send(post(PATH, BODY)):
            wait_until(lambda: server.application.state.calls.num_active == 1)
        wait_until(lambda: server.application.state.calls.num_active == 0)
    wait_until(lambda: at_rest(engine))
