"""The guide's FastAPI application in a real server, its deadline, and its migration tables."""

from __future__ import annotations

import ast
import asyncio
import http.client
import json
import re
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

import penstock
from penstock import _keywords
from penstock._options import EngineOptions, SamplingOptions
from support.api.engines import make_engine, wait_until
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GUIDE = (ROOT / "docs" / "guide.md").read_text()
PROMPT = "Once upon a time"


def snippets(heading: str) -> list[str]:
    """The Python snippets of a section."""
    section = GUIDE.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)


# ---- FastAPI


class Server:
    """The application of the guide with another model, on a port of its own."""

    def __init__(self, model: Path, **options: Any) -> None:
        scope: dict[str, Any] = {"__name__": "application"}
        exec(compile(snippets("## FastAPI")[0], "guide.md", "exec", dont_inherit=True), scope)  # noqa: S102
        scope["engine"] = self.engine = make_engine(model, **options)
        self._server = uvicorn.Server(uvicorn.Config(scope["app"], log_level="error"))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    @contextmanager
    def run(self) -> Iterator[Server]:
        """Serve until the block is left."""
        self._thread.start()
        wait_until(lambda: self._server.started)
        try:
            yield self
        finally:
            self._server.should_exit = True
            self._thread.join()
            self._socket.close()

    def ask(self, **question: object) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request; the body of the response is not read."""
        connection = http.client.HTTPConnection("127.0.0.1", self._socket.getsockname()[1], timeout=30)
        connection.request(
            "POST", "/generate", body=json.dumps(question), headers={"Content-Type": "application/json"}
        )
        return connection, connection.getresponse()


@pytest.fixture
def server(demo_model: Path) -> Iterator[Server]:
    """A server with room for one request and one that waits."""
    with Server(demo_model, max_num_seqs=1, max_waiting=1, max_model_len=2048).run() as server:
        yield server


def test_fastapi_route_streams_the_output(server: Server) -> None:
    connection, response = server.ask(prompt=PROMPT, max_tokens=12)
    assert response.status == 200
    assert response.getheader("transfer-encoding") == "chunked"
    assert len(response.read().decode()) > 12
    connection.close()


def test_fastapi_invalid_request_is_status_422_with_the_field(server: Server) -> None:
    for question, field in (({"max_tokens": 0}, "max_tokens"), ({"prompt": ""}, "prompt"), ({}, "prompt")):
        connection, response = server.ask(**{"prompt": PROMPT, **question} if question else {})
        assert response.status == 422
        assert json.loads(response.read())["detail"][0]["loc"] == ["body", field]
        connection.close()


def test_fastapi_disconnected_client_cancels_the_request(server: Server) -> None:
    connection, response = server.ask(prompt=PROMPT, max_tokens=1900)
    assert response.read(1)
    response.close()
    connection.close()
    wait_until(lambda: server.engine.stats().running == 0)
    assert server.engine.stats().generation_tokens < 1900
    assert server.engine.stats().blocks_used == 0


def test_fastapi_full_engine_is_status_503(server: Server) -> None:
    running = server.ask(prompt=PROMPT, max_tokens=1900)
    assert running[1].read(1)
    waiting = server.ask(prompt=PROMPT, max_tokens=1900)
    refused, response = server.ask(prompt=PROMPT)
    assert (response.status, response.getheader("retry-after")) == (503, "1")
    assert "max_waiting" in json.loads(response.read())["detail"]
    for connection in (running[0], waiting[0], refused):
        connection.close()


# ---- the first example


def test_first_example_answers_sensibly(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    code = readme.partition("```python\n")[2].partition("```\n")[0]
    exec(compile(code.replace("path/to/model", str(demo_model)), "README.md", "exec"), {})  # noqa: S102
    out = capsys.readouterr().out
    assert "light" in out
    assert out.endswith(("tokens, stop\n", "tokens, length\n"))


# ---- a deadline


def test_deadline_returns_the_partial_text(demo_model: Path) -> None:
    scope: dict[str, Any] = {"penstock": penstock}
    [code] = [code for code in snippets("## Cancellation and timeouts") if "generate_until" in code]
    code = code.partition("\nresult =")[0]
    with make_engine(demo_model) as engine:
        scope["engine"] = engine
        exec(compile(code, "guide.md", "exec", dont_inherit=True), scope)  # noqa: S102
        generate_until = scope["generate_until"]
        for seconds in (0.5, 2, 8, 32):  # until there is time for a token
            partial = asyncio.run(generate_until(seconds, PROMPT, max_tokens=4000, ignore_eos=True))
            assert partial.finish_reason == "cancelled"
            if partial.text:
                break
        assert partial.text
        complete = asyncio.run(generate_until(60.0, PROMPT, max_tokens=2))
        assert complete.finish_reason == "length"


# ---- notebooks


def test_notebook_cells_share_an_event_loop(tiny_model: Path) -> None:
    cells = snippets("## Notebooks")
    assert len(cells) == 2
    scope: dict[str, Any] = {"penstock": penstock}

    async def run_cells() -> None:
        for cell in (*cells, "await engine.aclose()"):
            source = cell.replace("path/to/model", str(tiny_model))
            await eval(compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), scope)  # noqa: S307

    asyncio.run(run_cells())
    assert scope["request"].finish_reason is not None


# ---- the migration tables


def migration_rows() -> list[tuple[str, str]]:
    """Old and new name of each row."""
    section = GUIDE.partition("\n## Migration\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", section, flags=re.MULTILINE)
    return [(old, new) for old, new in rows if new not in ("Penstock", "---")]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def exists(code: str) -> bool:
    """Whether the names in a piece of code are names of Penstock."""
    owners: dict[str, Any] = {
        "engine": penstock.Engine,
        "request": penstock.Request,
        "result": penstock.Result,
        "score": penstock.Score,
        "usage": penstock.Usage,
    }
    name = re.match(r"--?|[\w.]+", code)
    assert name is not None, code
    first, *rest = name[0].split(".")
    keywords = {**EngineOptions.__annotations__, **SamplingOptions.__annotations__}
    if first in owners and rest:
        value = owners[first]
        for part in rest:
            value = penstock.Blocking if part == "blocking" else getattr(value, part, None)
            if value is None:
                return False
        return True
    return first in keywords or hasattr(penstock, first)


@pytest.mark.parametrize(("old", "new"), migration_rows())
def test_migration_table_leads_to_names_that_exist(old: str, new: str) -> None:
    assert names_in(new), new
    for code in names_in(new):
        assert exists(code), code
    synonyms = {**_keywords.ENGINE_SYNONYMS, **_keywords.REQUEST_SYNONYMS}
    for name in names_in(old):
        if hint := synonyms.get(re.split(r"[=(]", name)[0]):
            assert any(code.startswith(hint) for code in names_in(new)), f"the error for {name} says {hint}"


def test_migration_names_that_are_the_same_exist() -> None:
    section = GUIDE.partition("\n## Migration\n")[2].partition("\n## ")[0]
    texts = re.findall(r"^These have the same name: (.*?)\. ?", section, flags=re.MULTILINE | re.DOTALL)
    assert len(texts) == 2
    for text in texts:
        for name in names_in(text):
            assert exists(name) or exists(f"engine.{name}"), name
