"""The forms of a prompt: messages as a keyword, and the number of tokens of each form."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.engines import PROMPT, SHORT, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
LARGE = [{"role": "user", "content": "Why?"}] * 700


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, tool_parser="hermes") as engine:
        yield engine


# ---- messages


@pytest.mark.anyio
async def test_messages_are_the_prompt_in_every_call(engine: penstock.Engine) -> None:
    expected = (await engine.generate(CHAT, SHORT)).token_ids
    request = await engine.start_request(messages=CHAT, params=SHORT)
    async with engine.stream(params=SHORT, messages=CHAT) as stream:
        results = [
            await engine.generate(messages=CHAT, params=SHORT),
            await request.result(),
            await stream.result(),
        ]
    async for item in engine.generate_many([{"messages": CHAT}, CHAT], SHORT):
        assert item.result is not None
        results.append(item.result)
    assert [result.token_ids for result in results] == [expected] * 5
    chunks = [item.chunk async for item in engine.stream_many([{"messages": CHAT}], SHORT) if item.chunk]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(expected)


def test_messages_are_the_prompt_without_an_event_loop(engine: penstock.Engine) -> None:
    blocking = engine.blocking
    expected = blocking.generate(CHAT, SHORT).token_ids
    with blocking.stream(messages=CHAT, params=SHORT) as stream:
        results = [
            blocking.generate(messages=CHAT, params=SHORT),
            blocking.start_request(messages=CHAT, params=SHORT).result(),
            stream.result(),
            *(item.result for item in blocking.generate_many([{"messages": CHAT}], SHORT)),
        ]
    assert [result and result.token_ids for result in results] == [expected] * 4
    chunks = [item.chunk for item in blocking.stream_many([{"messages": CHAT}], SHORT) if item.chunk]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(expected)


@pytest.mark.parametrize("method", ["generate_many", "stream_many"])
def test_batch_with_messages_says_where_they_belong(engine: penstock.Engine, method: str) -> None:
    hint = re.escape("a request has no keyword 'messages': of a batch, each prompt can be a list of messages")
    for owner in (engine, engine.blocking):
        for prompts in ((), ([CHAT],)):
            with pytest.raises(TypeError, match=hint):
                getattr(owner, method)(*prompts, messages=CHAT)
        with pytest.raises(penstock.InvalidRequestError, match=r"prompts=None .* an iterable") as raised:
            getattr(owner, method)()
        assert raised.value.field == "prompts"


@pytest.mark.anyio
async def test_many_messages_are_a_prompt_of_their_number(engine: penstock.Engine) -> None:
    with pytest.raises(penstock.InvalidRequestError, match="the prompt has") as raised:
        await engine.generate(messages=LARGE)
    assert raised.value.field == "prompt"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "Why?", "messages": CHAT}, "messages"),
        ({"prompt": CHAT, "messages": CHAT}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Why?"}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"prompt": {"messages": CHAT, "tools": []}}, "prompt"),
        ({}, "prompt"),
    ],
)
def test_two_prompts_or_none_are_refused_by_name(
    engine: penstock.Engine, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(penstock.InvalidRequestError, match=field) as raised:
        engine.blocking.generate(**arguments)
    assert raised.value.field == field


# ---- the number of tokens


def get_weather(city: str) -> str:
    """The weather of a city."""
    return city


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("Why is the sky blue?", {}),
        (PROMPT, {}),
        (CHAT, {}),
        (CHAT, {"add_generation_prompt": False}),
        (
            CHAT,
            {
                "chat_template": "{{ mood }}: {{ messages[0].content }}",
                "chat_template_kwargs": {"mood": "sad"},
            },
        ),
        (CHAT, {"chat_template": "{{ tools }}{{ messages[0].content }}", "tools": [get_weather]}),
    ],
)
def test_count_is_that_of_a_request(engine: penstock.Engine, prompt: Any, options: dict[str, Any]) -> None:
    result = engine.blocking.generate(prompt, SHORT, **options)
    assert engine.count_tokens(prompt, **options) == result.usage.prompt_tokens


def test_tokenizer_counts_without_an_engine(engine: penstock.Engine, tiny_model: Path) -> None:
    tokenizer = penstock.Tokenizer(tiny_model)
    for prompt in ("Why?", PROMPT, CHAT):
        assert tokenizer.count_tokens(prompt) == engine.count_tokens(prompt)


@pytest.mark.parametrize("kind", ["engine", "tokenizer"])
def test_messages_by_name_are_counted(engine: penstock.Engine, tiny_model: Path, kind: str) -> None:
    counted = engine if kind == "engine" else penstock.Tokenizer(tiny_model)
    options: Any = {"add_generation_prompt": False}
    assert counted.count_tokens(messages=CHAT, **options) == counted.count_tokens(CHAT, **options)
    with pytest.raises(penstock.InvalidRequestError, match="left out when there is a prompt") as raised:
        counted.count_tokens("Why?", messages=CHAT)
    assert raised.value.field == "messages"
    with pytest.raises(penstock.InvalidRequestError, match="prompt is missing"):
        counted.count_tokens()


@pytest.mark.parametrize("prompt", [["a", "b"], 7, [CHAT]])
def test_other_objects_cannot_be_counted(engine: penstock.Engine, prompt: Any) -> None:
    with pytest.raises(penstock.InvalidRequestError) as raised:
        engine.count_tokens(prompt)
    assert raised.value.field == "prompt"
