"""The Python snippets of README.md and docs run against the demo model, and links are valid.

A snippet preceded by `<!-- not run: REASON -->` is only compiled. The others run as they are, with an open
`engine` and `penstock` in scope; those with a top-level `await` run inside an event loop.
"""

from __future__ import annotations

import ast
import inspect
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import pytest

import penstock
from penstock._hub_aliases import aliases, default_alias
from penstock._hub_ids import parse_hub_model
from support.paths import ROOT
from support.snippets import with_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAPTERS = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = (
    "README.md",
    *(chapter.relative_to(ROOT).as_posix() for chapter in CHAPTERS),
    "docs/adapters.md",
    "docs/dashinfer.md",
    "docs/lmdeploy.md",
    "docs/llama_cpp.md",
    "docs/vllm.md",
    "docs/server.md",
    "docs/cuda.md",
    "docs/aibrix.md",
    "docs/downloader.md",
    "docs/performance.md",
)
OTHER_PAGES = (
    "docs/benchmarking.md",
    "docs/containers.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "ARCHITECTURE.md",
    "RELEASING.md",
)
SNIPPET = re.compile(
    r"(?P<mark><!-- not run: [^\n]+ -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
#: A page that a docstring, a comment or a message names.
NAMED_PAGE = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
LINK = re.compile(r"\]\((?!https?://)(?P<file>[^)#]*)(#(?P<heading>[^)]*))?\)")


class Snippet(NamedTuple):
    """A block of Python code in a page."""

    page: str
    line: int
    code: str
    is_run: bool


def snippets() -> list[Snippet]:
    """Those of all pages, in order."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in SNIPPET.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            found.append(Snippet(page, line, match["code"], is_run=match["mark"] is None))
    return found


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[penstock.Engine]:
    """The demo model's chat template does not show a format for tool calls."""
    with penstock.Engine(demo_model, tool_parser="hermes") as engine:
        yield engine


@pytest.mark.parametrize("snippet", snippets(), ids=lambda snippet: f"{snippet.page}:{snippet.line}")
def test_snippet_runs(
    snippet: Snippet,
    engine: penstock.Engine,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    source = "\n" * (snippet.line - 1) + snippet.code
    source = with_model(source, demo_model).replace("max_tokens=256", "max_tokens=16")
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(source, ROOT / snippet.page, "exec", flags=flags, dont_inherit=True)
    if not snippet.is_run:
        return
    scope: dict[str, Any] = {"__name__": "snippet", "penstock": penstock, "engine": engine}

    async def run() -> None:
        await eval(code, scope)  # noqa: S307

    if code.co_flags & inspect.CO_COROUTINE:
        anyio.run(run)
    else:
        exec(code, scope)  # noqa: S102


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES])
def test_commands_name_the_recommended_model(page: str) -> None:
    """A reader who goes from page to page downloads one model."""
    text = (ROOT / page).read_text()
    command = r"penstock (?:chat|serve|generate|download|batch [^\n]*--model) ([\w./:-]+)"
    named = [name.rstrip(".") for name in re.findall(command, text)]
    models = [name for name in named if name in aliases() or parse_hub_model(name)]
    assert {*models} <= {default_alias()}


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES])
def test_links_lead_to_files_and_headings(page: str) -> None:
    path = ROOT / page
    for link in LINK.finditer(path.read_text().replace("\n", " ")):
        target = (path.parent / link["file"]).resolve() if link["file"] else path
        assert target.exists(), link[0]
        assert not link["heading"] or link["heading"] in headings(target), link[0]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: str(chapter.stem))
def test_chapter_has_one_title_and_at_most_300_lines(chapter: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", chapter.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, flags=re.MULTILINE)) == 1
    assert len(chapter.read_text().splitlines()) <= 300


def test_index_of_the_guide_lists_every_page() -> None:
    index = ROOT / "docs" / "guide" / "README.md"
    listed = {(index.parent / link["file"]).resolve() for link in LINK.finditer(index.read_text())}
    assert {*CHAPTERS, *(ROOT / "docs").glob("*.md")} - listed == {index}


def test_pages_that_the_code_names_exist() -> None:
    files = [file for folder in ("python", "rust") for file in (ROOT / folder).rglob("*")]
    sources = [file for file in files if file.suffix in (".py", ".pyi", ".rs", ".toml")]
    found = {name for file in sources for name in NAMED_PAGE.findall(file.read_text())}
    assert "docs/dashinfer.md" in found
    for name in found:
        file, _, heading = name.partition("#")
        assert (ROOT / file).is_file(), name
        assert not heading or heading in headings(ROOT / file), name
