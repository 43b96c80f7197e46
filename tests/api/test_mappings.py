"""Mappings of any type are accepted wherever a dict is."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.engines import SHORT, make_engine

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather", "parameters": SCHEMA}
FIELDS: dict[str, Any] = {
    "logit_bias": {3: -1.5, 5: 2.0},
    "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
}
TYPES: list[Callable[[dict[Any, Any]], Mapping[Any, Any]]] = [UserDict, MappingProxyType]


def convert(value: object, mapping: Callable[[dict[Any, Any]], Mapping[Any, Any]]) -> Any:
    """A value with all its dicts replaced."""
    if isinstance(value, dict):
        return mapping({key: convert(item, mapping) for key, item in value.items()})
    if isinstance(value, list):
        return [convert(item, mapping) for item in value]
    return value


@pytest.mark.parametrize("mapping", TYPES)
@pytest.mark.parametrize("field", FIELDS)
def test_field_accepts_any_mapping(field: str, mapping: Any) -> None:
    others = {"tools": FIELDS["tools"]} if field == "tool_choice" else {}
    expected = penstock.SamplingParams(**others, **{field: FIELDS[field]})
    params = penstock.SamplingParams(**others, **{field: convert(FIELDS[field], mapping)})
    assert params == expected
    assert getattr(params, field) == getattr(expected, field)


@pytest.mark.parametrize("mapping", TYPES)
def test_messages_can_be_any_mapping(tiny_model: Path, mapping: Any) -> None:
    messages = [{"role": "user", "content": "Where is it sunny?"}]
    with make_engine(tiny_model) as engine:
        expected = engine.apply_chat_template(messages)
        assert engine.apply_chat_template(convert(messages, mapping)) == expected
        result = engine.blocking.generate(convert(messages, mapping), SHORT, seed=1)
        assert result.token_ids == engine.blocking.generate(messages, SHORT, seed=1).token_ids


class Endless(Mapping[str, object]):
    """A mapping with many keys, which fails when its keys are iterated."""

    def __getitem__(self, key: str) -> object:
        if key == "type":
            return "text"
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        message = "the keys are not read"
        raise AssertionError(message)

    def __len__(self) -> int:
        return 65


def test_mapping_with_too_many_keys_is_refused_unread() -> None:
    with pytest.raises(
        penstock.InvalidRequestError, match="it must be a mapping of at most 64 keys"
    ) as raised:
        penstock.SamplingParams(response_format=Endless())
    assert raised.value.field == "response_format"
    many = {"type": "text", **{f"key{number}": 1 for number in range(63)}}
    with pytest.raises(penstock.InvalidRequestError, match="the known keys are 'type'"):
        penstock.SamplingParams(response_format=many)


def test_error_of_an_object_with_a_schema_has_the_form() -> None:
    for_llama = {"type": "json_object", "schema": {"type": "object"}}
    with pytest.raises(penstock.InvalidRequestError) as raised:
        penstock.SamplingParams(response_format=for_llama)
    assert raised.value.limit == (
        "the schema itself, or {'type': 'json_schema', 'json_schema': {'schema': ...}}"
    )
