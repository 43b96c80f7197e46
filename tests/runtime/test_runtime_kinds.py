"""Kinds of engines that the runtime starts: their commands, variables, KV caches and GPUs."""

from __future__ import annotations

import os
import struct
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.runtime import RuntimeSettings
from penstock.runtime.engines import kvcached
from penstock.runtime.engines.commands import command_of, environment_of
from penstock.runtime.engines.flags import arguments_of
from penstock.runtime.engines.registry import Record
from penstock.runtime.errors import ApiError
from support.runtime.engines import BODY, MODELS, SCRIPT, activate, facts_of, settings_of
from support.runtime.runtime import Runtime, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SGLANG: dict[str, Any] = {
    "engine": "sglang",
    "engine_config": {"args": {"context-length": "2048", "tp-size": "1"}},
}


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    sglang = f"{sys.executable} {SCRIPT} {tmp_path}"
    with running(settings_of(tmp_path, sglang_command=sglang, engine_key="key")) as runtime:
        yield runtime


def record(kind: str, *arguments: str) -> Record:
    return Record("m", "org/repo", 20000, "kvc_m", list(arguments), engine=kind)


def test_each_kind_has_its_command() -> None:
    settings = RuntimeSettings(engine_command="vllm serve", sglang_command="python -m sglang.launch_server")
    served = ["--served-model-name", "m", "--host", "127.0.0.1"]

    def command(kind: str, found: RuntimeSettings = settings) -> list[str]:
        return command_of(record(kind), "org/repo", "/key", found)

    assert command("vllm") == ["vllm", "serve", "org/repo", *served]
    expected = ["python", "-m", "sglang.launch_server", "--model-path", "org/repo"]
    assert command("sglang") == [*expected, *served, "--enable-memory-saver"]
    expected = [sys.executable, "-m", "penstock", "serve", "org/repo"]
    assert command("penstock", RuntimeSettings()) == [*expected, *served, "--admin-api-key-file", "/key"]


