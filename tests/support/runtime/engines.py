"""Engines that a runtime starts: processes of `engine_script.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.runtime import RuntimeSettings
from support.api.engines import wait_until
from support.runtime.runtime import TOKEN

if TYPE_CHECKING:
    from support.runtime.runtime import Runtime

SCRIPT = Path(__file__).parent / "engine_script.py"
MODELS = "/v1/runtime/models"
BODY: dict[str, Any] = {
    "model_name": "m",
    "artifact_url": "hf://org/repo",
    "engine": "vllm",
    "engine_config": {"args": {"--max-model-len": "2048"}},
    "claim_ref": {"namespace": "n", "name": "c", "uid": "u"},
}


def settings_of(folder: Path, **more: Any) -> RuntimeSettings:
    """The settings of a runtime with all files in a folder."""
    found = {
        "engine_command": f"{sys.executable} {SCRIPT} {folder}",
        "registry_path": str(folder / "engines.json"),
        "model_dir": str(folder / "models"),
        "adapter_dir": str(folder / "adapters"),
        "tokens": (TOKEN,),
    }
    return RuntimeSettings(**{**found, **more})


def facts_of(folder: Path) -> list[dict[str, Any]]:
    """The starts of engines, and their requests."""
    file = folder / "engine.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def activate(runtime: Runtime, **more: Any) -> dict[str, Any]:
    """Start an engine; returns the answer when it is ready."""
    status, answer, _ = runtime.ask(f"{MODELS}/activate", {**BODY, **more})
    assert status == 200, answer
    wait_until(lambda: all(model["ready"] for model in runtime.ask(MODELS)[1]["models"]))
    return dict(answer)
