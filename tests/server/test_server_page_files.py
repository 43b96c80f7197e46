"""The files of the chat page over HTTP: headers, tags, the setting, the size, other ways to install it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock.server
from support.api.engines import make_engine
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(penstock.server.__file__).parents[1]
NAMES = sorted(item.name for item in files("penstock.server").joinpath("page").iterdir())
PATHS = ["/", *(f"/page/{name}" for name in NAMES)]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Served]:
    """A server with a key, of a model that is not loaded: the page needs neither."""
    settings = penstock.server.ServerSettings(api_keys=("secret",))
    with serving(penstock.server.app(make_engine(tiny_model), settings)) as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_file_has_strict_headers_and_needs_no_key(server: Served, path: str) -> None:
    status, body, headers = server.ask(path)
    assert (status, len(body)) == (200, int(headers["content-length"]))
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    for name in ("script-src", "style-src", "connect-src", "img-src"):
        assert policy[name] == "'self'"
    for name in ("frame-ancestors", "base-uri", "form-action", "trusted-types"):
        assert policy[name] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


def test_content_types_are_those_of_the_files(server: Served) -> None:
    kinds = {path: server.ask(path)[2]["content-type"] for path in PATHS}
    assert kinds["/"] == kinds["/page/index.html"] == "text/html; charset=utf-8"
    assert kinds["/page/style.css"] == "text/css; charset=utf-8"
    assert kinds["/page/icon.svg"] == "image/svg+xml"
    assert {kinds[path] for path in PATHS if path.endswith(".js")} == {"text/javascript; charset=utf-8"}


def test_head_has_the_headers_of_the_page(server: Served) -> None:
    status, body, headers = server.ask("/", method="HEAD")
    assert (status, body) == (200, b"")
    expected = server.ask("/")[2]
    assert {name: headers[name] for name in ("etag", "content-length")} == {
        name: expected[name] for name in ("etag", "content-length")
    }
    assert server.ask("/", {})[0] == 405


def test_unchanged_file_is_status_304(server: Served) -> None:
    _, body, headers = server.ask("/page/main.js")
    tag = headers["etag"]
    for sent in (tag, f'"other", W/{tag}'):
        status, content, again = server.ask("/page/main.js", headers={"If-None-Match": sent})
        assert (status, content, again["etag"]) == (304, b"", tag)
        assert "content-security-policy" in again
    status, content, _ = server.ask("/page/main.js", headers={"If-None-Match": '"other"'})
    assert (status, content) == (200, body)
    assert server.ask("/page/style.css")[2]["etag"] != tag


@pytest.mark.parametrize("name", ["none.js", "../page.py", "..%2Fpage.py", "%2e%2e/page.py", "", "page.py"])
def test_path_of_no_file_is_status_404(server: Served, name: str) -> None:
    key = {"Authorization": "Bearer secret"}
    assert server.ask(f"/page/{name}", headers=key)[0] == 404


def test_page_has_no_route_if_the_setting_is_off(tiny_model: Path) -> None:
    settings = penstock.server.ServerSettings(chat_page=False)
    with serving(penstock.server.app(make_engine(tiny_model), settings)) as server:
        assert [server.ask(path)[0] for path in PATHS] == [404] * len(PATHS)


def test_files_are_small_and_name_no_other_server() -> None:
    texts = {name: files("penstock.server").joinpath("page", name).read_text() for name in NAMES}
    assert sum(len(text.encode()) for text in texts.values()) < 64_000
    for name, text in texts.items():
        addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}  # the namespace of SVG
        assert not addresses, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name


def test_page_names_only_files_that_exist() -> None:
    text = files("penstock.server").joinpath("page", "index.html").read_text()
    assert set(re.findall(r'(?:href|src)="page/([^"]*)"', text)) <= set(NAMES)
    for name in (name for name in NAMES if name.endswith(".js")):
        script = files("penstock.server").joinpath("page", name).read_text()
        assert set(re.findall(r' from "\./([^"]*)"', script)) <= set(NAMES)


def test_files_are_read_from_an_archive(tmp_path: Path) -> None:
    archive = tmp_path / "page.zip"
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("archived/__init__.py", "")
        for name in NAMES:
            written.write(PACKAGE / "server" / "page" / name, f"archived/page/{name}")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from penstock.server import page
names = sorted(page.read_files("archived"))
print(*names)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, archive], check=True, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout.split() == NAMES