def test_each_kind_has_its_variables() -> None:
    settings = RuntimeSettings(engine_key="key")
    own = {"PATH": "/bin", "PENSTOCK_RUNTIME_TOKEN": "secret", "PENSTOCK_ENGINE_KEY": "secret"}
    cached = {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1", "KVCACHED_IPC_NAME": "kvc_m"}
    assert environment_of(record("penstock"), settings, own) == {"PATH": "/bin"}
    assert environment_of(record("sglang"), settings, own) == {"PATH": "/bin", **cached}
    found = environment_of(record("vllm"), settings, own)
    assert found == {"PATH": "/bin", **cached, "VLLM_API_KEY": "key"}
    # Routes of development are for sleep only.
    found = environment_of(record("vllm", "--enable-sleep-mode"), settings, own)
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    # The operator's variables stay.
    given = {"ENABLE_KVCACHED": "false", "VLLM_API_KEY": "mine"}
    assert environment_of(record("vllm"), settings, given).items() >= given.items()
    assert "VLLM_API_KEY" not in environment_of(record("vllm"), RuntimeSettings(), {})


@pytest.mark.parametrize("sleeps", [False, True])
def test_engine_has_routes_of_development_for_sleep_only(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sleeps: bool
) -> None:
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    activate(runtime, engine_config={"args": {"--enable-sleep-mode": ""} if sleeps else {}})
    variables = facts_of(tmp_path)[0]["variables"]
    assert (variables["VLLM_API_KEY"], "VLLM_SERVER_DEV_MODE" in variables) == ("key", sleeps)


# ---- SGLang


def test_sglang_is_started_with_its_flags(runtime: Runtime, tmp_path: Path) -> None:
    port = activate(runtime, **SGLANG)["port"]
    [start] = facts_of(tmp_path)
    expected = ["--model-path", "org/repo", "--served-model-name", "m", "--host", "127.0.0.1"]
    flags = ["--enable-memory-saver", "--context-length=2048", "--tp-size=1"]
    assert start["arguments"] == [*expected, *flags, f"--port={port}"]
    assert "VLLM_API_KEY" not in start["variables"]
    [model] = runtime.ask("/v1/runtime/snapshot")[1]["models"]
    numbers = {"requests_running": 4, "requests_waiting": 5, "request_success_total": 6}
    assert model.items() >= numbers.items()
    status, error, _ = runtime.ask(f"{MODELS}/sleep", {"model_name": "m", "operation_id": "1"})
    assert (status, error["type"]) == (409, "ConflictError")
    assert len(facts_of(tmp_path)) == 1  # it was not asked
    # Another kind is another engine.
    assert runtime.ask(f"{MODELS}/activate", {**BODY, "engine_config": None})[0] == 409


@pytest.mark.parametrize("flag", ["mem-fraction-static", "max-model-len", "api-key", "trust-remote-code"])
def test_other_flags_of_sglang_are_refused(runtime: Runtime, flag: str) -> None:
    body = {**BODY, "engine": "sglang", "engine_config": {"args": {flag: "1"}}}
    status, error, _ = runtime.ask(f"{MODELS}/activate", body)
    assert (status, error["param"]) == (400, "engine_config.args")


def test_short_names_of_parallel_sizes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    sizes = {"tp-size": "2", "pp-size": "2"}
    assert arguments_of("sglang", sizes) == ["--tp-size=2", "--pp-size=2"]
    for wrong in ({"tp-size": "2"}, {"dp-size": "2"}):
        with pytest.raises(ApiError):
            arguments_of("sglang", wrong)


def test_sglang_needs_the_command_of_the_operator(tmp_path: Path) -> None:
    with running(settings_of(tmp_path)) as runtime:
        status, error, _ = runtime.ask(f"{MODELS}/activate", {**BODY, **SGLANG})
    assert (status, error["param"]) == (400, "engine")
    assert "--sglang-command" in error["message"]


# ---- operations


def test_operation_ids_are_those_of_an_action(runtime: Runtime) -> None:
    activate(runtime)
    phases = []
    for action in ("sleep", "wake"):
        body = {"model_name": "m", "operation_id": "1"}
        phases.append(runtime.ask(f"{MODELS}/{action}", body)[1]["phase"])
    assert phases == ["sleeping", "active"]


# ---- kvcached


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of segments, and a `kvctl` that writes its arguments and ends with the status of a file."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(kvcached, "_FOLDER", folder)
    program = tmp_path / "bin" / "kvctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/kvctl\necho no >&2\n[ ! -e {tmp_path}/broken ]\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return folder


def limit(runtime: Runtime, name: str, size: int, operation: str = "1") -> tuple[int, Any]:
    body = {"model_name": name, "limit_bytes": size, "operation_id": operation}
    return runtime.ask(f"{MODELS}/kv-limit", body)[:2]


def test_kv_limit_is_set_once_per_operation(runtime: Runtime, segments: Path, tmp_path: Path) -> None:
    name = "org/m-0.5"
    assert activate(runtime, model_name=name)["ipc_name"] == "kvc_org-m-0-5"
    (segments / "kvc_org-m-0-5").write_bytes(struct.pack("<3q", 1000, 300, 20) + b"more")
    (tmp_path / "broken").touch()
    status, error = limit(runtime, name, 5)
    assert (status, error["type"]) == (502, "ServerError")
    assert "status 1: no" in error["message"]
    (tmp_path / "broken").unlink()
    expected = {
        "status": "success",
        "model_name": name,
        "operation_id": "1",
        "applied": True,
        "phase": "active",
    }
    for _ in range(2):
        assert limit(runtime, name, 700) == (200, expected)
    calls = ["limit kvc_org-m-0-5 5", "limit kvc_org-m-0-5 700"]
    assert (tmp_path / "kvctl").read_text().splitlines() == calls
    [model] = runtime.ask("/v1/runtime/snapshot")[1]["models"]
    assert (model["kv_used_bytes"], model["kv_capacity_bytes"]) == (320, 1000)
    [model] = runtime.ask(MODELS)[1]["models"]
    assert (model["kv_used_bytes"], model["kv_total_bytes"]) == (320, 1000)
    prefix = "aibrix:modelclaim_kv"
    names = ("used_bytes", "total_bytes", "limit_requested_bytes", "limit_applied_bytes")
    assert [runtime.value(f"{prefix}_{name}") for name in names] == [320, 1000, 700, 700]
    for result in ("applied", "failed"):
        assert runtime.value(f"{prefix}_limit_operations_total", result=result) == 1


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_files_other_than_segments_are_not_read(segments: Path, tmp_path: Path, kind: str) -> None:
    place = segments / "m"
    if kind == "fifo":
        os.mkfifo(place)
    else:
        (tmp_path / "other").write_bytes(bytes(24))
        place.symlink_to(tmp_path / "other")
    assert kvcached.read_segment("m") is None


def test_kv_limit_needs_kvcached(
    runtime: Runtime, segments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(runtime)
    assert limit(runtime, "m", 5)[0] == 409  # no segment
    (segments / "kvc_m").write_bytes(b"short")
    assert limit(runtime, "m", 5)[0] == 409
    (segments / "kvc_m").write_bytes(bytes(24))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert limit(runtime, "m", 5)[0] == 409  # no kvctl
    assert not (tmp_path / "kvctl").exists()
    [model] = runtime.ask("/v1/runtime/snapshot")[1]["models"]
    assert (model["kv_used_bytes"], model["kv_capacity_bytes"]) == (0, 0)


def test_models_have_segments_of_their_own(runtime: Runtime) -> None:
    activate(runtime, model_name="a.b")
    for more in ({"model_name": "a-b"}, {"model_name": "c", "ipc_name": "kvc_a.b"}):
        status, error, _ = runtime.ask(f"{MODELS}/activate", {**BODY, **more})
        assert (status, error["param"]) == (409, "ipc_name")


# ---- GPUs


def nvml(used: dict[int, dict[int, int | None]], error: Exception | None = None) -> SimpleNamespace:
    """The library of NVIDIA with two GPUs, or with an error; `num_inits` counts what is not closed."""
    found = SimpleNamespace(NVMLError=LookupError, num_inits=0)

    def add(number: int) -> None:
        if error is not None:
            raise error
        found.num_inits += number

    found.nvmlInit = lambda: add(1)
    found.nvmlShutdown = lambda: add(-1)
    found.nvmlDeviceGetCount = lambda: 2
    found.nvmlDeviceGetHandleByIndex = lambda index: index
    found.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    found.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=100 + handle, free=50 + handle)
    found.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
        SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in used.get(handle, {}).items()
    ]
    return found


