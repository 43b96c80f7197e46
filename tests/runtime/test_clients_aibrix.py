"""The released runtime of AIBrix answers as the stored answers say; `make test-clients` installs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.runtime.peer import ANSWERS, answers_of, released

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]

#: In an environment of its own, because its dependencies are older than those of other clients.
PROGRAM = Path(sys.prefix) / "aibrix" / "bin" / "aibrix_runtime"


def test_released_runtime_has_the_stored_answers(tmp_path: Path) -> None:
    if not PROGRAM.exists():
        pytest.skip("needs the released runtime: make test-clients")
    folder = tmp_path / "models"
    folder.mkdir()
    with released(PROGRAM, tmp_path) as (runtime, engine):
        assert answers_of(runtime, engine, folder) == json.loads(ANSWERS.read_text())
