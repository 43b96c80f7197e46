"""The tests that a change needs: `areas.toml` maps paths to folders and files of tests."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = ROOT / "tests"
#: The last commit whose gate has passed in this checkout.
PASSED = ROOT / "target" / "gate" / "passed"

TABLE: dict[str, Any] = tomllib.loads((HERE / "areas.toml").read_text())


@dataclass(frozen=True)
class Need:
    """What a change needs: targets of the Makefile, tests, and those of which also rare ones run."""

    steps: tuple[str, ...]
    tests: tuple[str, ...]
    whole: tuple[str, ...] = ()
    is_everything: bool = False


def all_areas() -> list[str]:
    """The folders that have tests."""
    return sorted({path.parent.name for path in TESTS.glob("*/test_*.py")})


def everything() -> Need:
    """All lints and tests that are not rare."""
    steps = tuple(step for step in TABLE["steps"] if step not in TABLE["rare"])
    return Need(steps, tuple(all_areas()), is_everything=True)


def row_of(path: str) -> dict[str, Any] | None:
    """The first row of the table for a path."""
    rows = (row for row in TABLE["row"] if any(fnmatchcase(path, pattern) for pattern in row["paths"]))
    return next(rows, None)


def need_of(paths: Iterable[str]) -> Need:
    """What changed paths need."""
    steps, tests, whole = set(TABLE["always"]["steps"]), set(TABLE["always"]["tests"]), set()
    for path in paths:
        row = row_of(path)
        if row is None:
            return everything()
        steps.update(row.get("steps", []))
        _, _, inner = path.partition("/")
        for names, found in ((row["tests"], tests), (row.get("whole", []), whole)):
            found.update(name.format(path=inner, folder=inner.partition("/")[0]) for name in names)
    # A folder contains its files. A file of tests may be deleted.
    chosen = [name for name in tests if name.partition("/")[0] == name or name.partition("/")[0] not in tests]
    existing = sorted(name for name in chosen if (TESTS / name).exists())
    chosen_steps = [step for step in TABLE["steps"] if step in steps]
    return Need(tuple(chosen_steps), tuple(existing), tuple(sorted(whole)))


def git(*arguments: str) -> str:
    """The output of git in this checkout."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def head() -> str:
    """The current commit; zeros if this is no repository."""
    try:
        return git("rev-parse", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return "0" * 40


def changed_since(commit: str) -> list[str]:
    """The paths that differ from a commit, files that are not committed included."""
    differing = git("diff", "--name-only", "--no-renames", commit, "--")
    untracked = git("ls-files", "--others", "--exclude-standard")
    return sorted({*differing.splitlines(), *untracked.splitlines()})


def need_of_checkout() -> tuple[Need, str]:
    """What this checkout needs, and the reason in words."""
    try:
        passed = PASSED.read_text().strip()
        paths = changed_since(passed)
    except (OSError, subprocess.CalledProcessError):
        return everything(), "no gate has passed in this checkout"
    unknown = [path for path in paths if row_of(path) is None]
    reason = f"{len(paths)} files differ from {passed[:12]}, whose gate has passed"
    return need_of(paths), reason + (f"; {unknown[0]} needs everything" if unknown else "")


def is_clean() -> bool:
    """Whether this is a repository without changes that are not committed."""
    try:
        return not git("status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return False


def record_passed(commit: str) -> None:
    """Record that the gate of a commit has passed."""
    PASSED.parent.mkdir(parents=True, exist_ok=True)
    PASSED.write_text(commit + "\n")
