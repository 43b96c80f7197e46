"""Names of other engines, and former names of Penstock, raise an error that gives the right one."""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import _attributes, _keywords
from penstock._options import EngineOptions, SamplingOptions
from support.api.engines import LONG, PROMPT, SHORT, make_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ENGINE_FIELDS = EngineOptions.__annotations__
REQUEST_FIELDS = SamplingOptions.__annotations__


SUBMODULES = ("chat", "cli")


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture
def request_(engine: penstock.Engine) -> Iterator[penstock.BlockingRequest]:
    with engine.blocking.stream(PROMPT, LONG) as request:
        yield request


@pytest.mark.parametrize("keyword", [*_keywords.ENGINE_SYNONYMS, *_keywords.ENGINE_HINTS])
def test_synonym_of_engine_option_names_the_option(keyword: str) -> None:
    synonym = _keywords.ENGINE_SYNONYMS.get(keyword)
    hint = f"did you mean {synonym}?" if synonym else _keywords.ENGINE_HINTS[keyword]
    options: dict[str, Any] = {keyword: 1}
    for make in (penstock.EngineConfig, partial(penstock.Engine, "model")):
        with pytest.raises(TypeError, match=re.escape(f"Engine has no keyword {keyword!r}: {hint}")):
            make(**options)


@pytest.mark.parametrize("keyword", [*_keywords.REQUEST_SYNONYMS, *_keywords.REQUEST_HINTS])
def test_synonym_of_request_parameter_names_the_parameter(keyword: str) -> None:
    synonym = _keywords.REQUEST_SYNONYMS.get(keyword)
    hint = f"did you mean {synonym}?" if synonym else _keywords.REQUEST_HINTS[keyword]
    with pytest.raises(TypeError, match=re.escape(f"a request has no keyword {keyword!r}: {hint}")):
        penstock.SamplingParams(**{keyword: 1})  # type: ignore[arg-type]


def test_synonyms_are_no_fields_and_stand_for_fields() -> None:
    for synonyms, hints, fields in (
        (_keywords.ENGINE_SYNONYMS, _keywords.ENGINE_HINTS, ENGINE_FIELDS),
        (_keywords.REQUEST_SYNONYMS, _keywords.REQUEST_HINTS, REQUEST_FIELDS),
    ):
        assert set(synonyms.values()) <= fields.keys()
        assert not (synonyms.keys() | hints.keys()) & (ENGINE_FIELDS.keys() | REQUEST_FIELDS.keys())
        assert not synonyms.keys() & hints.keys()


def test_option_of_the_other_kind_says_where_it_belongs() -> None:
    with pytest.raises(TypeError, match="'threads': it is an option of Engine"):
        penstock.SamplingParams(threads=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'seed': it is a parameter of requests"):
        penstock.EngineConfig(seed=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", [name for name in _attributes.MODULE_HINTS if name not in SUBMODULES])
def test_unknown_module_attribute_gets_a_hint(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"{name!r}; {_attributes.MODULE_HINTS[name]}")):
        getattr(penstock, name)


@pytest.mark.parametrize("name", [name for name in _attributes.MODULE_HINTS if name not in SUBMODULES])
def test_import_of_unknown_name_gets_a_hint(name: str) -> None:
    with pytest.raises(ImportError, match=re.escape(f"{name!r}; {_attributes.MODULE_HINTS[name]}")):
        exec(f"from penstock import {name}")  # noqa: S102
    assert not hasattr(penstock, name)


@pytest.mark.parametrize("cls", [penstock.Engine, penstock.Tokenizer])
def test_constructor_of_transformers_names_the_constructor(cls: Any) -> None:
    expected = f"class {cls.__name__!r} has no attribute 'from_pretrained'; use {cls.__name__}(model)"
    with pytest.raises(AttributeError, match=re.escape(expected)):
        cls.from_pretrained("model")
    assert not hasattr(cls, "xyzzy")


def test_import_of_unknown_name_without_hint_is_pythons_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'xyzzy'"):
        from penstock import xyzzy  # type: ignore[attr-defined] # noqa: F401


@pytest.mark.parametrize("use", [iter, lambda stream: ExitStack().enter_context(stream)])
def test_stream_used_without_async_names_the_blocking_one(use: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"`with engine\.blocking\.stream\(\.\.\.\)`"):
        use(penstock.Engine("model").stream(PROMPT))


@pytest.mark.parametrize("name", SUBMODULES)
def test_submodule_that_is_not_imported_gets_a_hint(name: str) -> None:
    hint = _attributes.MODULE_HINTS[name]
    with pytest.raises(AttributeError, match=re.escape(f"{name!r}; {hint}")):
        penstock.__getattr__(name)  # called directly: other tests have imported the submodules


@pytest.mark.parametrize("name", _attributes.ENGINE_HINTS)
def test_unknown_engine_attribute_gets_a_hint(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"{name!r}; {_attributes.ENGINE_HINTS[name]}")):
        getattr(penstock.Engine("model"), name)


@pytest.mark.parametrize("name", _attributes.BLOCKING_HINTS)
def test_unknown_blocking_attribute_gets_a_hint(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"{name!r}; {_attributes.BLOCKING_HINTS[name]}")):
        getattr(penstock.Engine("model").blocking, name)


@pytest.mark.parametrize("name", _attributes.REQUEST_HINTS)
def test_unknown_request_attribute_gets_a_hint(name: str, request_: penstock.BlockingRequest) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"{name!r}; {_attributes.REQUEST_HINTS[name]}")):
        getattr(request_, name)


@pytest.mark.parametrize("name", _attributes.FIELD_HINTS)
def test_unknown_field_of_value_object_gets_a_hint(
    name: str, request_: penstock.BlockingRequest, engine: penstock.Engine
) -> None:
    result = engine.blocking.generate(PROMPT, SHORT)
    values = (result, result.usage, result.choices[0], next(request_), engine.config, request_.params)
    [value] = [value for value in values if type(value).__name__ == name]
    for field, hint in _attributes.FIELD_HINTS[name].items():
        with pytest.raises(AttributeError, match=re.escape(f"{field!r}; {hint}")):
            getattr(value, field)
        for meant in re.findall(r"^use (\w+)$", hint):
            assert hasattr(value, meant)
    with pytest.raises(AttributeError, match=f"^{name!r} object has no attribute 'xyzzy'$"):
        value.xyzzy  # type: ignore[union-attr] # noqa: B018


def test_attribute_hints_name_existing_attributes() -> None:
    tables = (
        (penstock, _attributes.MODULE_HINTS),
        (penstock.Engine, _attributes.ENGINE_HINTS),
        (penstock.Blocking, _attributes.BLOCKING_HINTS),
        (penstock.Request, _attributes.REQUEST_HINTS),
    )
    for owner, hints in tables:
        for hint in hints.values():
            for name in re.findall(r"(?:use|and|,|or) (\w+)\(\)", hint):
                assert hasattr(owner, name), hint
            if owner is penstock and (match := re.match(r"use (\w+)", hint)):
                assert match[1] in penstock.__all__, hint


def test_unknown_attribute_without_hint_gets_python_suggestion() -> None:
    with pytest.raises(AttributeError, match=r"^'Engine' object has no attribute 'generat'$") as caught:
        penstock.Engine("model").generat  # type: ignore[attr-defined] # noqa: B018
    assert caught.value.name == "generat"
    assert isinstance(caught.value.obj, penstock.Engine)
    assert not hasattr(penstock, "__wrapped__")
