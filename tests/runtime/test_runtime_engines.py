"""`/v1/runtime`: starting and stopping engines, sleep and wake, lists; real processes and real sockets."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from penstock.cli.serve import serve
from penstock.runtime.engines import engine
from penstock.runtime.engines.flags import arguments_of
from penstock.runtime.engines.process import start_time_of
from penstock.runtime.errors import ApiError
from penstock.runtime.exposition import parsed
from support.api.engines import wait_until
from support.runtime.engines import BODY, MODELS, activate, facts_of, settings_of
from support.runtime.remote import COMMIT, files_of, serving_files
from support.runtime.runtime import Runtime, running

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    monkeypatch.setenv("PENSTOCK_RUNTIME_TOKEN", "secret")
    with running(settings_of(tmp_path)) as runtime:
        yield runtime


def test_activate_starts_one_process_for_equal_requests(runtime: Runtime, tmp_path: Path) -> None:
    answers: list[Any] = []
    path = f"{MODELS}/activate"
    threads = [threading.Thread(target=lambda: answers.append(runtime.ask(path, BODY))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for status, _, _ in answers} == {200}
    first = activate(runtime)
    assert {answer["port"] for _, answer, _ in answers} == {first["port"]}
    assert 20000 <= first["port"] <= 20999
    assert (first["status"], first["model_name"], first["ipc_name"]) == ("success", "m", "kvc_m")
    [start] = facts_of(tmp_path)
    arguments = ["org/repo", "--served-model-name", "m", "--host", "127.0.0.1", "--max-model-len=2048"]
    assert start["arguments"] == [*arguments, f"--port={first['port']}"]
    assert start["secrets"] == []
    [model] = runtime.ask(MODELS)[1]["models"]
    assert (
        model.items() >= {"model_name": "m", "port": first["port"], "phase": "active", "ready": True}.items()
    )


def test_engine_that_starts_is_active_but_not_ready(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "not-ready").touch()
    assert runtime.ask(f"{MODELS}/activate", BODY)[0] == 200
    [model] = runtime.ask(MODELS)[1]["models"]
    assert (model["phase"], model["ready"]) == ("active", False)
    assert runtime.ask("/v1/runtime/snapshot")[1]["cached_artifacts"] == []
    status, error, _ = runtime.ask(f"{MODELS}/sleep", {"model_name": "m", "operation_id": "1"})
    assert (status, error["type"]) == (409, "ConflictError")


def test_other_options_of_an_active_model_are_a_conflict(runtime: Runtime) -> None:
    activate(runtime)
    for more in ({"artifact_url": "org/other"}, {"engine_config": None}, {"port": 20999}):
        status, error, _ = runtime.ask(f"{MODELS}/activate", {**BODY, **more})
        assert (status, error["type"], error["status"]) == (409, "ConflictError", "error")


def test_deactivate_ends_the_process_and_can_be_repeated(runtime: Runtime, tmp_path: Path) -> None:
    activate(runtime)
    pid = facts_of(tmp_path)[0]["pid"]
    for _ in range(2):
        status, answer, _ = runtime.ask(f"{MODELS}/deactivate", {"model_name": "m", "mode": "stop"})
        assert (status, answer["status"]) == (200, "success")
        assert start_time_of(pid) is None
    assert runtime.ask(MODELS)[1] == {"models": []}
    # The files of the model stay: AIBrix prefers such a machine.
    assert runtime.ask("/v1/runtime/snapshot")[1]["cached_artifacts"] == ["hf://org/repo"]


def test_end_of_the_runtime_ends_its_engines(tmp_path: Path) -> None:
    with running(settings_of(tmp_path)) as runtime:
        activate(runtime)
        pid = facts_of(tmp_path)[0]["pid"]
    assert start_time_of(pid) is None


@pytest.mark.parametrize(
    ("url", "config"),
    [
        (f"org/repo@{COMMIT}", {}),
        (f"HF://org/repo@{COMMIT}", {}),
        ("org/repo", {"hf_revision": COMMIT}),
        ("hf://org/repo", {"hf_revision": COMMIT}),
    ],
)
def test_model_of_the_hub_with_a_revision_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, config: dict[str, str]
) -> None:
    with serving_files() as hub:
        hub.models["org/repo"] = {"config.json": b"{}"}
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with running(settings_of(tmp_path)) as runtime:
            activate(runtime, artifact_url=url, additional_config=config)
        assert {asked.path for asked in hub.asked("/revision/")} == {
            f"/api/models/org/repo/revision/{COMMIT}"
        }
    [start] = facts_of(tmp_path)
    path = Path(start["arguments"][0])
    assert path.is_relative_to(tmp_path / "models")
    assert files_of(path) == {"config.json": b"{}"}


def test_deactivate_ends_an_activation_that_downloads(tmp_path: Path) -> None:
    with serving_files() as hub, running(settings_of(tmp_path, artifact_hosts=("127.0.0.1",))) as runtime:
        hub.files["/m.gguf"] = b"m" * 100_000
        hub.stop_after(1)
        body = {**BODY, "artifact_url": f"{hub.url}/m.gguf"}
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(runtime.ask(f"{MODELS}/activate", body)))
        thread.start()
        assert hub.is_stopped.wait(20)
        assert runtime.ask(f"{MODELS}/deactivate", {"model_name": "m"})[0] == 200
        hub.stop_after(None)
        thread.join()
        [(status, error, _)] = answers
        assert (status, error["type"], error["status"]) == (409, "ConflictError", "error")
        assert facts_of(tmp_path) == []
        # The next one does not join the cancelled one.
        assert runtime.ask(f"{MODELS}/activate", body)[0] == 200


def test_engine_is_started_after_the_end_of_the_last_one(tmp_path: Path) -> None:
    (tmp_path / "deaf").touch()
    may_end = threading.Event()

    async def sleep(seconds: float) -> None:
        if seconds < 1:  # while an engine ends
            await anyio.to_thread.run_sync(may_end.wait)
        else:
            await anyio.sleep_forever()

    with running(settings_of(tmp_path)) as runtime:
        activate(runtime)
        state = runtime.application.state
        state.supervisor._sleep = sleep
        answers: list[int] = []

        def change(path: str, body: dict[str, Any]) -> threading.Thread:
            thread = threading.Thread(target=lambda: answers.append(runtime.ask(f"{MODELS}/{path}", body)[0]))
            thread.start()
            return thread

        threads = [change("deactivate", {"model_name": "m"})]
        try:
            wait_until(lambda: runtime.ask(MODELS)[1]["models"][0]["phase"] == "stopping")
            threads.append(change("activate", BODY))
            wait_until(lambda: state.engine_operations.num_requests(("change", "m")) == 2)
            assert len(facts_of(tmp_path)) == 1
        finally:
            may_end.set()
            for thread in threads:
                thread.join()
        assert answers == [200, 200]
        wait_until(lambda: len(facts_of(tmp_path)) == 2)
        assert start_time_of(facts_of(tmp_path)[0]["pid"]) is None


@pytest.mark.parametrize(
    ("more", "status", "param"),
    [
        ({"model_name": ""}, 400, "model_name"),
        ({"model_name": "-m"}, 400, "model_name"),
        ({"model_name": "a b"}, 400, "model_name"),
        ({"engine": "sglang"}, 400, "engine"),
        ({"port": 80}, 400, "port"),
        ({"port": -1}, 400, "port"),
        ({"ipc_name": "../x"}, 400, "ipc_name"),
        ({"artifact_url": "/etc"}, 400, "artifact_url"),
        ({"artifact_url": "--config=/etc/x"}, 400, "artifact_url"),
        ({"artifact_url": "ftp://x/y"}, 400, "artifact_url"),
        ({"artifact_url": "http://10.0.0.1/m.gguf"}, 403, None),
        ({"artifact_url": "s3://b"}, 422, "model_uri"),
        ({"engine_config": {"args": {"--trust-remote-code": ""}}}, 400, "engine_config.args"),
        ({"engine_config": {"args": {"--api-key": "x"}}}, 400, "engine_config.args"),
        ({"engine_config": {"args": {"--host": "::"}}}, 400, "engine_config.args"),
        ({"engine_config": {"args": {"--gpu-memory-utilization": "0.5"}}}, 400, "engine_config.args"),
        ({"engine_config": {"args": {"--data-parallel-size": "2"}}}, 400, "data-parallel-size"),
        ({"engine_config": {"args": {"--tensor-parallel-size": "0"}}}, 400, "tensor-parallel-size"),
        ({"engine_config": {"args": {"--dtype": "--port=80"}}}, 400, "engine_config.args.--dtype"),
        ({"engine_config": {"args": {"--dtype": "a b"}}}, 400, "engine_config.args.--dtype"),
        ({"engine_config": {"args": ["--dtype"]}}, 422, "engine_config.args"),
        ({"engine_config": {"env": {}}}, 422, "engine_config.env"),
        ({"x": 1}, 422, "x"),
    ],
)
def test_invalid_activation_starts_nothing(
    shared: Runtime, more: dict[str, Any], status: int, param: str | None
) -> None:
    found, error, _ = shared.ask(f"{MODELS}/activate", {**BODY, **more})
    assert (found, error["param"]) == (status, param)
    assert error["status" if status != 422 or param == "model_uri" else "detail"]
    assert shared.ask(MODELS)[1] == {"models": []}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A runtime without engines."""
    with running(settings_of(tmp_path_factory.mktemp("engines"))) as runtime:
        yield runtime


