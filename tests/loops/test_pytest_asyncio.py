"""The guide's pytest fixtures work in other processes: with pytest-asyncio and with anyio's plugin."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.needs("sources")

GUIDE = ROOT / "docs" / "guide" / "test-your-program.md"
SNIPPET = re.compile(
    r"^<!-- not run: \S+ runs it as (?P<name>\S+) -->\n```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MORE = {
    # Asynchronous fixtures, of one event loop for all tests.
    "test_async_fixture.py": """
        import pytest
        import pytest_asyncio

        import penstock


        @pytest_asyncio.fixture(scope="session", loop_scope="session")
        async def opened():
            async with penstock.Engine("path/to/model") as engine:
                yield engine


        @pytest.mark.asyncio(loop_scope="session")
        @pytest.mark.parametrize("seed", [1, 2])
        async def test_stream(opened, seed):
            async with opened.stream("The sky is", max_tokens=8, seed=seed, ignore_eos=True) as request:
                assert sum([len(chunk.token_ids) async for chunk in request]) == 8
        """,
    # A request does not outlive the event loop of its test.
    "test_loops.py": """
        import pytest


        @pytest.mark.asyncio
        @pytest.mark.parametrize("number", range(3))
        async def test_unread_request(engine, number):
            request = await engine.start_request("The sky is", max_tokens=300, ignore_eos=True)
            await anext(request)
            request.cancel()
        """,
}


@pytest.fixture
def project(tiny_model: Path, tmp_path: Path) -> Path:
    """A project with the guide's files."""
    files = {match["name"]: match["code"] for match in SNIPPET.finditer(GUIDE.read_text())}
    assert set(files) == {"conftest.py", "test_with_asyncio.py", "test_with_anyio.py"}
    for name, code in {**files, **MORE}.items():
        lines = code.splitlines()
        indent = " " * 8 if name in MORE else ""
        text = "\n".join(line.removeprefix(indent) for line in lines) + "\n"
        (tmp_path / name).write_text(text.replace("path/to/model", str(tiny_model)))
    return tmp_path


def run_pytest(project: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "-q", *arguments]
    options = ["-o", "asyncio_default_fixture_loop_scope=function"] if "no:asyncio" not in arguments else []
    done = subprocess.run(
        [*command, *options], cwd=project, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fixtures_of_the_guide_work_with_pytest_asyncio(project: Path) -> None:
    files = ("test_with_asyncio.py", "test_async_fixture.py", "test_loops.py")
    assert "6 passed" in run_pytest(project, *files)


def test_both_plugins_work_side_by_side(project: Path) -> None:
    assert "8 passed" in run_pytest(project)


def test_fixtures_of_the_guide_work_with_the_plugin_of_anyio(project: Path) -> None:
    assert "2 passed" in run_pytest(project, "-p", "no:asyncio", "test_with_anyio.py")
