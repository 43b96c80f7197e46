"""No call depends on the stack of its thread: 128 KiB, the default of musl, are enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.api.small_stacks import ENTRIES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.needs("fork")

STACK = 128 << 10


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of all entries, which run in one program."""
    home: Path = tmp_path_factory.mktemp("home")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # downloads fail at once
        "HF_HOME": str(home),
        "PENSTOCK_THREADS": "1",
        "PENSTOCK_DASHINFER_DEVICE": "cpu",
    }
    program = [sys.executable, "-m", "support.api.small_stacks", str(STACK)]
    ended = subprocess.run(program, stdout=subprocess.PIPE, env=environment, cwd=home, check=True)
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ENTRIES)
def test_a_part_of_the_library_runs_on_a_small_stack(name: str, errors: dict[str, str]) -> None:
    assert errors[name] == ""