def test_path_of_a_model_that_does_not_exist_is_404(shared: Runtime) -> None:
    path = f"{shared.application.state.settings.model_dir}/none"
    status, error, _ = shared.ask(f"{MODELS}/activate", {**BODY, "artifact_url": path})
    assert (status, error["type"], error["param"]) == (404, "ModelNotFoundError", "artifact_url")
    assert shared.ask(MODELS)[1]["models"] == []


def test_devices_must_fit_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    sizes = {"--tensor-parallel-size": "2", "--pipeline-parallel-size": "2"}
    assert arguments_of("vllm", sizes) == ["--tensor-parallel-size=2", "--pipeline-parallel-size=2"]
    with pytest.raises(ApiError, match="the number of visible devices, 4"):
        arguments_of("vllm", {"--tensor-parallel-size": "2"})


def test_allowed_flags_of_penstock_are_options_of_its_server() -> None:
    with pytest.raises(ApiError, match="one of --block-size, ") as error:
        arguments_of("penstock", {"--tensor-parallel-size": "2"})
    flags = str(error.value).partition("one of ")[2].split(", ")
    assert set(flags) <= {flag for option in serve.params for flag in option.opts}


def test_operator_can_allow_further_flags() -> None:
    assert arguments_of("vllm", {"swap_space": "4", "enable-lora": ""}, ("--swap-space",)) == [
        "--swap-space=4",
        "--enable-lora",
    ]
    with pytest.raises(ApiError, match="swap_space"):
        arguments_of("vllm", {"swap_space": "4"})


