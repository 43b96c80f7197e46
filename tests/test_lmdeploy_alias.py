"""The distribution `penstock-lmdeploy`: its package `lmdeploy` has the objects of `penstock.compat`."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.compat import lmdeploy

ROOT = Path(__file__).parent.parent
ALIAS = ROOT / "python" / "aliases" / "lmdeploy"


def run(code: str, *paths: Path) -> str:
    code = f"import sys\nsys.path[:0] = {[str(path) for path in paths]}\n{code}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout


def test_documented_imports_have_the_objects_of_the_modules() -> None:
    statements = """
import lmdeploy
from lmdeploy import pipeline, Pipeline, Tokenizer, GenerationConfig, ChatTemplateConfig, VisionConfig
from lmdeploy import TurbomindEngineConfig, PytorchEngineConfig, __version__, version_info
from lmdeploy import EngineGenerationConfig
from lmdeploy.messages import EngineOutput
from lmdeploy.utils import get_logger
from lmdeploy.messages import GenerationConfig, EngineGenerationConfig, Response, ResponseType
from lmdeploy.messages import TurbomindEngineConfig, PytorchEngineConfig
from lmdeploy.pytorch import EngineConfig as PytorchConfig
from lmdeploy.turbomind import EngineConfig as TurbomindConfig
from lmdeploy.serve.async_engine import AsyncEngine, GenOut, Session
from lmdeploy.model import ChatTemplateConfig, MODELS, BaseModel
from lmdeploy.tokenizer import Tokenizer
import lmdeploy.serve.async_engine, lmdeploy.turbomind, lmdeploy.pytorch, lmdeploy.messages, lmdeploy.version
"""
    checks = """
from penstock.compat import lmdeploy as original
assert lmdeploy.pipeline is original.pipeline and callable(lmdeploy.pipeline)
assert lmdeploy.Pipeline is original.Pipeline
assert lmdeploy.messages is original.messages
assert lmdeploy.serve.async_engine.AsyncEngine is AsyncEngine
assert PytorchConfig is original.pytorch.EngineConfig
assert TurbomindConfig is original.turbomind.EngineConfig
assert issubclass(Pipeline, AsyncEngine)
try:
    from lmdeploy import client
except ImportError as error:
    assert "penstock serve" in str(error)
else:
    raise AssertionError
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(len(original.__all__))
"""
    assert run(statements + checks, ALIAS) == f"{len(lmdeploy.__all__)}\n"


def test_version_is_that_of_the_api() -> None:
    assert lmdeploy.__version__ == "0.14.0"
    assert (0, 6, 0) <= lmdeploy.version_info == (0, 14, 0)


def test_logger_writes_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logger = lmdeploy.utils.get_logger("penstock.test_lmdeploy", str(path), "INFO")
    try:
        logger.info("loaded")
    finally:
        while logger.handlers:
            handler = logger.handlers[0]
            logger.removeHandler(handler)
            handler.close()
    assert path.read_text() == "loaded\n"
    assert lmdeploy.utils.get_logger("lmdeploy").name == "penstock"


@pytest.mark.parametrize(
    "name", ["client", "vl", "turbomind.TurboMind", "serve.openai", "pytorch.engine", "serve.vl_async_engine"]
)
def test_missing_name_has_an_alternative(name: str) -> None:
    module, _, attribute = f"penstock.compat.lmdeploy.{name}".rpartition(".")
    with pytest.raises(ImportError, match=rf"^lmdeploy\.{re.escape(name)} is not provided: "):
        getattr(importlib.import_module(module), attribute)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        importlib.import_module(module).other  # noqa: B018


def test_star_import_has_the_listed_names() -> None:
    names = run("from lmdeploy import *\nprint(*sorted(globals()))", ALIAS).split()
    assert set(lmdeploy.__all__) <= {*names}


def test_every_listed_name_exists_and_has_a_docstring() -> None:
    for name in lmdeploy.__all__:
        value = getattr(lmdeploy, name)
        assert name in ("__version__", "version_info") or value.__doc__, name


def test_every_public_method_has_a_docstring() -> None:
    assert lmdeploy.__file__ is not None
    for source in Path(lmdeploy.__file__).parent.rglob("*.py"):
        for item in ast.walk(ast.parse(source.read_text())):
            if not isinstance(item, ast.ClassDef) or item.name.startswith("_"):
                continue
            methods = [
                part for part in item.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
            ]
            missing = [
                method.name
                for method in methods
                if not method.name.startswith("_")
                and not ast.get_docstring(method)
                and "overload" not in map(ast.unparse, method.decorator_list)
            ]
            assert missing == [], f"{source.name}: {item.name}"


def test_distribution_is_built_and_installed(tmp_path: Path) -> None:
    project = tomllib.loads((ALIAS / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["dependencies"]) == ("penstock-lmdeploy", ["penstock"])
    pytest.importorskip("setuptools", "70.1")
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", ALIAS, source], check=True)  # noqa: S607 - the build writes beside the source
    command = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    subprocess.run([sys.executable, *command, tmp_path / "site", source], check=True, timeout=100)
    assert run("import lmdeploy; print(lmdeploy.__file__)", tmp_path / "site").startswith(str(tmp_path))
