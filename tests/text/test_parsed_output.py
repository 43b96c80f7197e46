"""Parsed chat output: content, reasoning and tool calls, in results and in chunks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import penstock
from support.api.engines import make_engine
from support.server.scripted import (
    DRAWN,
    MESSAGES,
    TOOLS,
    Script,
    find_script,
    showing_tools,
    write_tokenizer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

pytestmark = pytest.mark.anyio

THINKING = ["<think>", "Let me ", "see.", "</think>", "\n\n"]
CALLING = [
    "<tool_call>",
    '\n{"name": "wea',
    'ther", ',
    '"arguments": ',
    '{"city": "B',
    'ern"}',
    "}\n",
    "</tool_call>",
]
TAGS = {"<think>", "</think>", "<tool_call>", "</tool_call>"}


@pytest.fixture(scope="module")
def tiny_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with a chat template that renders tools."""
    return showing_tools(tiny_model, tmp_path_factory.mktemp("showing") / "model")


@pytest.fixture(scope="module")
def script(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Script:
    return find_script(tiny_model, tmp_path_factory.mktemp("script") / "tokenizer.json")


@pytest.fixture
def model_saying(script: Script, tiny_model: Path, tmp_path: Path) -> Callable[..., penstock.Engine]:
    """Engines whose model answers `MESSAGES` with the given pieces, one token each."""

    def make(pieces: Sequence[str], special: Collection[str] = (), **options: object) -> penstock.Engine:
        texts = dict(zip(script.token_ids, pieces, strict=False))
        tokenizer = write_tokenizer(tmp_path / "tokenizer.json", 512, texts, special)
        options = {"tool_parser": "hermes", "reasoning_parser": "think", **options}
        return make_engine(tiny_model, tokenizer=tokenizer, **options)

    return make


@pytest.fixture
def params(script: Script) -> Callable[[Sequence[str]], penstock.SamplingParams]:
    """Parameters that generate exactly these pieces."""
    return lambda pieces: DRAWN.replace(seed=script.seed, max_tokens=len(pieces))


async def test_reasoning_and_tool_calls_are_separated_from_content(
    model_saying: Callable[..., penstock.Engine], params: Callable[..., penstock.SamplingParams]
) -> None:
    pieces = [*THINKING, "I ", "ask.", *CALLING]
    async with model_saying(pieces) as engine:
        request = await engine.start_request(MESSAGES, params(pieces))
        chunks = [chunk async for chunk in request]
        result = await request.result()
    assert result.text == "".join(pieces)
    assert (result.reasoning, result.content) == ("Let me see.", "I ask.")
    (call,) = result.tool_calls
    assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')
    assert re.fullmatch("call_[0-9a-f]{24}", call.id)
    assert result.finish_reason == "length"
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert "".join(chunk.content for chunk in chunks) == result.content
    assert "".join(chunk.reasoning for chunk in chunks) == result.reasoning
    assert joined(chunks) == [call]


def joined(chunks: Sequence[penstock.Chunk]) -> list[penstock.ToolCall]:
    """The tool calls joined from the deltas in chunks; the first delta of each has the id and the name."""
    calls: list[penstock.ToolCall] = []
    for delta in (delta for chunk in chunks for delta in chunk.tool_calls):
        if delta.index == len(calls):
            assert delta.id is not None
            assert delta.name is not None
            calls.append(penstock.ToolCall(id=delta.id, name=delta.name, arguments=""))
        else:
            assert (delta.id, delta.name) == (None, None)
        call = calls[delta.index]
        calls[delta.index] = penstock.ToolCall(
            id=call.id, name=call.name, arguments=call.arguments + delta.arguments
        )
    return calls


async def test_tool_call_arguments_are_streamed(
    model_saying: Callable[..., penstock.Engine], params: Callable[..., penstock.SamplingParams]
) -> None:
    pieces = [*CALLING, "\n", '<tool_call>\n{"name": "other", "arguments"', ": {}}\n</tool_call> "]
    async with model_saying(pieces) as engine:
        request = await engine.start_request(MESSAGES, params(pieces))
        chunks = [chunk async for chunk in request]
        first, second = (await request.result()).tool_calls
    assert joined(chunks) == [first, second]
    assert (second.name, second.arguments) == ("other", "{}")
    assert first.id != second.id


async def test_complete_call_at_the_end_is_the_finish_reason(
    script: Script,
    model_saying: Callable[..., penstock.Engine],
    params: Callable[..., penstock.SamplingParams],
) -> None:
    pieces = ["Well:", *CALLING]
    end = script.token_ids[len(pieces)]
    cut = script.token_ids[6]
    async with model_saying(pieces) as engine:
        request = await engine.start_request(
            MESSAGES, params(pieces), max_tokens=len(pieces) + 1, stop_token_ids=[end]
        )
        chunks = [chunk async for chunk in request]
        result = await request.result()
        partial = await engine.generate(MESSAGES, params(pieces), stop_token_ids=[cut])
    assert (result.finish_reason, result.stop_reason) == ("tool_calls", end)
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("tool_calls", end)
    assert request.finish_reason == "tool_calls"
    assert (len(partial.tool_calls), partial.finish_reason) == (1, "stop")


async def test_text_after_the_only_allowed_call_is_content(
    model_saying: Callable[..., penstock.Engine], params: Callable[..., penstock.SamplingParams]
) -> None:
    second = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    pieces = [*CALLING, "\n", second, "."]
    async with model_saying(pieces) as engine:
        result = await engine.generate(MESSAGES, params(pieces).replace(parallel_tool_calls=False))
    assert [call.name for call in result.tool_calls] == ["weather"]
    assert result.content == second + "."


async def test_skipped_special_tokens_around_calls_are_parsed(
    model_saying: Callable[..., penstock.Engine], params: Callable[..., penstock.SamplingParams]
) -> None:
    pieces = [*THINKING, "I ", "<|other|>", "ask.", *CALLING]
    async with model_saying(pieces, special={*TAGS, "<|other|>"}) as engine:
        result = await engine.generate(MESSAGES, params(pieces))
        shown = await engine.generate(MESSAGES, params(pieces), skip_special_tokens=False)
        stopped = await engine.generate(MESSAGES, params(pieces), stop="</tool_call>")
        untold = await engine.generate(MESSAGES, params(pieces).replace(tool_choice="none"))
    plain = [piece for piece in pieces if piece not in {*TAGS, "<|other|>"}]
    assert result.text == "".join(plain)
    assert (result.reasoning, result.content) == ("Let me see.", "I ask.")
    assert [call.arguments for call in result.tool_calls] == ['{"city": "Bern"}']
    assert shown.text == "".join(pieces)
    assert (shown.reasoning, shown.content) == ("Let me see.", "I <|other|>ask.")
    assert (stopped.finish_reason, stopped.stop_reason) == ("tool_calls", "</tool_call>")
    assert stopped.text == result.text
    assert [call.name for call in stopped.tool_calls] == ["weather"]
    assert untold.reasoning == "Let me see."
    assert untold.tool_calls == ()
    assert untold.content == "I ask." + "".join(plain[plain.index("ask.") + 1 :])


async def test_raw_argument_values_have_the_types_of_the_schema(
    model_saying: Callable[..., penstock.Engine], params: Callable[..., penstock.SamplingParams]
) -> None:
    pieces = [
        *THINKING,
        "<tool_call>\n<function=",
        "weather>\n<parameter=city>\n",
        "12\n</para",
        "meter>\n<parameter=days>\n3",
        "\n</parameter>\n</function>\n</tool_call>",
    ]
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    async with model_saying(pieces, tool_parser="qwen3_coder") as engine:
        assert engine.config.tool_parser == "qwen_xml"
        request = await engine.start_request(MESSAGES, params(pieces).replace(tools=tools))
        chunks = [chunk async for chunk in request]
        result = await request.result()
    (call,) = result.tool_calls
    assert (call.name, call.arguments) == ("weather", '{"city":"12","days":3}')
    assert joined(chunks) == [call]
    assert (result.reasoning, result.content) == ("Let me see.", "")


async def test_ids_of_calls_are_those_that_the_model_writes(
    model_saying: Callable[..., penstock.Engine], params: Callable[..., penstock.SamplingParams]
) -> None:
    section, begin, argument = (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
    )
    end, section_end = "<|tool_call_end|>", "<|tool_calls_section_end|>"
    pieces = ["<think>", "Hm.", section, begin, "functions.weather:0", argument, '{"city": "B"}', end]
    pieces.append(section_end)
    special = {section, begin, argument, end, section_end}
    async with model_saying(pieces, special=special, tool_parser="kimi_k2") as engine:
        result = await engine.generate(MESSAGES, params(pieces))
        with pytest.raises(penstock.InvalidRequestError, match="cannot be constrained") as raised:
            await engine.generate(MESSAGES, params(pieces), ignore_eos=False, tool_choice="required")
    (call,) = result.tool_calls
    assert (call.id, call.name, call.arguments) == ("functions.weather:0", "weather", '{"city": "B"}')
    assert (result.reasoning, result.content) == ("Hm.", "")
    assert raised.value.field == "tool_choice"


async def test_plain_text_prompt_output_is_not_parsed(
    model_saying: Callable[..., penstock.Engine], params: Callable[..., penstock.SamplingParams]
) -> None:
    pieces = [*THINKING, *CALLING]
    async with model_saying(pieces) as engine:
        prompt = engine.apply_chat_template(MESSAGES, tools=TOOLS)
        text = await engine.generate(prompt, params(pieces).replace(tools=None))
        request = await engine.start_request(prompt, params(pieces).replace(tools=None))
        chunks = [chunk async for chunk in request]
    assert text.text == text.content == "".join(pieces)
    assert (text.reasoning, text.tool_calls) == ("", ())
    assert all(chunk.content == chunk.text for chunk in chunks)
    assert all((chunk.reasoning, chunk.tool_calls) == ("", ()) for chunk in chunks)


async def test_truncated_tool_call_is_returned_partially(
    model_saying: Callable[..., penstock.Engine], params: Callable[..., penstock.SamplingParams]
) -> None:
    pieces = ["Well:", *CALLING]
    async with model_saying(pieces) as engine:
        cut = await engine.generate(MESSAGES, params(pieces), max_tokens=6)
        hidden = await engine.generate(MESSAGES, params(pieces), stop='"city"')
    assert (cut.content, cut.tool_calls[0].arguments) == ("Well:", '{"city": "B')
    assert hidden.text == "".join(pieces).partition('"city"')[0]
    assert hidden.tool_calls[0].arguments == "{"


async def test_parsers_follow_the_configuration(
    model_saying: Callable[..., penstock.Engine], params: Callable[..., penstock.SamplingParams]
) -> None:
    pieces = [*THINKING, *CALLING]
    async with model_saying(pieces, tool_parser="none", reasoning_parser="none") as engine:
        result = await engine.generate(MESSAGES, params(pieces), tool_choice="none")
        assert result.content == result.text
        assert (result.reasoning, result.tool_calls) == ("", ())
    async with model_saying(pieces, reasoning_parser="none") as engine:
        result = await engine.generate(MESSAGES, params(pieces))
        assert (result.reasoning, len(result.tool_calls)) == ("", 1)


async def test_echo_is_not_parsed(
    model_saying: Callable[..., penstock.Engine], params: Callable[..., penstock.SamplingParams]
) -> None:
    pieces = [*THINKING, "Hot."]
    async with model_saying(pieces) as engine:
        result = await engine.generate(MESSAGES, params(pieces), echo=True)
        assert result.text == engine.apply_chat_template(MESSAGES, tools=TOOLS) + "".join(pieces)
        assert (result.reasoning, result.content) == ("Let me see.", "Hot.")