def test_sleep_and_wake_happen_once_per_operation(runtime: Runtime, tmp_path: Path) -> None:
    activate(runtime)

    def operate(path: str, operation: str, **more: Any) -> Any:
        status, answer, _ = runtime.ask(
            f"{MODELS}/{path}", {"model_name": "m", "operation_id": operation, **more}
        )
        assert status == 200, answer
        return answer

    first = operate("sleep", "1", level=2)
    expected = {"status": "success", "model_name": "m", "operation_id": "1", "applied": True}
    assert first == {**expected, "phase": "sleeping"}
    [model] = runtime.ask(MODELS)[1]["models"]
    assert (model["phase"], model["ready"]) == ("sleeping", False)
    assert operate("sleep", "2", level=2)["applied"] is False
    assert operate("wake", "3")["phase"] == "active"
    # Repeated requests have the stored results, and the engine is not asked again.
    assert operate("sleep", "1", level=2) == first
    assert operate("wake", "3")["applied"] is True
    assert [fact["path"] for fact in facts_of(tmp_path)[1:]] == ["/sleep?level=2", "/wake_up"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("sleep", {"model_name": "m", "level": 3, "operation_id": "1"}, 422),
        ("sleep", {"model_name": "m", "level": 0, "operation_id": "1"}, 422),
        ("sleep", {"model_name": "m", "level": 1, "operation_id": ""}, 422),
        ("sleep", {"model_name": "m", "level": 1}, 422),
        ("kv-limit", {"model_name": "m", "limit_bytes": -1, "operation_id": "1"}, 422),
        ("deactivate", {"model_name": "m", "mode": "pause"}, 422),
        ("sleep", {"model_name": "none", "level": 1, "operation_id": "1"}, 404),
        ("wake", {"model_name": "none", "operation_id": "1"}, 404),
        ("kv-limit", {"model_name": "none", "limit_bytes": 1, "operation_id": "1"}, 404),
    ],
)
def test_invalid_operation_is_refused(shared: Runtime, path: str, body: dict[str, Any], status: int) -> None:
    found, error, _ = shared.ask(f"{MODELS}/{path}", body)
    assert (found, error["code"]) == (status, status)
    assert error["detail"]


