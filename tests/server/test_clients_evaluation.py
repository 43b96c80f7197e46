"""lm-evaluation-harness and guidellm with a real server: they need the clients dependency group."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock
import penstock.server
from support.api.engines import make_engine
from support.paths import ROOT
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

QUESTIONS = (("The sky is", [" blue", " green"]), ("Grass is", [" green", " bluish"]))
NUM_REQUESTS, NUM_OUTPUT = 6, 8


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    with serving(penstock.server.app({"tiny": engine})) as server:
        yield server


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from the hub, and caches are in a folder of the test."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.needs("sources")
@pytest.mark.usefixtures("offline")
def test_harness_measures_the_log_likelihoods_of_the_engine(
    server: Served, engine: penstock.Engine, tiny_model: Path, tmp_path: Path
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    data = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": text, "choices": choices}) for text, choices in QUESTIONS]
    data.write_text("\n".join(lines))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    text = (ROOT / "docs" / "guide" / "connect-programs.md").read_text()
    [(beginning, name, end)] = re.findall(r"ARGS=(\S+)\n.* --model (\S+) --model_args \$ARGS(\S+)", text)
    arguments = dict(item.split("=", maxsplit=1) for item in f"{beginning}{end}".split(","))
    arguments["base_url"] = arguments["base_url"].replace("http://127.0.0.1:8000", server.url)
    arguments |= {"model": "tiny", "tokenizer": str(tiny_model), "max_length": "512"}
    found: Any = lm_eval.simple_evaluate(
        model=name,
        model_args=",".join(f"{key}={value}" for key, value in arguments.items()),
        tasks=[task],
        bootstrap_iters=0,
    )
    num_right = 0
    for (question, choices), sample in zip(QUESTIONS, found["samples"]["local"], strict=True):
        expected = []
        for choice in choices:
            score = engine.blocking.score(question + choice)
            num_choice = len(engine.encode(choice))
            expected.append(sum(value for value in score.logprobs[-num_choice:] if value is not None))
        num_right += expected[0] == max(expected)
        measured = [response[0][0] for response in sample["resps"]]
        assert measured == pytest.approx(expected, abs=1e-4)
    assert found["results"]["local"]["acc,none"] == num_right / len(QUESTIONS)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm_gets_all_tokens_of_all_requests(
    server: Served, tiny_model: Path, tmp_path: Path, route: str
) -> None:
    pytest.importorskip("guidellm")
    report = tmp_path / "report.json"
    backend = f"kind=openai_http,target={server.url},model=tiny,request_format={route}"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    command += ["--backend", backend, "--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tiny_model}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={NUM_OUTPUT}"]
    command += ["--output", f"kind=json,path={report}"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == NUM_REQUESTS
    assert benchmark["metrics"]["request_totals"]["errored"] == 0
    outputs = [request["output_metrics"]["text_tokens"] for request in benchmark["requests"]["successful"]]
    assert outputs == [NUM_OUTPUT] * NUM_REQUESTS
