"""Helpers for the tests of the alias distributions: a fresh interpreter, docstrings, an installation."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

ALIASES = ROOT / "python" / "aliases"


def run(code: str, *paths: Path) -> str:
    """The output of Python code in a fresh interpreter that finds modules in `paths` first."""
    code = f"import sys\nsys.path[:0] = {[str(path) for path in paths]}\n{code}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout


def assert_methods_have_docstrings(package: Path) -> None:
    """Every public method of the public classes below this directory has a docstring."""
    for source in package.rglob("*.py"):
        for item in ast.walk(ast.parse(source.read_text())):
            if not isinstance(item, ast.ClassDef) or item.name.startswith("_"):
                continue
            missing = [
                method.name
                for method in item.body
                if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef))
                and not method.name.startswith("_")
                and not ast.get_docstring(method)
                and "overload" not in map(ast.unparse, method.decorator_list)
            ]
            assert missing == [], f"{source.name}: {item.name}"


def assert_is_installed(name: str, directory: Path, dependency: str = "penstock-llm") -> None:
    """The distribution of the package `name` is built, and installed in a directory that has nothing else."""
    alias = ALIASES / name
    project = tomllib.loads((alias / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["dependencies"]) == (f"penstock-{name}", [dependency])
    assert project["classifiers"] == ["Private :: Do Not Upload"]
    assert project["description"].endswith("Installed from Penstock's repository only.")
    pytest.importorskip("setuptools", "70.1")
    source, site = directory / "source", directory / "site"
    subprocess.run(["cp", "-r", alias, source], check=True)  # noqa: S607 - the build writes beside the source
    command = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    subprocess.run([sys.executable, *command, site, source], check=True, timeout=100)
    assert run(f"import {name}; print({name}.__file__)", site).startswith(str(directory))