def test_operation_that_the_engine_lacks_is_a_conflict(runtime: Runtime, tmp_path: Path) -> None:
    activate(runtime)
    (tmp_path / "no-sleep").touch()
    for path, more in (("sleep", {"level": 1}), ("kv-limit", {"limit_bytes": 1})):
        status, error, _ = runtime.ask(f"{MODELS}/{path}", {"model_name": "m", "operation_id": "1", **more})
        assert (status, error["type"]) == (409, "ConflictError")
    # The failure is not stored as the result of the operation.
    (tmp_path / "no-sleep").unlink()
    body = {"model_name": "m", "operation_id": "1", "level": 1}
    assert runtime.ask(f"{MODELS}/sleep", body)[1]["applied"] is True


def test_snapshot_has_the_numbers_of_requests(runtime: Runtime) -> None:
    port = activate(runtime)["port"]
    status, found, _ = runtime.ask("/v1/runtime/snapshot")
    assert (status, found["accelerators"], found["cached_artifacts"]) == (200, [], ["hf://org/repo"])
    [model] = found["models"]
    expected = {
        "model_name": "m",
        "artifact_url": "hf://org/repo",
        "claim_ref": BODY["claim_ref"],
        "port": port,
    }
    expected |= {"alive": True, "ready": True, "restart_count": 0, "phase": "active"}
    expected |= {"requests_running": 2, "requests_waiting": 3, "request_success_total": 9}
    assert model.items() >= {**expected, "request_metrics_observed": True}.items()
    assert runtime.value("aibrix:modelclaim_models_resident") == 1
    assert runtime.value("aibrix:modelclaim_engine_state", phase="active") == 1
    labels = {"action": "activate", "result": "applied"}
    assert runtime.value("aibrix:modelclaim_lifecycle_operations_total", **labels) == 1


@pytest.mark.parametrize("number", ["NaN", "+Inf", "1e400"])
def test_number_that_is_not_finite_is_not_observed(runtime: Runtime, tmp_path: Path, number: str) -> None:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    lines = [f'{name}{{model_name="m"}} {value}\n' for name, value in zip(names, (number, 1), strict=True)]
    (tmp_path / "metrics").write_text("".join(lines))
    activate(runtime)
    status, found, _ = runtime.ask("/v1/runtime/snapshot")
    assert status == 200
    [model] = found["models"]
    assert (model["request_metrics_observed"], model["requests_running"]) == (False, 0)


def test_numbers_of_requests_are_parsed_in_a_thread(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(runtime)
    threads: list[str] = []

    def parse(text: str) -> Any:
        threads.append(threading.current_thread().name)
        return parsed(text)

    monkeypatch.setattr(engine, "parsed", parse)
    [model] = runtime.ask("/v1/runtime/snapshot")[1]["models"]
    assert model["requests_running"] == 2
    assert threads == ["AnyIO worker thread"]


def test_number_of_engines_is_limited(tmp_path: Path) -> None:
    with running(settings_of(tmp_path, max_engines=1)) as runtime:
        activate(runtime)
        status, error, _ = runtime.ask(f"{MODELS}/activate", {**BODY, "model_name": "other"})
        assert (status, error["type"]) == (429, "OverloadedError")
    with running(settings_of(tmp_path, max_engines=0)) as runtime:
        assert runtime.ask(f"{MODELS}/activate", BODY)[0] == 403
        assert runtime.ask(MODELS)[0] == 403


def test_penstock_serve_is_started_and_sleeps(tmp_path: Path, demo_model: Path) -> None:
    more = {"engine_command": None, "allowed_roots": (str(demo_model.parent),)}
    with running(settings_of(tmp_path, **more)) as runtime:
        config = {"args": {"--max-model-len": "256", "--threads": "1", "--max-num-seqs": "2"}}
        answer = activate(
            runtime, model_name="demo", artifact_url=str(demo_model), engine="penstock", engine_config=config
        )
        engine = Runtime(None, answer["port"])
        body = {"model": "demo", "prompt": "a", "max_tokens": 2}
        assert engine.ask("/v1/completions", body)[0] == 200
        operation = {"model_name": "demo", "operation_id": "1"}
        assert runtime.ask(f"{MODELS}/sleep", {**operation, "level": 1})[1]["applied"] is True
        assert engine.ask("/v1/completions", body)[0] == 503
        assert runtime.ask(f"{MODELS}/wake", {**operation, "operation_id": "2"})[1]["applied"] is True
        wait_until(lambda: runtime.ask(MODELS)[1]["models"][0]["ready"])
        assert engine.ask("/v1/completions", body)[0] == 200
        [model] = runtime.ask("/v1/runtime/snapshot")[1]["models"]
        assert model["request_success_total"] >= 1
