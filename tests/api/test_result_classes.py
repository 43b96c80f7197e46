"""Results that tests of other programs construct with few fields."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

import penstock
from penstock import Choice, Chunk, Result, Timings, Usage


def test_result_of_a_text_has_one_choice_with_defaults() -> None:
    result = Result(text="Hello")
    assert (result.text, result.content, result.finish_reason) == ("Hello", "Hello", "stop")
    assert (result.token_ids, result.tool_calls, result.logprobs, result.parsed) == ((), (), None, None)
    assert (result.usage, result.timings) == (Usage(), Timings())
    assert result == Result(choices=[Choice(text="Hello")])
    assert result.usage.total_tokens == 0


def test_fields_of_the_choice_and_of_the_result_are_kept() -> None:
    call = penstock.ToolCall(id="1", name="get_weather", arguments="{}")
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    result = Result(content="", tool_calls=[call], finish_reason="tool_calls", usage=usage)
    assert (result.text, result.content, result.tool_calls) == ("", "", (call,))
    assert (result.finish_reason, result.usage.total_tokens) == ("tool_calls", 5)


def test_several_choices_are_given_as_such() -> None:
    result = Result(choices=[Choice(text="a"), Choice(index=1, text="b", finish_reason="length")])
    assert [(choice.index, choice.text) for choice in result.choices] == [(0, "a"), (1, "b")]
    assert result.text == "a"


def test_chunk_of_a_text_has_defaults() -> None:
    chunk = Chunk(text="Hel")
    assert (chunk.content, chunk.index, chunk.finish_reason, chunk.token_ids) == ("Hel", 0, None, ())
    assert Chunk(text="lo", finish_reason="stop").finish_reason == "stop"


@pytest.mark.parametrize("value", [Result(text="a"), Choice(text="a"), Chunk(text="a"), Usage(), Timings()])
def test_repr_and_pickle_give_an_equal_value(value: object) -> None:
    assert eval(repr(value), vars(penstock)) == value  # noqa: S307 - our own text
    assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301


@pytest.mark.parametrize(
    ("cls", "fields"),
    [(Result, {"text": "a", "choices": []}), (Result, {"body": "a"}), (Choice, {"body": 1})],
)
def test_unknown_and_superfluous_fields_are_errors(cls: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        cls(**fields)


@pytest.mark.parametrize("cls", [Result, Choice, Chunk, Usage, Timings])
def test_signature_has_a_default_for_each_field(cls: type) -> None:
    parameters = inspect.signature(cls).parameters.values()
    assert all(parameter.default is not parameter.empty for parameter in parameters)
