"""Names and comments follow the style in CONTRIBUTING.md, as far as a search can tell."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from support.paths import ROOT

FOLDERS = ("benches", "docs", "examples", "python", "rust", "tests")
SUFFIXES = {".md", ".py", ".pyi", ".rs", ".toml"}


def sources() -> list[Path]:
    files = [*ROOT.iterdir(), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*"))]
    return [file for file in files if file.suffix in SUFFIXES and file != Path(__file__)]


@functools.cache
def numbered_lines() -> list[tuple[str, str]]:
    """All lines, each with its file and number."""
    return [
        (f"{file.relative_to(ROOT)}:{number}", line.strip())
        for file in sources()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
    ]


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    """The lines with a pattern."""
    return [f"{place}: {line}" for place, line in numbered_lines() if pattern.search(line)]


def test_comment_begins_with_a_noun_or_verb() -> None:
    questions = r"(//[/!]?|#:?|\"\"\") ?(How|Nobody|Somebody|What|Whatever|When|Which|Who|Whoever|Why) \w+"
    assert lines_with(re.compile(rf"^{questions}(?!.*\?)")) == []


def test_function_name_has_at_most_60_characters() -> None:
    assert lines_with(re.compile(r"\b(fn|def) \w{61}")) == []


def test_search_covers_code_and_docs() -> None:
    names = {file.relative_to(ROOT).as_posix() for file in sources()}
    assert {"README.md", "Cargo.toml", "docs/guide/README.md", "python/penstock/_core.pyi"} <= names
    assert {"rust/engine/src/lib.rs", "tests/conftest.py", "benches/speculation.py"} <= names
    assert lines_with(re.compile(r"\bEngineStoppedError\b"))
