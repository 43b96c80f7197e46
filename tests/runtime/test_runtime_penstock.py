"""The runtime in front of Penstock's own server, and as a process: its end, its log and its memory."""

from __future__ import annotations

import compileall
import re
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.runtime import RuntimeSettings
from support.api.adapters import write_adapter
from support.api.engines import start_python
from support.runtime.remote import serving_files
from support.runtime.runtime import Runtime, closed_port, running
from support.server.lora_server import CONFIG, LoraServer, lora_server

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

LOAD, UNLOAD = "/v1/lora_adapter/load", "/v1/lora_adapter/unload"
SECRET = "very-secret-token"  # noqa: S105 - of this test


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraServer]:
    with lora_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def runtime(server: LoraServer) -> Iterator[Runtime]:
    settings = RuntimeSettings(
        engine="penstock",
        engine_endpoint=server.url,
        engine_key="boss",
        adapter_dir=str(server.root),
        artifact_hosts=("127.0.0.1",),
    )
    with running(settings) as runtime:
        yield runtime


def completion(server: LoraServer, model: str) -> Any:
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    status, answer, _ = server.ask("/v1/completions", body)
    return answer["choices"][0]["token_ids"] if status == 200 else status


def names(runtime: Runtime) -> list[str]:
    return [row["id"] for row in runtime.ask("/v1/models")[1]["data"]]


def test_adapter_of_a_path_is_loaded_and_unloaded(runtime: Runtime, server: LoraServer) -> None:
    path = str(server.root / "one")
    assert runtime.ask(LOAD, {"lora_name": "direct", "lora_path": path})[0] == 200
    assert names(runtime) == ["base", "direct"]
    assert completion(server, "direct") != completion(server, "base")
    assert runtime.ask(UNLOAD, {"lora_name": "direct"})[1]["was_loaded"] is True
    assert runtime.ask(UNLOAD, {"lora_name": "direct"})[1]["was_loaded"] is False
    assert completion(server, "direct") == 404
    assert names(runtime) == ["base"]


def test_adapter_of_a_hub_is_downloaded_and_loaded(
    runtime: Runtime, server: LoraServer, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", CONFIG, seed=7)
    with serving_files() as hub:
        hub.models["org/lora"] = {path.name: path.read_bytes() for path in folder.iterdir()}
        body = {"lora_name": "my.lora", "artifact_url": "huggingface://org/lora"}
        status, answer, _ = runtime.ask(LOAD, {**body, "additional_config": {"hf_endpoint": hub.url}})
        assert (status, answer["status"]) == (200, "success")
        assert completion(server, "my.lora") != completion(server, "base")
        assert runtime.ask(UNLOAD, {"lora_name": "my.lora"})[0] == 200
    assert not (server.root / "my.lora").exists()


def test_missing_and_damaged_adapters_are_typed_errors(runtime: Runtime, server: LoraServer) -> None:
    (server.root / "bad").mkdir()
    (server.root / "bad" / "adapter_config.json").write_text("{")
    for name in ("none", "bad"):
        status, error, _ = runtime.ask(LOAD, {"lora_name": name, "lora_path": str(server.root / name)})
        assert (400 <= status < 500, error["object"]) == (True, "error")
        assert runtime.ask("/healthz")[0] == 200


def test_metrics_of_penstock_have_common_names(runtime: Runtime, server: LoraServer) -> None:
    completion(server, "base")
    families = runtime.families()
    common = {name.removeprefix("aibrix:") for name in families if name.startswith("aibrix:")}
    assert common >= {
        *("queue_size", "kv_cache_usage_perc", "gpu_cache_usage_perc", "prompt_tokens", "generation_tokens"),
        *("request_success", "time_to_first_token_seconds", "time_per_output_token_seconds"),
        *("e2e_request_latency_seconds", "engine_up"),
    }
    [own] = [sample.value for sample in families["aibrix:generation_tokens"].samples]
    assert own == sum(sample.value for sample in families["vllm:generation_tokens"].samples) > 0


class Started(Runtime):
    """A runtime in a process of its own."""

    process: subprocess.Popen[bytes]


@contextmanager
def started(*arguments: object) -> Iterator[Started]:
    """`penstock runtime` with these arguments; a thread reads its log."""
    code = "from penstock.cli import main; main()"
    process = start_python(code, "runtime", "--port", 0, *arguments)
    log: list[bytes] = []
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        address = re.search(rb"listening on http://[^ ]*:(\d+)", line)
        assert address, line + process.stderr.read()
        reader = threading.Thread(target=log.extend, args=(process.stderr,))
        reader.start()
        runtime = Started(log, int(address[1]))
        runtime.process = process
        yield runtime
        process.terminate()
        assert process.wait(20) == 0
        reader.join()
    finally:
        process.kill()
        process.communicate()


def test_process_is_small_and_ends_with_status_0(tmp_path: Path) -> None:
    # The byte code that an installed package has: compiling it takes memory.
    compileall.compile_dir(Path(penstock.__file__).parent, quiet=1)
    # The peak varies by 3 MiB; the least of some runs is that of the process.
    peaks: list[int] = []
    while len(peaks) < 5 and not any(peak <= 60 << 10 for peak in peaks):
        peaks.append(peak_of_process(tmp_path))
    assert min(peaks) <= 60 << 10, peaks


def peak_of_process(folder: Path) -> int:
    """The peak of the memory of a runtime, in KiB, after 1,000 requests of every kind."""
    tokens = folder / "tokens"
    tokens.write_text(SECRET + "\n")
    arguments = ("--token-file", tokens, "--engine-endpoint", f"http://127.0.0.1:{closed_port()}")
    with started(*arguments) as runtime:
        key = {"Authorization": f"Bearer {SECRET}"}
        for number in range(1000):
            path = ("/healthz", "/metrics", "/v1/models", "/v1/model/list")[number % 4]
            assert runtime.ask(path, headers=key)[0] in (200, 502)
        assert runtime.ask(LOAD, {"lora_name": "a", "lora_path": "a/b"}, headers=key)[0] == 502
        assert runtime.ask(LOAD, {"lora_name": "a", "lora_path": "a/b"})[0] == 401
        with runtime.send(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * (1 << 20)) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 431 ")
        # The library of downloads is imported then.
        body = {"model_uri": "s3://bucket/model/", "download_extra_config": {"ak": "x"}}
        assert runtime.ask("/v1/model/download", body, headers=key)[0] == 422
        [peak] = re.findall(r"VmHWM:\s+(\d+)", _status(runtime.process.pid))
    log = b"".join(runtime.application)
    assert b"the engine is vllm at http://127.0.0.1:" in log
    assert b"POST /v1/lora_adapter/load status=401" in log
    assert SECRET.encode() not in log
    return int(peak)


def _status(pid: int) -> str:
    from pathlib import Path

    return Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--engine-endpoint", "localhost:8000"),
        ("--scrape-timeout", "0"),
        ("--max-downloads", "-1"),
        ("--strict-compat", "--ready-checks-engine"),
    ],
)
def test_invalid_options_end_with_status_2(arguments: tuple[str, ...]) -> None:
    process = start_python("from penstock.cli import main; main()", "runtime", *arguments)
    _, log = process.communicate(timeout=60)
    assert (process.returncode, b"is not allowed: it must be" in log) == (2, True)
