"""The gate: the tests that a change needs, the shares of rare tests, and the parts of pytest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest

from support import shares
from support.paths import ROOT, TESTS

if TYPE_CHECKING:
    from pathlib import Path

TABLE = tomllib.loads((ROOT / "tools" / "gate" / "areas.toml").read_text())
AREAS = {path.parent.name for path in TESTS.glob("*/test_*.py")}


def files_of_git() -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_every_area_is_a_folder_with_tests() -> None:
    assert {
        *("api", "loops", "text", "parity", "kernels", "cuda", "emu", "server", "runtime", "compat", "cli"),
        "docs",
    } == AREAS


@pytest.mark.parametrize("row", TABLE["row"], ids=lambda row: row["paths"][0])
def test_row_names_files_tests_and_steps_that_exist(row: dict[str, Any]) -> None:
    files = files_of_git()
    unused = [path for path in row["paths"] if not any(fnmatchcase(file, path) for file in files)]
    assert unused == []
    named = [name for name in row["tests"] if "{" not in name]
    assert [name for name in named if not (TESTS / name).exists()] == []
    assert set(row.get("steps", [])) <= set(TABLE["steps"])
    assert all({name, name.partition("/")[0]} & set(row["tests"]) for name in row.get("whole", []))


def test_steps_and_units_are_targets_of_the_makefile() -> None:
    assert set(TABLE["rare"]) <= set(TABLE["steps"]) & set(shares.recorded("targets"))
    assert {*TABLE["steps"], *shares.recorded("targets"), "test-python"} <= targets()


def test_source_files_need_some_tests_only() -> None:
    """A file without a row needs everything, which is right for a few."""
    patterns = [path for row in TABLE["row"] for path in row["paths"]]
    sources = [file for file in files_of_git() if file.startswith(("rust/", "python/", "cuda/", "docs/"))]
    assert [file for file in sources if not any(fnmatchcase(file, path) for path in patterns)] == []


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the tools and the names of the tests, whose first commit has passed the gate."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "tools" / "gate", folder / "tools" / "gate")
    for name in ["__init__.py", "paths.py", "shares.py"]:
        (folder / "tests" / "support").mkdir(parents=True, exist_ok=True)
        shutil.copy(TESTS / "support" / name, folder / "tests" / "support")
    for path in [*TESTS.glob("*/test_*.py"), TESTS / "data" / "seconds.json"]:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    (folder / ".gitignore").write_text("/target/\n__pycache__/\n")
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=folder, check=True)  # noqa: S607
    return folder


def planned(checkout: Path, **environment: str) -> list[str]:
    """The lines of `gate plan`."""
    command = [sys.executable, "-B", "tools/gate", "plan"]
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", **environment}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def targets_in(lines: list[str]) -> set[str]:
    """The targets in lines of `gate plan`."""
    return {target for line in lines for target in re.findall(r"make ([a-z-]+)", line)}


def pass_gate(checkout: Path) -> None:
    """Record the current commit as one whose gate has passed."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (checkout / "target" / "gate").mkdir(parents=True, exist_ok=True)
    (checkout / "target" / "gate" / "passed").write_text(commit)


def test_checkout_without_a_passed_gate_needs_everything(checkout: Path) -> None:
    shutil.rmtree(checkout / "target", ignore_errors=True)
    reason, share, *steps = planned(checkout, SHARE="3")
    assert reason.startswith("gate: no gate has passed in this checkout: api, cli, ")
    assert share.startswith("gate: share 3 of 16 ")
    assert targets_in(steps[:-1]) == {*TABLE["steps"]} - {*TABLE["rare"]} | {*shares.targets_of(3)}
    assert "--own --share 3" in steps[-1]
    assert all(f"tests/{area}" in steps[-1] for area in AREAS)


@pytest.mark.parametrize(
    ("changed", "tests", "steps"),
    [
        ("docs/guide/test-your-program.md", {"docs", "loops/test_pytest_asyncio.py"}, set()),
        ("examples/stream.py", {"docs"}, set()),
        ("python/penstock/server/http.py", {"server", "runtime", "cli", "docs"}, set()),
        ("python/penstock/compat/dashinfer/allspark/engine.py", {"compat", "docs"}, set()),
        ("tests/api/test_score.py", {"api/test_score.py", "docs"}, set()),
        ("cuda/gemm.cu", {"kernels", "cuda", "emu", "docs"}, {"lint-rust", "test-rust"}),
        (
            "rust/engine/src/actor.rs",
            {"api", "loops", "text", "parity", "cuda", "server", "compat", "cli", "docs"},
            {"lint-rust", "test-rust", "test-engine", "test-loom"},
        ),
        ("pyproject.toml", AREAS, {"lint-rust", "test-rust", "test-engine"}),
    ],
)
def test_changed_file_selects_tests_and_steps(
    checkout: Path, changed: str, tests: set[str], steps: set[str]
) -> None:
    pass_gate(checkout)
    path = checkout / changed
    before = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"changed")
    try:
        _, _, *lines = planned(checkout, SHARE="0")
    finally:
        path.unlink() if before is None else path.write_bytes(before)
    assert {name.removeprefix("tests/") for name in re.findall(r"tests/[\w/.]+", lines[-1])} == tests
    units = shares.targets_of(0) if changed == "pyproject.toml" else []
    assert targets_in(lines[:-1]) == {*steps, *TABLE["always"]["steps"], *units}
    assert ("--whole kernels" in lines[-1]) == changed.startswith("cuda/")


def test_share_follows_the_commit(checkout: Path) -> None:
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert planned(checkout)[1].startswith(f"gate: share {int(commit[:8], 16) % 16} of 16 ")


