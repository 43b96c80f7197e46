"""The engine gives the recorded tokens and bits of logprobs; `make same-bits` records them.

`support.api.recorded_bits` has the requests. If `test_checkpoints_are_the_recorded_ones` fails, too, the
weights have changed, and not the engine.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from support.api import recorded_bits
from support.api.recorded_bits import COMMAND, INSTRUCTION_SETS, SETTINGS, Record
from support.marks import rare_except

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    return recorded_bits.write_models(folder)


@pytest.fixture(scope="module")
def record() -> Record:
    return Record.read()


def assert_none(differences: list[str]) -> None:
    assert not differences, "\n".join([*differences, f"if this is meant, {COMMAND}"])


def test_results_are_those_of_these_requests(record: Record) -> None:
    assert sum(recorded_bits.count_kinds().values()) == 200
    assert record.made_by == recorded_bits.made_by(), COMMAND


def test_checkpoints_are_the_recorded_ones(record: Record, models: dict[str, Path]) -> None:
    found = {name: recorded_bits.digest_of_model(path) for name, path in models.items()}
    assert found == record.models, f"numpy or the C library gives other weights: {COMMAND}"


def test_each_instruction_set_here_has_results(record: Record, models: dict[str, Path]) -> None:
    available = recorded_bits.available_sets(models["llama-float32"])
    assert "portable" in available
    assert set(available) <= set(record.instruction_sets), f"this CPU has others: {COMMAND}"


@pytest.mark.parametrize("name", SETTINGS)
def test_results_have_the_recorded_bits(name: str, record: Record, models: dict[str, Path]) -> None:
    isa, found = recorded_bits.compute(name, models)
    assert isa in record.instruction_sets, f"{isa} has no results: {COMMAND}"
    assert_none(record.differences(isa, name, found))


def test_requests_use_the_parts_that_they_are_for(models: dict[str, Path]) -> None:
    reached: Counter[str] = Counter()
    for name in ("llama-float32", "drafts", "adapters", "recomputed", "swapped"):
        recorded_bits.compute(name, models, reached)
    assert {name for name in recorded_bits.STATISTICS if not reached[name]} == set()


@pytest.mark.parametrize("isa", rare_except(INSTRUCTION_SETS))
def test_other_instruction_sets_have_the_recorded_bits(
    isa: str, record: Record, folder: Path, models: dict[str, Path]
) -> None:
    if isa not in recorded_bits.available_sets(models["llama-float32"]):
        pytest.skip(f"this CPU has no {isa}")
    found = recorded_bits.compute_in_process(isa, folder)
    assert_none([text for name in SETTINGS for text in record.differences(isa, name, found[name])])


def test_each_changed_result_is_named(record: Record) -> None:
    isa = record.instruction_sets[0]
    found = record.results(isa)["awq"]
    content = json.loads(recorded_bits.FILE.read_text())
    changed = ["1 2 length 0000", f"{found[1]}0", *found[2:]]
    content["instruction_sets"][isa]["awq"] = {str(index): entry for index, entry in enumerate(changed)}
    first, second = Record(content).differences(isa, "awq", found)
    assert (first.count("other tokens"), second.count("the same tokens")) == (1, 1)
    assert COMMAND in Record(content).differences(isa, "awq", found[1:])[0]
