"""`Llama.from_pretrained`: real downloads from a local server with the hub's protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.api.ggufs import Type, write_gguf
from support.api.hub import BROKEN, GATED, MODEL, Hub, Repository, run_in_process, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: `huggingface_hub` reads its environment at import time, so each download runs in a new process.
OPEN = """
import sys
import penstock
from penstock.compat.llama_cpp import Llama
try:
    with Llama.from_pretrained(sys.argv[1], sys.argv[2], n_ctx=64, verbose=False) as llm:
        print(llm.n_ctx(), llm.model_path)
except (penstock.ModelLoadError, ValueError) as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture(scope="module")
def revisions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repository]:
    folder = tmp_path_factory.mktemp("main")
    for kind in (Type.Q8_0, Type.Q4_0):
        write_gguf(folder / f"model-{kind.name.lower()}.gguf", kind)
    return {"main": Repository(folder, "0" * 40)}


@pytest.fixture
def hub(revisions: dict[str, Repository]) -> Iterator[Hub]:
    with serving(revisions) as hub:
        yield hub


def opened(hub: Hub, home: Path, repo_id: str, pattern: str, **environment: str) -> str:
    """The context and the path, or the error."""
    done = run_in_process(hub, OPEN, home, repo_id, pattern, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_file_is_downloaded_and_opens_offline(revisions: dict[str, Repository], tmp_path: Path) -> None:
    with serving(revisions) as hub:
        found = opened(hub, tmp_path, MODEL, "*q4*")
        assert hub.asked_files("GET") == ["model-q4_0.gguf"]
    assert found.startswith("64 ")
    assert found.endswith("/model-q4_0.gguf")
    assert opened(hub, tmp_path, MODEL, "*q4*", HF_HUB_OFFLINE="1") == found
    assert opened(hub, tmp_path, MODEL, "model-q4_0.gguf") == found, "the offline flag is not needed"


def test_file_that_was_not_downloaded_is_an_error_offline(
    revisions: dict[str, Repository], tmp_path: Path
) -> None:
    message = (
        f"ModelLoadError: {MODEL}: not in the local cache, and the hub is offline; run this first: "
        f"hf download {MODEL} --include '*q4*'"
    )
    with serving(revisions) as hub:
        assert opened(hub, tmp_path, MODEL, "*q4*", HF_HUB_OFFLINE="1") == message
        opened(hub, tmp_path, MODEL, "*q8*")
    assert opened(hub, tmp_path, MODEL, "*q4*") == message


@pytest.mark.parametrize("pattern", ["*.gguf", "*.bin"])
def test_pattern_must_match_one_file(hub: Hub, tmp_path: Path, pattern: str) -> None:
    assert opened(hub, tmp_path, MODEL, pattern).startswith(f"ValueError: '{pattern}' matches ")
    assert hub.asked_files("GET") == []


@pytest.mark.parametrize(
    ("repo_id", "hint"),
    [
        ("acme/nothing", "not found on the hub"),
        (GATED, "accept the terms on the model's hub page"),
        (BROKEN, "the hub is offline"),
    ],
)
def test_error_of_the_hub_is_a_model_load_error(hub: Hub, tmp_path: Path, repo_id: str, hint: str) -> None:
    text = opened(hub, tmp_path, repo_id, "*q4*")
    assert text.startswith(f"ModelLoadError: {repo_id}: ")
    assert hint in text
    assert "\n" not in text
