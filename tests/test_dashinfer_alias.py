"""The distribution `penstock-dashinfer`: its package `dashinfer` has the objects of `penstock.compat`."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.compat.dashinfer import allspark

ROOT = Path(__file__).parent.parent
ALIAS = ROOT / "python" / "aliases" / "dashinfer"


def run(code: str, *paths: Path) -> str:
    code = f"import sys\nsys.path[:0] = {[str(path) for path in paths]}\n{code}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout


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
    for source in Path(allspark.__file__).parent.glob("*.py"):
        for item in ast.walk(ast.parse(source.read_text())):
            if not isinstance(item, ast.ClassDef) or item.name.startswith("_"):
                continue
            methods = [part for part in item.body if isinstance(part, ast.FunctionDef)]
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
    assert (project["name"], project["dependencies"]) == ("penstock-dashinfer", ["penstock"])
    pytest.importorskip("setuptools", "70.1")
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", ALIAS, source], check=True)  # noqa: S607 - the build writes beside the source
    command = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    subprocess.run([sys.executable, *command, tmp_path / "site", source], check=True, timeout=100)
    assert run("import dashinfer; print(dashinfer.__file__)", tmp_path / "site").startswith(str(tmp_path))
