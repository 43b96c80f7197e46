"""The code blocks of LMDeploy's document of `pipeline` run as they are written.

`tests/data/lmdeploy` has the blocks. The model id is a directory below the current one.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import pytest

from penstock.compat import lmdeploy
from penstock.compat.lmdeploy.serve.async_engine import AsyncEngine
from support.api.checkpoints import make_config, write_checkpoint
from support.paths import DATA, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.needs("sources")

BLOCKS = DATA / "lmdeploy"
ALIAS = ROOT / "python" / "aliases" / "lmdeploy"
MODEL = "internlm/internlm-chat-7b"
EARLY = "top_k top_p temperature repetition_penalty ignore_eos"
SESSION = "stream_response sequence_start sequence_end step request_output_len"
ARGUMENTS = "model_name backend backend_config chat_template_config instance_num tp"


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PENSTOCK_THREADS", "1")
    monkeypatch.syspath_prepend(ALIAS)
    monkeypatch.chdir(tmp_path)
    model = tmp_path / MODEL
    model.mkdir(parents=True)
    write_checkpoint(model, make_config("llama", max_position_embeddings=1024))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lmdeploy"]:
        del sys.modules[name]


@pytest.mark.parametrize("backend", ["pytorch", "turbomind"])
def test_documented_example_prints_two_texts(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = (BLOCKS / f"pipeline_{backend}.txt").read_text()
    assert f"pipeline('{MODEL}',  backend='{backend}', backend_config = backend_config)" in code
    names: dict[str, Any] = {}
    exec(compile(code, backend, "exec"), names)  # noqa: S102 - the document's code
    pipe, response = names["pipe"], names["response"]
    with pipe:
        assert [type(text) for text in response] == [str, str]
        assert capsys.readouterr().out == f"{response}\n"
        assert pipe.session_len == 1024
        assert response == [pipe(prompt, gen_config=names["gen_config"]) for prompt in pipe_prompts(code)]


def pipe_prompts(code: str) -> list[str]:
    """The prompts of a block."""
    prompts = ["hi", "say this is a test"]
    assert f"pipe({prompts}".replace(", ", ",") in code
    return prompts


def test_every_block_of_the_document_is_run() -> None:
    assert sorted(block.stem for block in BLOCKS.iterdir()) == ["pipeline_pytorch", "pipeline_turbomind"]


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("__init__", f"model_path {ARGUMENTS}"),
        (
            "__call__",
            f"prompts gen_config chat_template_config request_output_len {EARLY}",
        ),
        ("stop_session", "session_id"),
        ("end_session", "session_id"),
        ("get_generator", "stop session_id"),
        (
            "batch_infer",
            f"prompts gen_config chat_template_config request_output_len {EARLY}",
        ),
        (
            "generate",
            f"messages session_id gen_config chat_template_config {SESSION} stop stop_words {EARLY}",
        ),
    ],
)
def test_methods_have_the_documented_parameters(method: str, parameters: str) -> None:
    documented = ["self", *parameters.split()]
    assert list(inspect.signature(getattr(AsyncEngine, method)).parameters)[: len(documented)] == documented


def test_pipeline_takes_the_documented_arguments() -> None:
    names = [*ARGUMENTS.split(), "log_level"]
    assert set(names) <= inspect.signature(lmdeploy.pipeline).parameters.keys()
