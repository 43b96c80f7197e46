"""The distribution `penstock-dashinfer`: its package `dashinfer` has the objects of `penstock.compat`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from penstock.compat.dashinfer import allspark
from support.compat.aliases import ALIASES, assert_is_installed, assert_methods_have_docstrings, run

ALIAS = ALIASES / "dashinfer"


@pytest.mark.needs("sources")
@pytest.mark.parametrize(
    "statement",
    [
        "import dashinfer",
        "from dashinfer import allspark",
        "from dashinfer.allspark import *",
        "from dashinfer.allspark.engine import *",
        "import dashinfer.allspark.engine",
        "import dashinfer.allspark.model_loader",
        "from dashinfer.allspark.model_loader import HuggingFaceModel",
        "from dashinfer.allspark.prompt_utils import PromptTemplate",
        "from dashinfer.allspark._allspark import AsStatus, GenerateRequestStatus, AsCacheMode",
        "from dashinfer.allspark.engine import TargetDevice, RequestStatInfo, RoPEScaleMethod",
        "from dashinfer import __version__",
        "help(__import__('dashinfer').allspark.ResultQueue)",
    ],
)
def test_documented_import_has_the_objects_of_the_module(statement: str) -> None:
    code = f"""{statement}
import dashinfer.allspark.engine, dashinfer.allspark.model_loader
from penstock.compat.dashinfer import allspark as original
assert dashinfer.allspark is original
assert dashinfer.allspark.engine.Engine is original.Engine
assert dashinfer.allspark.model_loader is original.model_loader
"""
    run(code, ALIAS)


@pytest.mark.needs("sources")
def test_star_imports_have_the_documented_names() -> None:
    code = """from dashinfer.allspark import *
from dashinfer.allspark.engine import *
print(Engine, HuggingFaceModel, DashInferModel, ModelSerializerException, TargetDevice, AsCacheMode)
print(GenerateRequestStatus, AsStatus, AsModelRuntimeConfigBuilder, ASGenerationConfigBuilder, ResultQueue)
print(GPTQSettings, IQSettings, QuantizationSettings, get_quant_settings_cls, QUANT_CONFIG_MAP)
"""
    assert run(code, ALIAS).count("<") >= 14


def test_every_listed_name_exists_and_has_a_docstring() -> None:
    for name in allspark.__all__:
        value = getattr(allspark, name)
        assert isinstance(value, dict) or value.__doc__, name
    for name in ("engine", "model_loader", "prompt_utils"):
        module = importlib.import_module(f"penstock.compat.dashinfer.allspark.{name}")
        assert getattr(allspark, name) is module
        assert module.__all__


def test_every_public_method_has_a_docstring() -> None:
    assert_methods_have_docstrings(Path(allspark.__file__).parent)


@pytest.mark.needs("sources")
def test_distribution_is_built_and_installed(tmp_path: Path) -> None:
    assert_is_installed("dashinfer", tmp_path)
