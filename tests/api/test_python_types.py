"""Python types as response formats, their values in results, and functions as tools."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import pytest
from typing_extensions import TypedDict

import penstock
from penstock import SamplingParams
from support.api.engines import make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Person(pydantic.BaseModel):
    """A person."""

    name: Annotated[str, pydantic.Field(max_length=4)]
    age: Annotated[int, pydantic.Field(ge=0, le=9)]


class Point(TypedDict):
    """A point."""

    x: Literal[1, 2]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, tool_parser="hermes") as engine:
        yield engine


# ---- response_format


@pytest.mark.parametrize(
    "kind",
    [
        Person,
        Annotated[list[Person], pydantic.Field(max_length=2)],
        Literal["red", "green"],
        Point,
        Literal[1] | None,
    ],
)
@pytest.mark.anyio
async def test_parsed_is_a_value_of_the_type(engine: penstock.Engine, kind: Any) -> None:
    result = await engine.generate("Answer: ", response_format=kind, max_tokens=200, seed=1, temperature=1.0)
    assert result.finish_reason == "stop"
    adapter = pydantic.TypeAdapter[Any](kind)
    assert result.parsed == adapter.validate_json(result.text)
    request = await engine.start_request("Answer: ", result_params(kind))
    assert (await request.result()).parsed == result.parsed
    async for item in engine.generate_many(["Answer: "], result_params(kind)):
        assert item.result is not None
        assert item.result.parsed == result.parsed


def result_params(kind: Any) -> SamplingParams:
    return SamplingParams(response_format=kind, max_tokens=200, seed=1, temperature=1.0)


def test_best_of_and_replaced_parameters_keep_the_type(engine: penstock.Engine) -> None:
    params = result_params(Person).replace(best_of=2)
    result = engine.blocking.generate("Answer: ", params)
    assert isinstance(result.parsed, Person)
    plain = engine.blocking.generate("Answer: ", params.replace(response_format=Person.model_json_schema()))
    assert (plain.text, plain.parsed) == (result.text, None)
    assert params.response_format == Person.model_json_schema()


def test_incomplete_content_is_an_error_of_pydantic(engine: penstock.Engine) -> None:
    result = engine.blocking.generate("Answer: ", response_format=Person, max_tokens=2)
    assert result.finish_reason == "length"
    with pytest.raises(pydantic.ValidationError):
        _ = result.parsed


@pytest.mark.parametrize("kind", [type(sys), list[type(sys)], lambda: 1, 3])  # type: ignore[misc]
def test_what_is_no_type_of_pydantic_is_refused(kind: Any) -> None:
    with pytest.raises(penstock.InvalidRequestError, match="response_format") as raised:
        SamplingParams(response_format=kind)
    assert raised.value.field == "response_format"


def test_pydantic_is_imported_only_for_types() -> None:
    code = (
        "import penstock, sys\n"
        "def get_weather(city: str) -> str: ...\n"
        "penstock.SamplingParams(tools=[get_weather])\n"
        "assert 'pydantic' not in sys.modules\n"
        "sys.modules['pydantic'] = None\n"
        "try: penstock.SamplingParams(response_format=list[int])\n"
        "except penstock.InvalidRequestError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "needs the package pydantic" in done.stdout


# ---- tools


def get_weather(
    city: str,
    days: Annotated[int | None, "Number of days."] = None,
    unit: Literal["celsius", "fahrenheit"] = "celsius",
    people: list[Person] = [],  # noqa: B006
    *,
    extra: dict[str, float],
) -> str:
    """The weather of a city."""
    return f"{city} {days} {unit} {people} {extra}"


def test_function_is_the_tool_of_its_signature() -> None:
    [tool] = SamplingParams(tools=[get_weather]).tools or []
    function = tool["function"]
    assert (tool["type"], function["name"]) == ("function", "get_weather")
    assert function["description"] == "The weather of a city."
    parameters = function["parameters"]
    assert parameters["required"] == ["city", "extra"]
    assert parameters["additionalProperties"] is False
    expected = {
        "city": {"type": "string"},
        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "Number of days."},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "people": {"type": "array", "items": Person.model_json_schema()},
        "extra": {"type": "object", "additionalProperties": {"type": "number"}},
    }
    assert parameters["properties"] == expected


def test_functions_and_mappings_can_be_mixed() -> None:
    mapping = {"type": "function", "function": {"name": "get_time"}}
    tools = SamplingParams(tools=[mapping, get_weather]).tools or []
    assert [tool["function"]["name"] for tool in tools] == ["get_time", "get_weather"]
    assert tools[0] == mapping


def test_required_call_of_a_function_has_valid_arguments(engine: penstock.Engine) -> None:
    def set_mode(mode: Literal["on", "off"]) -> None:
        """Set the mode."""

    template = "{{ tools }}{{ messages[0].content }}"
    result = engine.blocking.generate(
        messages=[{"role": "user", "content": "Hi"}],
        chat_template=template,
        tools=[set_mode],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    assert [call.name for call in result.tool_calls] == ["set_mode"]
    assert json.loads(result.tool_calls[0].arguments)["mode"] in ("on", "off")


def no_annotation(city) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001
def variadic(*cities: str) -> None: ...
def keywords(**cities: str) -> None: ...
def positional(city: str, /) -> None: ...
def no_schema(cities: set[str]) -> None: ...
def integer_keys(cities: dict[int, str]) -> None: ...
def unknown(city: Unknown) -> None: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        (no_annotation, "'city' has no annotation"),
        (variadic, "'cities' is variadic positional"),
        (keywords, "'cities' is variadic keyword"),
        (positional, "'city' is positional-only"),
        (no_schema, r"'cities' has the type set\[str\]"),
        (integer_keys, r"'cities' has the type dict\[int, str\]"),
        (unknown, "name 'Unknown' is not defined"),
        (Person, "not a function"),
        (lambda: None, "not a function with a name"),
    ],
)
def test_function_without_a_schema_is_refused_with_the_reason(tool: Any, reason: str) -> None:
    with pytest.raises(penstock.InvalidRequestError, match=reason) as raised:
        SamplingParams(tools=[tool])
    assert raised.value.field == "tools"
