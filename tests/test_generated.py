"""Generated files are fresh, and every public class, method and property has a docstring at run time."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parent.parent
CLASSES = [value for name in penstock.__all__ if inspect.isclass(value := getattr(penstock, name))]


def test_generated_files_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "-B", ROOT / "tools" / "generate", "--check"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("cls", [penstock.EngineConfig, penstock.SamplingParams])
def test_every_option_is_documented_with_its_default(cls: type) -> None:
    fields = inspect.signature(cls).parameters
    assert fields
    for name in fields:
        assert f"- `{name}`: " in (cls.__doc__ or "")
        documentation = inspect.getdoc(getattr(cls, name))
        assert documentation is not None
        assert "Default: " in documentation


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_public_class_and_member_has_a_docstring(cls: type) -> None:
    assert inspect.getdoc(cls)
    members = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
    undocumented = [name for name, value in members.items() if not inspect.getdoc(value)]
    assert not undocumented
