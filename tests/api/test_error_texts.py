"""Errors about values that have no text, or none that Python makes, and about arguments of the wrong type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock._shown import shown
from support.api.engines import make_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Hostile:
    """A value without a text."""

    def __repr__(self) -> str:
        raise RuntimeError


VALUES = [10**5000, [10**5000], Hostile()]
IDS = ["digits", "digits in a list", "value"]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_adapters=1) as engine:
        yield engine


@pytest.mark.parametrize("value", VALUES, ids=IDS)
def test_value_without_a_text_is_shown_by_its_type(value: object) -> None:
    assert shown(value).startswith(("a value of the type", "<Hostile instance"))
    for kind in (penstock.ConfigError, penstock.InvalidRequestError):
        error = kind("message", "field", value, "limit")
        assert repr(error) == f"{kind.__name__}('message', 'field', {shown(value)}, 'limit')"


@pytest.mark.parametrize("value", VALUES, ids=IDS)
def test_message_without_a_text_fails_alone(engine: penstock.Engine, value: object) -> None:
    bad: Any = [{"role": "user", "content": value}]
    items = engine.blocking.generate_many(["good", bad, "good"], max_tokens=1)
    errors = {item.index: type(item.error) for item in items}
    assert errors == {0: type(None), 1: penstock.InvalidRequestError, 2: type(None)}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("dimensions", lambda engine, value: engine.blocking.embed("a", dimensions=value)),
        ("pooling", lambda engine, value: engine.blocking.embed("a", pooling=value)),
        ("normalize", lambda engine, value: engine.blocking.embed("a", normalize=value)),
        ("name", lambda engine, value: engine.blocking.load_adapter(value, "path")),
        ("path", lambda engine, value: engine.blocking.load_adapter("name", value)),
        ("name", lambda engine, value: engine.blocking.unload_adapter(value)),
        ("force", lambda engine, value: engine.blocking.unload_adapter("name", force=value)),
        ("add_special_tokens", lambda engine, value: engine.encode("a", add_special_tokens=value)),
        ("skip_special_tokens", lambda engine, value: engine.decode([1], skip_special_tokens=value)),
    ],
)
def test_argument_of_the_wrong_type_is_named(
    engine: penstock.Engine, name: str, call: Callable[[penstock.Engine, Any], object]
) -> None:
    for value in (1.5, Hostile(), 10**5000):
        with pytest.raises(penstock.InvalidRequestError, match=f"^{name}=") as error:
            call(engine, value)
        assert error.value.field == name


def test_adapter_name_with_a_lone_surrogate_is_refused(engine: penstock.Engine) -> None:
    for use in (lambda name: engine.blocking.load_adapter(name, "p"), engine.blocking.unload_adapter):
        with pytest.raises(penstock.InvalidRequestError, match=r"^name='\\ud800' is not allowed"):
            use("\ud800")
