"""Generated files are fresh, and every public class, method and property has a docstring at run time."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import penstock
from support.paths import ROOT

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
        assert "Default: " in " ".join(documentation.split())


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_public_class_and_member_has_a_docstring(cls: type) -> None:
    assert inspect.getdoc(cls)
    members = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
    undocumented = [name for name, value in members.items() if not inspect.getdoc(value)]
    assert not undocumented


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"type": "bool", "sumary": "typo"', "field: unknown keys: sumary"),
        ('"type": "integer"', "field: unknown type 'integer'"),
        ('"type": "enum", "enum": "Color"', "field: unknown enum 'Color'"),
        ('"type": "int", "rust": "i32", "min": 0', "field: an int without `max`"),
        ('"type": "float", "min": 0.0', "field: a number needs `min`"),
        ('"type": "texts", "max_chars": 3', "field: a sequence needs `max_items`"),
        ('"type": "custom"', "field: the type custom needs a `reader`"),
        ('"type": "bool", "default": True', "missing 1 required positional argument: 'summary'"),
    ],
)
def test_invalid_definition_is_refused_by_name(entry: str, message: str) -> None:
    summary = "" if "required" in message else '"summary": "A summary", '
    code = (
        f'import definitions as d; d.build(d.Field, "field", {{"name": "x", "group": "g", {summary}{entry}}})'
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT / "tools" / "generate",
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
