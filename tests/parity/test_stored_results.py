"""Stored results of the oracle: their origin, their size, and what happens when they do not fit."""

from __future__ import annotations

import ast
import functools
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.api.checkpoints import make_config, write_checkpoint
from support.api.running import compute_logits, random_prompt
from support.parity import stored
from support.parity.compare import Greedy, Logits, assert_close, assert_greedy
from support.parity.oracle import import_torch, load_oracle
from support.parity.stored import Mode, Store
from support.paths import TESTS

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

FILES = sorted(stored.FOLDER.glob("*.npz"))
FILE = stored.FOLDER / "test_parity_transformers.npz"
RESULTS: dict[str, dict[str, Any]] = {
    "aa": {"ids": [1, 2], "logits": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "peak": 1.0},
    "bb": {"text": "日本", "codes": np.arange(9, dtype=np.int32), "none": None, "rows": [["a", [1, 2]], 3]},
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of copies of the files, which replaces that of the run."""
    shutil.copytree(stored.FOLDER, tmp_path / "stored")
    copy = Store(Mode.STORED, tmp_path / "stored")
    copy.begin(FILE.stem)
    monkeypatch.setattr(stored, "STORE", copy)
    return copy


def change_values(store: Store, name: str, index: Any, difference: float) -> None:
    """Change a value of each result that has an array with this name."""
    results, source = stored.read_file(FILE)
    for result in results.values():
        if name in result:
            result[name] = result[name].copy()
            result[name][index] += difference
    stored.write_file(store.folder / FILE.name, results, source)


def check(checkpoint: Path) -> None:
    """A part of a test of that file."""
    oracle = load_oracle(checkpoint)
    prompt, _ = oracle.find_greedy(functools.partial(random_prompt, 150), 64)
    assert_close(compute_logits(checkpoint, prompt, threads=1), oracle.logits(prompt))


@pytest.mark.needs("sources")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_are_of_the_pinned_versions_and_this_script(file: Path) -> None:
    assert stored.stale(file, stored.pinned()) == []


@pytest.mark.needs("sources")
@pytest.mark.parametrize("name", [*stored.LIBRARIES, "script"])
def test_other_version_or_script_names_the_command(name: str) -> None:
    [message] = stored.stale(FILE, {**stored.pinned(), name: "another"})
    assert f"{name} is " in message
    assert message.endswith("expected another: run `make oracle` and commit tests/data/oracle")


def test_changed_module_changes_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "parity"
    shutil.copytree(TESTS / "support" / "parity", folder)
    monkeypatch.setattr(stored, "__file__", str(folder / "stored.py"))
    before = stored.script_hash()
    for name in stored.MODULES:
        with (folder / name).open("a") as module:
            module.write("#\n")
        assert before != (before := stored.script_hash()), name


def test_each_file_of_results_belongs_to_a_file_of_tests() -> None:
    tests = {path.stem for path in TESTS.glob("*/test_*.py") if "mark.oracle" in path.read_text()}
    assert {file.stem for file in FILES} == tests - {"test_stored_results"}
    assert sum(file.stat().st_size for file in FILES) <= stored.MAX_BYTES


@pytest.mark.needs("hooks")
def test_stored_results_are_those_of_the_engine(store: Store, tmp_path: Path) -> None:
    del store
    check(write_checkpoint(tmp_path / "model", make_config("llama")))


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("name", ["rows", "sums"])
def test_changed_stored_value_is_a_difference(name: str, store: Store, tmp_path: Path) -> None:
    change_values(store, name, (-1, 0), 0.01)
    with pytest.raises(AssertionError, match=r"position \d+, .*: off by 1\.\d+e-02"):
        check(write_checkpoint(tmp_path / "model", make_config("llama")))


@pytest.mark.needs("hooks")
def test_missing_result_names_the_command(store: Store, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", make_config("llama"), seed=99)
    message = r"test_parity_transformers\.npz has no stored result of 'greedy' .*: run `make oracle`"
    with pytest.raises(pytest.fail.Exception, match=message):
        check(checkpoint)
    store.begin("test_of_no_file")
    with pytest.raises(pytest.fail.Exception, match=r"test_of_no_file\.npz has no stored result"):
        check(write_checkpoint(checkpoint, make_config("llama")))


def test_file_has_the_same_bytes_and_values(tmp_path: Path) -> None:
    for name in ("one", "other"):
        stored.write_file(tmp_path / f"{name}.npz", RESULTS, {"script": "x"})
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "other.npz").read_bytes()
    results, source = stored.read_file(tmp_path / "one.npz")
    assert source == {"script": "x"}
    np.testing.assert_equal(results, RESULTS)


def test_results_beside_a_failed_test_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "made_by", lambda: {"script": "x"})
    store = Store(Mode.WRITE, tmp_path)
    for name in ("good", "bad"):
        store.begin(name)
        assert store.recall("kind", [1], lambda: {"value": 3}) == {"value": 3}
    store.fail("bad")
    store.save()
    assert [file.name for file in tmp_path.iterdir()] == ["good.npz"]
    again = Store(Mode.STORED, tmp_path)
    again.begin("good")
    assert again.recall("kind", [1], dict) == {"value": 3}
    live = Store(Mode.LIVE, tmp_path)
    live.begin("good")
    assert live.recall("kind", [1], lambda: {"value": 3}) == {"value": 3}
    with pytest.raises(AssertionError, match="kind: the stored value differs from the live one: run `make o"):
        live.recall("kind", [1], lambda: {"value": 4})


def test_live_values_without_fractions_must_be_equal() -> None:
    result = RESULTS["bb"]
    live = {**result, "rows": (["a", (1, 2)], 3)}
    stored.assert_same("kind", result, live)
    for name, value in {"codes": result["codes"] + 1, "text": "日", "rows": [["a", [1, 3]], 3]}.items():
        with pytest.raises(AssertionError, match=f"the stored {name} differs"):
            stored.assert_same("kind", result, {**live, name: value})


@pytest.mark.parametrize(("difference", "is_same"), [(0.9e-5, True), (2e-5, False)])
def test_live_values_may_differ_by_rounding(difference: float, *, is_same: bool) -> None:
    live = {**RESULTS["aa"], "logits": RESULTS["aa"]["logits"] + np.float32(difference)}
    if is_same:
        stored.assert_same("logits", RESULTS["aa"], live)
    else:
        with pytest.raises(AssertionError, match="the stored logits differs"):
            stored.assert_same("logits", RESULTS["aa"], live)


def test_rounding_of_weights_keeps_the_fingerprint(tmp_path: Path) -> None:
    config = make_config("llama")
    model = write_checkpoint(tmp_path, config)
    file = model / "model.safetensors"
    expected, content = stored.fingerprint(model), file.read_bytes()
    assert expected != stored.fingerprint(write_checkpoint(tmp_path / "other", config, seed=1))
    file.write_bytes(content[:-4] + bytes([content[-4] ^ 1]) + content[-3:])
    assert stored.fingerprint(model) == expected
    file.write_bytes(content[:-4000] + bytes(4000))
    assert stored.fingerprint(model) != expected


def test_torch_is_not_imported_for_stored_results(store: Store) -> None:
    del store
    with pytest.raises(AssertionError, match="has the marker torch"):
        import_torch()


def imports(node: ast.AST) -> set[str]:
    """The packages that are imported anywhere in a node."""
    found = list(ast.walk(node))
    names = {alias.name for each in found if isinstance(each, ast.Import) for alias in each.names}
    names |= {each.module or "" for each in found if isinstance(each, ast.ImportFrom) and each.level == 0}
    return {name.partition(".")[0] for name in names}


def test_only_the_oracle_and_marked_tests_import_its_libraries() -> None:
    libraries = {name.replace("-", "_") for name in stored.LIBRARIES}
    for source in TESTS.rglob("*.py"):
        if source.parent == TESTS / "support" / "parity" and source.name in stored.MODULES:
            continue
        for node in ast.parse(source.read_text()).body:
            if libraries & imports(node):
                marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
                assert "pytest.mark.torch" in marks, f"{source}:{getattr(node, 'lineno', 0)}"


def rows(*, gap: float) -> NDArray[np.float32]:
    """Logits of two steps; in the second one, token 1 is the best one by `gap`."""
    return np.array([[2, 0, 1], [1, 1 + gap, -1]], np.float32)


def test_output_near_a_tie_is_no_expected_one() -> None:
    clear, tied = (Greedy.of_logits([0, 1], rows(gap=gap)) for gap in (0.01, 0.0001))
    assert_greedy([0, 1], clear.logprobs.tolist(), clear)
    with pytest.raises(AssertionError, match="token 1: chose 2, the oracle 1"):
        assert_greedy([0, 2], clear.logprobs.tolist(), clear)
    with pytest.raises(AssertionError, match="token 1: logprob"):
        assert_greedy([0, 1], (clear.logprobs - [0, 0.01]).tolist(), clear)
    with pytest.raises(AssertionError, match=r"token 1: a gap of 1.*e-04; use another prompt"):
        assert_greedy([0, 1], tied.logprobs.tolist(), tied)
    assert Greedy.of_logits([0, 0], rows(gap=0.5)).gaps.tolist() == [1.0, -0.5]


@pytest.mark.parametrize("size", [512, 4096])
def test_difference_at_any_position_is_found(size: int) -> None:
    values = np.random.default_rng(0).standard_normal((100, size), dtype=np.float32)
    theirs = Logits.of_result(Logits.all_of(values).result())
    assert_close(values + np.float32(1e-5), theirs)
    for position in range(100):
        ours = values.copy()
        ours[position] = values[position - 1]
        with pytest.raises(AssertionError, match=rf"position {position}, "):
            assert_close(ours, theirs)
