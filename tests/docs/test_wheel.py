"""The source distribution, and a wheel built from it: contents, a stream in an environment with nothing else.

And the build of `make demo`, which pip uses again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGE = ROOT / "python" / "penstock"

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1200)]

# The first sixteen greedy tokens, equal to those of transformers.
ANSWER = "The answer to this question lies in the intricate dance of atmospheric molecules and the human"
STREAM = """
import json, sys
import anyio, penstock

async def main():
    async with penstock.Engine(sys.argv[1]) as engine:
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        for _ in range(2):  # the second prompt is in the prefix cache
            request = await engine.start_request(messages, max_tokens=16, temperature=0.0)
            chunks = [chunk.text async for chunk in request]
        stats = engine.stats()
        blocks = [stats.prefix_hit_tokens > 0, stats.blocks_used, stats.blocks_reserved]
        print(json.dumps({"chunks": chunks, "modules": sorted(sys.modules), "blocks": blocks}))

anyio.run(main)
"""


def output_of(*command: str | Path) -> str:
    """Run a command outside the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd="/", check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    output_of(sys.executable, "-B", ROOT / "tools" / "dist", "sdist", "--out", folder)
    [path] = folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that pip builds from the source distribution, with nothing that Cargo has downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    cargo = {"CARGO_HOME": str(tmp_path_factory.mktemp("cargo")), "CARGO_NET_OFFLINE": "true"}
    programs = [str(Path(sys.executable).parent), str(Path.home() / ".cargo" / "bin"), os.environ["PATH"]]
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYO3_")}
    environment = inherited | cargo | {"PATH": os.pathsep.join(programs)}
    subprocess.run([*command, "--wheel-dir", folder, sdist], cwd="/", check=True, env=environment)
    [path] = folder.glob("*.whl")
    return path


def test_sdist_has_all_crates_and_no_tests_of_python(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    crates = {f"{item['name']}-{item['version']}" for item in lock["package"] if "source" in item}
    assert {f"vendor/{crate}/Cargo.toml" for crate in crates} <= names
    assert {
        "cuda/gemm.cu",
        "rust/python/src/lib.rs",
        "python/penstock/engine.py",
        ".cargo/config.toml",
    } <= names
    assert not any(name.startswith(("tests/", "target/")) or name.endswith(".so") for name in names)
    assert sdist.stat().st_size < 25 << 20


def test_sdist_depends_on_the_commit_only(sdist: Path, tmp_path: Path) -> None:
    output_of(sys.executable, "-B", ROOT / "tools" / "dist", "sdist", "--out", tmp_path)
    assert tmp_path.joinpath(sdist.name).read_bytes() == sdist.read_bytes()


def test_wheel_is_small_and_exports_one_function(wheel: Path) -> None:
    # The wheels of a release have a limit of their own; zig links them, and Zopfli compresses them.
    assert wheel.stat().st_size <= 7 * 10**6
    with zipfile.ZipFile(wheel) as archive:
        [name] = [
            name for name in archive.namelist() if name.startswith("penstock/_core") and name.endswith(".so")
        ]
        library = archive.extract(name, wheel.parent)
    symbols = output_of("nm", "--dynamic", "--defined-only", library).split()[2::3]
    assert symbols == ["PyInit__core"]


def test_wheel_is_abi3_and_holds_the_expected_files(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"penstock/__init__.py", "penstock/_core.pyi", "penstock/py.typed"} <= names
    assert "penstock/models.toml" in names
    assert "penstock/compat/dashinfer/allspark/__init__.py" in names
    page = {f"penstock/server/page/{file.name}" for file in (PACKAGE / "server" / "page").iterdir()}
    assert "penstock/server/page/index.html" in page
    assert page <= names
    assert not any("/aliases/" in name for name in names)
    assert any(name.startswith("penstock/_core") and name.endswith(".so") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith("tests/") or name.endswith(".gguf") for name in names)


def test_wheel_streams_in_an_empty_environment(wheel: Path, demo_model: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
    answer = json.loads(output_of(python, "-W", "error", "-c", STREAM, demo_model))
    assert len(answer["chunks"]) > 1
    assert "".join(answer["chunks"]) == ANSWER
    assert answer["blocks"] == [True, 0, 0], "the release build counts the blocks of the KV cache"
    assert not {"torch", "numpy", "transformers"} & set(answer["modules"])
    names = output_of(python, "-c", "from penstock import _core; print(*dir(_core))").split()
    assert "Engine" in names
    assert not [name for name in names if "testing" in name], "the hooks of the tests"
    assert "penstock" in output_of(python.with_name("penstock"), "--help")
    files = output_of(python, "-c", "from penstock.server import page; print(*page.read_files())").split()
    assert {"index.html", "main.js", "style.css"} <= set(files), "the chat page"


def test_command_of_the_guide_uses_the_build_of_make_demo(tmp_path: Path) -> None:
    page = ROOT / "docs" / "guide" / "install.md"
    [line] = [line for line in page.read_text().splitlines() if "build-args" in line]
    pip, install, package, *options = shlex.split(line.partition("#")[0])
    assert (pip, install, package) == ("pip", "install", ".")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-v"]
    # maturin is a program of this environment.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, *options, "--wheel-dir", tmp_path, ROOT],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    compiled = set(re.findall(r"Compiling (\S+) v", done.stdout + done.stderr))
    assert {name for name in compiled if not name.startswith("pyo3")} <= {"penstock-python"}
    assert len(list(tmp_path.glob("penstock_llm-*.whl"))) == 1
