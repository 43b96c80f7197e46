"""Generated files are fresh, and every class and property has a docstring."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parent.parent


def test_generated_files_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "-B", ROOT / "tools" / "generate", "--check"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("cls", [penstock.SamplingParams])
def test_every_field_has_a_docstring(cls: type) -> None:
    fields = inspect.signature(cls).parameters
    assert fields
    for name in fields:
        assert f"- `{name}`: " in (cls.__doc__ or "")
        documentation = inspect.getdoc(getattr(cls, name))
        assert documentation is not None
        assert "Default: " in documentation
