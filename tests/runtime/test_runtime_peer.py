"""The answers of AIBrix's released runtime, which are stored, have their fields and values here, too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.runtime.peer import ANSWERS, EXCHANGES, answers_of
from support.runtime.runtime import TOKEN, FakeEngine, runtime_of

if TYPE_CHECKING:
    from collections.abc import Mapping

RELEASED: dict[str, Any] = json.loads(ANSWERS.read_text())
#: Status codes that differ: two fields have defaults, and a body needs a content type.
STATUSES = {"list without a folder": 200, "load without a body": 415, "sleep without a level": 404}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Those of this runtime."""
    folder = tmp_path_factory.mktemp("models")
    with runtime_of(FakeEngine(), model_dir=str(folder), tokens=(TOKEN,)) as runtime:
        return answers_of(runtime, runtime.engine, folder)


def test_released_answers_are_those_of_all_exchanges() -> None:
    assert RELEASED.keys() == EXCHANGES.keys()
    assert STATUSES.keys() <= EXCHANGES.keys()


@pytest.mark.parametrize("name", EXCHANGES)
def test_answer_has_the_fields_of_the_released_one(name: str, answers: Mapping[str, Any]) -> None:
    own, released = answers[name], RELEASED[name]
    if name in STATUSES:
        assert own["status"] == STATUSES[name] != released["status"]
        return
    assert own["status"] == released["status"]
    if not isinstance(released["body"], dict):
        assert own["body"] == released["body"]
        return
    # The texts of errors are of their own.
    texts = {"message", "detail"} if released["status"] >= 400 else set()
    for field, value in released["body"].items():
        found = own["body"][field]
        assert type(found) is type(value) if field in texts else found == value, field
