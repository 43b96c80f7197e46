"""The distribution `penstock-lmdeploy`: its package `lmdeploy` has the objects of `penstock.compat`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from penstock.compat import lmdeploy
from support.compat.aliases import ALIASES, assert_is_installed, assert_methods_have_docstrings, run

ALIAS = ALIASES / "lmdeploy"


@pytest.mark.needs("sources")
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
from lmdeploy.serve.openai.api_client import APIClient, get_model_list
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
    "name",
    [
        "client",
        "vl.load_image",
        "turbomind.TurboMind",
        "serve.openai.api_server",
        "pytorch.engine",
        "serve.vl_async_engine",
    ],
)
def test_missing_name_has_an_alternative(name: str) -> None:
    module, _, attribute = f"penstock.compat.lmdeploy.{name}".rpartition(".")
    with pytest.raises(ImportError, match=rf"^lmdeploy\.{re.escape(name)} is not provided: "):
        getattr(importlib.import_module(module), attribute)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        importlib.import_module(module).other  # noqa: B018


@pytest.mark.needs("sources")
def test_star_import_has_the_listed_names() -> None:
    names = run("from lmdeploy import *\nprint(*sorted(globals()))", ALIAS).split()
    assert set(lmdeploy.__all__) <= {*names}


def test_every_listed_name_exists_and_has_a_docstring() -> None:
    for name in lmdeploy.__all__:
        value = getattr(lmdeploy, name)
        assert name in ("__version__", "version_info") or value.__doc__, name


def test_every_public_method_has_a_docstring() -> None:
    assert lmdeploy.__file__ is not None
    assert_methods_have_docstrings(Path(lmdeploy.__file__).parent)


@pytest.mark.needs("sources")
def test_distribution_is_built_and_installed(tmp_path: Path) -> None:
    assert_is_installed("lmdeploy", tmp_path)
