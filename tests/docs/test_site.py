"""The pages that `make docs` makes of the documents, without the generator of the site."""

from __future__ import annotations

import posixpath
import re
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.paths import ROOT
from support.tools import tool

if TYPE_CHECKING:
    from pathlib import Path

pages = tool("pages", "site")


@pytest.fixture(scope="module")
def site() -> Any:
    made = pages.Pages(ROOT)
    made.add_all()
    return made


def pages_of(nav: list[Any]) -> list[str]:
    """The pages of a navigation, in order."""
    found: list[str] = []
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            found += [value] if isinstance(value, str) else pages_of(value)
    return found


def test_navigation_has_every_page_once(site: Any) -> None:
    listed = pages_of(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    assert len(listed) == len(set(listed))
    made = {str(page) for page in site.texts}
    assert [page for page in made if "/." in page] == [], "the generator of the site ignores hidden files"
    assert set(listed) <= made
    assert {page for page in made if not page.startswith(("files/", "project/"))} <= set(listed)


def test_reference_has_every_public_name_once() -> None:
    names = [name for _, names in pages.REFERENCE.values() for name in names.split()]
    assert len(names) == len(set(names))
    assert {*names, "__version__"} == set(penstock.__all__)


def test_links_between_pages_lead_to_pages_and_images(site: Any) -> None:
    places = {str(place) for place in (*site.texts, *site.images)}
    num_links = 0
    for page, text in site.texts.items():
        for link in pages.LINK.finditer(pages.CODE.sub("", text)):
            target = posixpath.normpath(posixpath.join(page.parent, link["target"]))
            assert target in places, f"{page}: {link[0]}"
            num_links += 1
    assert num_links > 200


def test_link_to_a_file_leads_to_a_page_with_its_text(tmp_path: Path) -> None:
    pages.write_all(ROOT, tmp_path)
    chapter = (tmp_path / "guide" / "run-many-requests.md").read_text()
    assert "](../files/examples/on_asyncio.py.md)" in chapter
    example = (ROOT / "examples" / "on_asyncio.py").read_text()
    assert (
        f"````python\n{example}````\n" in (tmp_path / "files" / "examples" / "on_asyncio.py.md").read_text()
    )
    assert "](examples/on_asyncio.py.md)" in (tmp_path / "files" / "examples.md").read_text()
    assert (tmp_path / "chat.png").read_bytes() == (ROOT / "docs" / "chat.png").read_bytes()


def test_anchors_of_links_are_the_same_in_the_repository() -> None:
    """The generator of the site makes one hyphen of several in an anchor, GitHub does not."""
    for page in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]:
        for link in re.findall(r"\]\([^)\s]*#([\w-]+)\)", page.read_text()):
            assert "--" not in link, f"{page}: {link}"


def test_lists_and_tables_follow_a_blank_line() -> None:
    """Without one, the generator of the site reads them as a part of the paragraph, GitHub does not."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = pages.CODE.sub("", page.read_text())
        for match in re.finditer(r"^(?![-|\s<]|\d+\. ).+\n(?:- |\d+\. |\| )", text, re.MULTILINE):
            raise AssertionError(f"{page}: {match[0]}")
