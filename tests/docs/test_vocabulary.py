"""Words of the project's former private vocabulary do not come back; ARCHITECTURE.md has a glossary.

Names and comments follow the style in CONTRIBUTING.md, as far as a search can tell.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from support.paths import ROOT

FOLDERS = ("benches", "docs", "examples", "python", "rust", "tests")
SUFFIXES = {".md", ".py", ".pyi", ".rs", ".toml"}

#: Identifiers and parts of them, matched with their case.
IDENTIFIERS = (
    "Assembly",
    "BrokenOff",
    "Errand",
    "NOBODY",
    "Recipe",
    "Shortage",
    "Told",
    "Watcher",
    "Wording",
    "_Endings",
    "forget_flights",
    "give_back",
    "go_on",
    "last_words",
    "leave_place",
    "let_go",
    "num_open",
    "only_told",
    "take_place",
    "takes_long",
    "unfile",
    "weigh_host_tier",
    "work_out",
)
#: Words of identifiers and prose, matched in any case and form.
WORDS = (
    "anybody",
    "brought over",
    "come true",
    "contradiction",
    "desk",
    "dismiss",
    "distrust",
    "errand",
    "everybody",
    "gives way",
    "guess",
    "guessed",
    "headroom",
    "inventor",
    "lawful",
    "make way",
    "newcomer",
    "nobody",
    "obituary",
    "reckon",
    "remedies",
    "rubbish",
    "seat",
    "somebody",
    "spoiled",
    "spoilt",
    "strictness",
    "turned away",
    "twin",
    "unseat",
    "vacate",
    "waiting room",
    "whoever",
    "workshop",
)


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


@functools.cache
def lower_lines() -> list[str]:
    """All lines, in the same order, in lower case."""
    return [line.lower() for _, line in numbered_lines()]


def lines_with(pattern: re.Pattern[str], literal: str = "") -> list[str]:
    """The lines with a pattern. Each match has the literal, in any case; to search for it first is faster."""
    return [
        f"{place}: {line}"
        for (place, line), lower in zip(numbered_lines(), lower_lines(), strict=True)
        if literal in lower and pattern.search(line)
    ]


@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_former_identifier_is_absent(identifier: str) -> None:
    assert lines_with(re.compile(rf"(?<![a-zA-Z]){identifier}(?![a-zA-Z])"), identifier.lower()) == []


@pytest.mark.parametrize("word", WORDS)
def test_former_word_is_absent(word: str) -> None:
    first, *others = word.split()
    words = r"[\s_]+".join([first, *others])
    assert lines_with(re.compile(rf"(?i)(?<![a-z]){words}(?:s|es|ed|ing)?(?![a-z])"), first) == []


def test_comment_begins_with_a_noun_or_verb() -> None:
    questions = r"(//[/!]?|#:?|\"\"\") ?(How|Nobody|Somebody|What|Whatever|When|Which|Who|Whoever|Why) \w+"
    assert lines_with(re.compile(rf"^{questions}(?!.*\?)")) == []


def test_function_name_has_at_most_60_characters() -> None:
    assert lines_with(re.compile(r"\b(fn|def) \w{61}")) == []


def test_search_covers_code_and_docs() -> None:
    names = {file.relative_to(ROOT).as_posix() for file in sources()}
    assert {"README.md", "Cargo.toml", "docs/guide/README.md", "python/penstock/_core.pyi"} <= names
    assert {"rust/engine/src/lib.rs", "tests/conftest.py", "benches/speculation.py"} <= names
    assert lines_with(re.compile(r"\bEngineStoppedError\b"), "enginestoppederror")
