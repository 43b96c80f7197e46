"""The distribution `penstock-aibrix`: the commands of AIBrix's runtime."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from penstock import ConfigError
from penstock.runtime.downloader import InvalidArgumentError, Options
from penstock.runtime.settings import settings_of_environment
from support.compat.aliases import ALIASES, assert_is_installed
from support.runtime.runtime import FakeEngine
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from pathlib import Path

SCRIPTS = tomllib.loads((ALIASES / "aibrix" / "pyproject.toml").read_text())["project"]["scripts"]


def started(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    """The process of a command."""
    module, _, name = SCRIPTS[script].partition(":")
    code = f"from {module} import {name}; {name}()"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)], stderr=subprocess.PIPE
    )


@pytest.mark.needs("sources")
def test_package_is_installed_from_its_sources(tmp_path: Path) -> None:
    assert_is_installed("aibrix", tmp_path, "penstock-llm[runtime]")


@pytest.mark.needs("sources")
def test_aibrix_runtime_takes_its_documented_options() -> None:
    arguments = ("--port", 0, "--host", "127.0.0.1", "--enable-fastapi-docs")
    with started("aibrix_runtime", *arguments) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(rb"listening on http://127.0.0.1:(\d+)", line)
            assert found, line
            server = Served(None, int(found[1]))
            assert server.ask("/healthz")[:2] == (200, {"status": "ok"})
        finally:
            process.terminate()
        process.stderr.read()
    assert process.returncode == 0


@pytest.mark.needs("sources")
def test_aibrix_runtime_reads_the_environment_of_aibrix(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.show_metrics("sglang:num_queue_reqs 2\n")
    with serving(engine) as served:
        monkeypatch.setenv("INFERENCE_ENGINE", "sglang")
        monkeypatch.setenv("INFERENCE_ENGINE_ENDPOINT", served.url)
        with started("aibrix_runtime", "--port", 0) as process:
            assert process.stderr is not None
            found = re.search(rb":(\d+)$", process.stderr.readline().strip())
            assert found
            _, text, _ = Served(None, int(found[1])).ask("/metrics")
            process.kill()
    assert b"\naibrix:queue_size 2.0\n" in text


@pytest.mark.needs("sources")
def test_invalid_variable_of_the_downloader_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOWNLOADER_NUM_THREADS", "x")
    with started("aibrix_runtime", "--port", 0) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        if b"listening" in lines[0]:
            process.kill()
        lines += process.stderr.readlines()
    assert process.returncode == 2
    assert b"DOWNLOADER_NUM_THREADS" in b"".join(lines)


def test_settings_have_the_variables_of_aibrix() -> None:
    environment = {
        "INFERENCE_ENGINE": "trtllm",
        "INFERENCE_ENGINE_VERSION": "1.0",
        "INFERENCE_ENGINE_ENDPOINT": "http://engine:9",
        "METRIC_SCRAPE_PATH": "prometheus/metrics",
        "METRICS_ENABLE_TRANSFORMATION": "0",
        "METRICS_RAW_PASSTHROUGH_MODE": "yes",
        "DOWNLOADER_LOCAL_DIR": "/m",
        "AIBRIX_ENGINE_REGISTRY_PATH": "/r",
    }
    assert settings_of_environment(environment) == {
        "engine": "trtllm",
        "engine_version": "1.0",
        "engine_endpoint": "http://engine:9",
        "scrape_path": "prometheus/metrics",
        "rename_metrics": False,
        "raw_metrics": True,
        "model_dir": "/m",
        "registry_path": "/r",
    }
    assert settings_of_environment({}) == {}
    assert settings_of_environment({"METRICS_RAW_PASSTHROUGH_MODE": " "}) == {}


@pytest.mark.parametrize("text", ["2", "treu", "ja"])
def test_variable_that_is_neither_true_nor_false_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="METRICS_RAW_PASSTHROUGH_MODE"):
        settings_of_environment({"METRICS_RAW_PASSTHROUGH_MODE": text})
    with pytest.raises(InvalidArgumentError, match="DOWNLOADER_FORCE_DOWNLOAD"):
        Options.load("org/name", environment={"DOWNLOADER_FORCE_DOWNLOAD": text})


@pytest.mark.needs("sources")
def test_aibrix_runtime_listens_on_all_addresses_by_default() -> None:
    with started("aibrix_runtime", "--port", 0) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.kill()
    assert b"listening on http://0.0.0.0:" in line
