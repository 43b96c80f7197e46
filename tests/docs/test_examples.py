"""Every example runs with the command in its first line, most with the demo model by default, and prints."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.marks import rare_except
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: One of each API; the others are rare.
OWN = {
    *("blocking", "dashinfer_sync", "llama_cpp_chat", "lmdeploy_sessions", "on_trio", "stream"),
    "vllm_streams",
}
#: Examples that run with a model and all other arguments; the others have none.
ARGUMENTS = {"blocking": [], "stream": ["Why is the sky blue?"], "timeout": ["0.5"]}


@pytest.mark.parametrize(
    "example",
    rare_except(EXAMPLES, *(path for path in EXAMPLES if path.stem in OWN)),
    ids=lambda example: example.stem,
)
def test_example_runs(example: Path, demo_model: Path) -> None:
    more = ARGUMENTS.get(example.stem)
    arguments = [] if more is None else [str(demo_model), *more]
    done = subprocess.run(
        [sys.executable, "-W", "error", example, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert len(done.stdout) > 20