@pytest.mark.parametrize("share", ["16", "-1", "x"])
def test_share_out_of_range_is_refused(checkout: Path, share: str) -> None:
    command = [sys.executable, "-B", "tools/gate", "plan"]
    done = subprocess.run(
        command,
        cwd=checkout,
        env={"PATH": "/usr/bin:/bin", "SHARE": share},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"SHARE={share}: shares are numbers from 0 to 15\n"


def test_all_runs_each_step_and_each_share(checkout: Path, tmp_path: Path) -> None:
    checkout = shutil.copytree(checkout, tmp_path / "checkout")
    (checkout / "Makefile").write_text("%:\n\t@echo made $@\n")
    module = checkout / "tests" / "support" / "shares.py"
    module.write_text(module.read_text() + "\nSHARE_SECONDS = 0\n")
    lines = gate(checkout, "all")
    # The output of a target that runs beside another one comes as a whole.
    begin = lines.index("---- packages")
    assert lines[begin + 1] == "made packages"
    ran = json.loads((checkout / "target" / "reports" / "steps.json").read_text())["steps"]
    names = [step["name"] for step in ran]
    names_of_checks = [name for name in TABLE["steps"] if name not in {*TABLE["beside"], *TABLE["rare"]}]
    beside = {step: other for other, step in TABLE["beside"].items()}
    checks = [f"{name} and {beside[name]}" if name in beside else name for name in names_of_checks]
    parts = [[*shares.targets_of(share), f"test-python REPORT=python-share-{share}"] for share in range(16)]
    whole = [*checks, "test-python", *TABLE["long"]]
    assert sorted(names) == sorted([*whole, *(name for part in parts for name in part)])
    assert sum(" s, more than 0 s" in line for line in lines) == 16


def test_recorded_shares_are_within_their_limit() -> None:
    units = shares.recorded("rare") | shares.recorded("targets")
    division = shares.divide(units)
    assert division.keys() == units.keys()
    loads = [sum(units[unit] for unit in units if division[unit] == share) for share in range(16)]
    assert max(loads) <= shares.SHARE_SECONDS
    assert max(loads) <= min(loads) + max(units.values(), default=0)


def test_recorded_units_exist() -> None:
    recorded = json.loads(shares.RECORD.read_text())
    files = {name.partition("::")[0] for name in [*recorded["own"], *recorded["rare"]]}
    assert [name for name in files if not (TESTS / name).exists()] == []


def collected(*options: str) -> set[str]:
    """The tests of a file with rare ones that pytest selects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, "tests/api/test_score.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: no test is selected
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.rare
def test_own_tests_and_shares_are_all_tests() -> None:
    everything, own = collected(), collected("--own")
    rare = {
        name
        for name in everything
        if "[uvloop" in name or "[trio" in name or "-uvloop" in name or "-trio" in name
    }
    assert rare
    assert own == everything - rare
    share = shares.share_of(shares.unit_of("api/test_score.py", "test_of_no_record"))
    assert collected("--share", str(share)) == rare
    assert collected("--own", "--share", str((share + 1) % 16), "--whole", "api") == everything


STEPS = {
    "cores": 2,
    "steps": [
        {"name": "build", "started": 0.0, "seconds": 120.0, "cpu_seconds": 180.0, "status": 0},
        {"name": "test-wheel", "started": 120.0, "seconds": 60.04, "cpu_seconds": 30.0, "status": 2},
    ],
}
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.api.test_score" name="test_a[asyncio]" time="1.5"/>
<testcase classname="tests.api.test_score" name="test_a[trio]" time="2.5">
<properties><property name="rare" value="api/test_score.py"/></properties></testcase>
<testcase classname="tests.api.test_batch" name="test_b[x]" time="61">
<properties><property name="rare" value="api/test_batch.py"/></properties></testcase>
</testsuite></testsuites>"""


CARGO = """     Running unittests src/lib.rs (target/debug/deps/penstock_text-0123)

running 17 tests
test result: ok. 17 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.21s
"""


def gate(checkout: Path, command: str) -> list[str]:
    """The lines of a command of the gate."""
    done = subprocess.run(
        [sys.executable, "-B", "tools/gate", command],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_report_and_record_have_the_times_of_the_last_run(checkout: Path, tmp_path: Path) -> None:
    checkout = shutil.copytree(checkout, tmp_path / "checkout")
    reports = checkout / "target" / "reports"
    assert gate(checkout, "report") == ["no run is recorded: `make test` records one"]
    reports.mkdir(parents=True)
    (reports / "steps.json").write_text(json.dumps(STEPS))
    (reports / "python.xml").write_text(JUNIT)
    (reports / "crates.txt").write_text(CARGO)
    lines = [line.split() for line in gate(checkout, "report")]
    assert ["build", "0.0", "2.00", "3.00", "1.50"] in lines
    assert ["test-wheel", "2.0", "1.00", "0.50", "0.50", "FAILED"] in lines
    assert ["all", "3.00", "3.50", "1.17", "of", "2"] in lines
    assert ["tests.api", "3", "65.0"] in lines
    assert ["unittests", "src/lib.rs", "17", "0.2"] in lines
    assert ["tests.api.test_batch", "test_b[x]", "61.0"] in lines

    record = checkout / "tests" / "data" / "seconds.json"
    record.write_text(
        json.dumps(
            {
                "own": {"api/test_old.py": 3.0},
                "rare": {"cli/test_old.py": 4.0},
                "targets": {"test-wheel": 9.0},
            }
        )
    )
    gate(checkout, "record")
    assert json.loads(record.read_text()) == {
        "own": {"api/test_old.py": 3.0, "api/test_score.py": 1.5},
        "rare": {"api/test_batch.py::test_b": 61.0, "api/test_score.py": 2.5, "cli/test_old.py": 4.0},
        "targets": {"test-wheel": 60.0},
    }
