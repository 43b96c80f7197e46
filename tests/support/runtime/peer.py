"""Requests for AIBrix's released runtime and for this one, and their answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from support.api.engines import wait_until
from support.paths import DATA
from support.runtime.runtime import Answer, FakeEngine, Runtime, closed_port
from support.server.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The answers of the released runtime, version 0.8.0, by the names of the exchanges.
ANSWERS = DATA / "aibrix" / "runtime_answers.json"

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_ADAPTER = {"lora_name": "sql", "lora_path": "org/sql"}
_MODELS = (DATA / "aibrix" / "vllm_models.json").read_bytes()


class Exchange(NamedTuple):
    """A request, and the answers of the engine to the runtime's own."""

    path: str
    body: object = None
    method: str | None = None
    engine: dict[str, Answer] = {}  # noqa: RUF012 - never changed


def _engine_error(status: int, message: str) -> Answer:
    """An error of vLLM."""
    fields = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": status}
    return Answer(status, json.dumps(fields).encode(), {"content-type": "application/json"})


_NOT_FOUND = "The lora adapter 'sql' cannot be found."
EXCHANGES = {
    "health": Exchange("/healthz"),
    "ready": Exchange("/ready"),
    "models": Exchange("/v1/models", engine={"/v1/models": Answer(body=_MODELS)}),
    "models of a broken engine": Exchange("/v1/models", engine={"/v1/models": Answer(500, b"broken")}),
    "load": Exchange("/v1/lora_adapter/load", _ADAPTER, engine={_LOAD: Answer(body=b"Success")}),
    "load of a loaded adapter": Exchange(
        "/v1/lora_adapter/load",
        _ADAPTER,
        engine={_LOAD: _engine_error(400, "The lora adapter 'sql' has already been loaded.")},
    ),
    "load that fails": Exchange(
        "/v1/lora_adapter/load", _ADAPTER, engine={_LOAD: _engine_error(404, "No adapter found for org/sql")}
    ),
    "load without an engine's route": Exchange("/v1/lora_adapter/load", _ADAPTER),
    "load without a path": Exchange("/v1/lora_adapter/load", {"lora_name": "sql"}),
    "load without a body": Exchange("/v1/lora_adapter/load", method="POST"),
    "unload": Exchange(
        "/v1/lora_adapter/unload", {"lora_name": "sql"}, engine={_UNLOAD: Answer(body=b"Success")}
    ),
    "unload of no adapter": Exchange(
        "/v1/lora_adapter/unload", {"lora_name": "sql"}, engine={_UNLOAD: _engine_error(404, _NOT_FOUND)}
    ),
    "unload of no adapter in older vLLM": Exchange(
        "/v1/lora_adapter/unload", {"lora_name": "sql"}, engine={_UNLOAD: _engine_error(400, _NOT_FOUND)}
    ),
    "unload without a name": Exchange("/v1/lora_adapter/unload", {}),
    "list": Exchange("/v1/model/list", {"local_dir": "FOLDER"}, method="GET"),
    "list without a folder": Exchange("/v1/model/list", {}, method="GET"),
    "download without a model": Exchange("/v1/model/download", {}),
    "unknown path": Exchange("/v1/nothing"),
    "another method": Exchange("/v1/lora_adapter/load", method="GET"),
    "engines": Exchange("/v1/runtime/models"),
    "snapshot": Exchange("/v1/runtime/snapshot"),
    "end of an unknown engine": Exchange("/v1/runtime/models/deactivate", {"model_name": "m"}),
    "sleep of an unknown engine": Exchange(
        "/v1/runtime/models/sleep", {"model_name": "m", "level": 1, "operation_id": "1"}
    ),
    "sleep without a level": Exchange("/v1/runtime/models/sleep", {"model_name": "m", "operation_id": "1"}),
    "end without a model": Exchange("/v1/runtime/models/deactivate", {}),
}


def answers_of(runtime: Runtime, engine: FakeEngine, folder: Path) -> dict[str, Any]:
    """The status and the body of each exchange; `FOLDER` in a request is the empty folder for models."""
    found = {}
    for name, exchange in EXCHANGES.items():
        engine.answers = {path: [answer] for path, answer in exchange.engine.items()}
        body = json.loads(json.dumps(exchange.body).replace("FOLDER", str(folder)))
        status, answer, _ = runtime.ask(exchange.path, body, method=exchange.method)
        if isinstance(answer, bytes):
            answer = answer.decode()
        if name == "snapshot" and status == HTTPStatus.OK:
            answer["observed_at"] = "TIME"
        found[name] = {"status": status, "body": answer}
    return found


@contextmanager
def released(program: Path, folder: Path) -> Iterator[tuple[Runtime, FakeEngine]]:
    """The released runtime, of this program, and its engine. Its files are in a folder."""
    port = closed_port()
    with serving(FakeEngine()) as engine:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "INFERENCE_ENGINE": "vllm",
            "INFERENCE_ENGINE_ENDPOINT": engine.url,
            "PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics"),
        }
        command = [str(program), "--host", "127.0.0.1", "--port", str(port)]
        log = (folder / "log").open("wb")
        with log, subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log) as process:
            try:
                wait_until(lambda: is_listening(port))
                yield Runtime(None, port), engine.application
            finally:
                process.terminate()


def is_listening(port: int) -> bool:
    """Whether a connection to a port is accepted."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