def test_snapshot_has_the_memory_of_gpus(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child").touch()
    activate(runtime)
    start = facts_of(tmp_path)[0]
    library = nvml(
        {0: {start["pid"]: 5, start["child"]: 7, 1: 90}, 1: {start["child"]: 3, start["pid"]: None}}
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    found = runtime.ask("/v1/runtime/snapshot")[1]
    sizes = [{"id": f"GPU-{i}", "hbm_total_bytes": 100 + i, "hbm_free_bytes": 50 + i} for i in range(2)]
    assert found["accelerators"] == sizes
    assert found["models"][0]["hbm_peak_bytes"] == 12
    assert runtime.value("aibrix:modelclaim_hbm_peak_bytes", model="m") == 12
    # The number is a peak, and a GPU that cannot be read does not hide the other.
    library = nvml({1: {start["pid"]: 4}})
    read = library.nvmlDeviceGetMemoryInfo
    library.nvmlDeviceGetMemoryInfo = lambda handle: read(handle) if handle else {}[handle]
    monkeypatch.setitem(sys.modules, "pynvml", library)
    found = runtime.ask("/v1/runtime/snapshot")[1]
    assert found["accelerators"] == sizes[1:]
    assert found["models"][0]["hbm_peak_bytes"] == 12
    assert library.num_inits == 0


def test_snapshot_without_a_gpu_has_none(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (nvml({}, LookupError()), None):
        monkeypatch.setitem(sys.modules, "pynvml", library)
        status, found, _ = runtime.ask("/v1/runtime/snapshot")
        assert (status, found["accelerators"]) == (200, [])
