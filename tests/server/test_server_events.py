"""The events of chunks with several tokens, which a slow reader gets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.server.anthropic.events import MessageEvents
from penstock.server.bodies import converted
from penstock.server.calls import Call, Generation
from penstock.server.models import Model
from penstock.server.protocol.anthropic import MessagesRequest
from penstock.server.protocol.openai_responses import ResponsesRequest
from penstock.server.responses.events import ResponseEvents
from penstock.server.responses.output import Answer
from support.api.engines import make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.server.events import Events


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


def chunk(content: str, *calls: penstock.ToolCallDelta) -> penstock.Chunk:
    empty: dict[str, Any] = dict.fromkeys(
        ("logprobs", "top_logprobs", "finish_reason", "stop_reason", "logits", "hidden_states", "embeddings")
    )
    return penstock.Chunk(
        text="", token_ids=(), index=0, content=content, reasoning="", tool_calls=calls, **empty
    )


def delta(index: int, arguments: str, call_id: str | None = None) -> penstock.ToolCallDelta:
    name = None if call_id is None else "weather"
    return penstock.ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments)


def events_of(engine: penstock.Engine, api: str) -> Events:
    generation = Generation(
        "x", Model("tiny", engine), "tiny", Call([[1]], penstock.SamplingParams()), b"", "prompt"
    )
    if api == "messages":
        fields = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        return MessageEvents(generation, converted(fields, MessagesRequest))
    request = converted({"input": "a"}, ResponsesRequest)
    answer = Answer(generation, request, is_stored=False)
    return ResponseEvents(answer, engine, lambda _status, _body: None, lambda _size: None)


@pytest.mark.parametrize(
    ("api", "index", "text"),
    [("messages", "index", ("partial_json", "text")), ("responses", "output_index", ("delta", "delta"))],
)
def test_text_and_calls_of_one_chunk_keep_their_places(
    engine: penstock.Engine, api: str, index: str, text: tuple[str, str]
) -> None:
    events = events_of(engine, api)
    chunks = [
        chunk("", delta(0, '{"x"', "a")),
        chunk("So.", delta(0, ": 1}"), delta(1, "{", "b"), delta(1, "}")),
    ]
    with engine.blocking.stream([1], max_tokens=1) as request:
        given: Any = request
        found = b"".join(events.of(each, 0, given) for each in chunks).decode()
    places: dict[int, str] = {}
    for part in found.split("\n\n")[:-1]:
        event = json.loads(part.partition("data: ")[2])
        if event["type"].endswith("delta"):
            value = event["delta"] if isinstance(event["delta"], dict) else event
            places[event[index]] = places.get(event[index], "") + next(
                value[name] for name in text if name in value
            )
    assert places == {0: '{"x": 1}', 1: "So.", 2: "{}"}
