"""Downloads of the runtime: models in the background, and adapters that it downloads for the engine."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from api_support import wait_until
from penstock.runtime.artifacts import secrets_of
from support.remote import Asked, FileServer, Sent, serving_files
from support.runtime import Answer, FakeEngine, Runtime, runtime_of
from support.s3 import ACCESS, BUCKET, S3, serving_s3

if TYPE_CHECKING:
    from collections.abc import Iterator

DOWNLOAD, LIST = "/v1/model/download", "/v1/model/list"
LOAD, UNLOAD = "/v1/lora_adapter/load", "/v1/lora_adapter/unload"
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights" * 1000}
KEYS = {"aws_access_key_id": ACCESS["ak"], "aws_secret_access_key": ACCESS["sk"]}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving_s3() as server:
        for name, content in ADAPTER.items():
            server.put(f"adapter/{name}", content)
        yield server


@pytest.fixture
def hub() -> Iterator[FileServer]:
    with serving_files() as server:
        server.models["org/repo"] = dict(ADAPTER)
        yield server


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.answer("/v1/load_lora_adapter", Answer(body=b"loaded"))
    engine.answer("/v1/unload_lora_adapter", Answer(body=b"unloaded"))
    return engine


@pytest.fixture
def runtime(engine: FakeEngine, tmp_path: Path) -> Iterator[Runtime]:
    with runtime_of(engine, **folders(tmp_path), artifact_hosts=("127.0.0.1",)) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A runtime for requests that change nothing."""
    folder = tmp_path_factory.mktemp("shared")
    with runtime_of(FakeEngine(), **folders(folder), artifact_hosts=("127.0.0.1",)) as runtime:
        yield runtime


def files_near(runtime: Runtime) -> set[Path]:
    """The files around the folders of a runtime, but the locks of downloads."""
    folder = Path(runtime.application.state.settings.model_dir).parent.parent
    return {path for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def folders(path: Path) -> dict[str, str]:
    """The settings with the folders of a test."""
    return {name: str(path / name) for name in ("model_dir", "adapter_dir", "secret_dir")}


def files_of(folder: str | Path) -> dict[str, bytes]:
    """The files of a download."""
    found = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".cache/")}


def from_hub(hub: FileServer, **more: Any) -> dict[str, Any]:
    """The body of a download from the hub."""
    return {"model_uri": "org/repo", "download_extra_config": {"hf_endpoint": hub.url}, **more}


def finished(runtime: Runtime, body: dict[str, Any]) -> dict[str, Any]:
    """The card of a download that has ended."""
    while True:
        status, card, _ = runtime.ask(DOWNLOAD, body)
        assert status == 200, card
        if card["model_status"] != "downloading":
            return dict(card)


def held_at(hub: FileServer, part: str) -> threading.Event:
    """Hold the requests with this text in the path until the event is set."""
    may_continue = threading.Event()

    def wait(asked: Asked) -> Sent | None:
        if part in asked.path and asked.method == "GET":
            may_continue.wait(60)
        return None

    hub.faults.append(wait)
    return may_continue


# ---- models


def test_download_reports_progress_until_it_is_complete(
    runtime: Runtime, hub: FileServer, tmp_path: Path
) -> None:
    may_continue = held_at(hub, "safetensors")
    try:
        status, card, _ = runtime.ask(DOWNLOAD, from_hub(hub))
        assert status == 200
        total = sum(map(len, ADAPTER.values()))
        assert card["progress"]["total_bytes"] == total
        assert card["progress"]["done_bytes"] < total
        root = str(tmp_path / "model_dir")
        names = {"model_name": "repo", "model_root_path": root, "source": "huggingface"}
        assert card.items() >= {**names, "model_status": "downloading", "last_error": None}.items()
        [listed] = runtime.ask(LIST)[1]["data"]
        assert listed["model_status"] == "downloading"
        # The loop is free meanwhile.
        begin = time.perf_counter()
        assert runtime.ask("/healthz")[0] == 200
        assert time.perf_counter() - begin < 0.1
    finally:
        may_continue.set()
    card = finished(runtime, from_hub(hub))
    assert (card["model_status"], card["progress"]["done_bytes"]) == ("downloaded", total)
    assert files_of(tmp_path / "model_dir" / "repo") == ADAPTER
    [listed] = runtime.ask(LIST)[1]["data"]
    assert (listed["model_name"], listed["model_status"]) == ("repo", "downloaded")


def test_finished_download_is_not_repeated(runtime: Runtime, hub: FileServer) -> None:
    finished(runtime, from_hub(hub))
    num_requests = len(hub.requests)
    assert finished(runtime, from_hub(hub))["model_status"] == "downloaded"
    assert len(hub.requests) == num_requests


def test_deleted_file_makes_a_model_incomplete(runtime: Runtime, hub: FileServer, tmp_path: Path) -> None:
    finished(runtime, from_hub(hub, model_name="a/m1"))
    (tmp_path / "model_dir" / "a" / "m1" / "adapter_config.json").unlink()
    [card] = runtime.ask(LIST)[1]["data"]
    assert (card["model_name"], card["model_status"]) == ("a/m1", "no_operation")
    assert finished(runtime, from_hub(hub, model_name="a/m1"))["model_status"] == "downloaded"
    assert files_of(tmp_path / "model_dir" / "a" / "m1") == ADAPTER


def test_simultaneous_requests_start_one_download(runtime: Runtime, hub: FileServer) -> None:
    may_continue = held_at(hub, "safetensors")
    threads = [threading.Thread(target=runtime.ask, args=(DOWNLOAD, from_hub(hub))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    may_continue.set()
    finished(runtime, from_hub(hub))
    assert len(hub.asked("/revision/")) == 1


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({"model_uri": "a/b/c"}, 422, "InvalidArgumentError", "model_uri"),
        ({"model_uri": ""}, 422, "InvalidArgumentError", "model_uri"),
        ({"model_uri": "ftp://a/b"}, 422, "InvalidArgumentError", "model_uri"),
        ({"model_uri": "s3://"}, 422, "InvalidArgumentError", "model_uri"),
        ({"model_uri": "s3://b/m/", "download_extra_config": {"ak": "x"}}, 422, "InvalidArgumentError", None),
        ({"model_uri": "a/b", "download_extra_config": {"bogus": 1}}, 422, "InvalidArgumentError", "bogus"),
        (
            {"model_uri": "a/b", "download_extra_config": {"num_threads": 0}},
            422,
            "InvalidArgumentError",
            "num_threads",
        ),
        (
            {"model_uri": "a/b", "download_extra_config": {"allowed_hosts": "*"}},
            422,
            "InvalidArgumentError",
            "allowed_hosts",
        ),
        ({"model_uri": "a/b", "model_name": "../x"}, 422, "InvalidArgumentError", "model_name"),
        ({"model_uri": "a/b", "model_name": "/etc"}, 422, "InvalidArgumentError", "model_name"),
        ({"model_uri": "a/b", "local_dir": "/etc"}, 422, "InvalidArgumentError", "local_dir"),
        ({"model_uri": "a/b", "local_dir": "../.."}, 422, "InvalidArgumentError", "local_dir"),
        ({"model_uri": "a/b", "local_dir": "\x00"}, 422, "InvalidArgumentError", "local_dir"),
        ({"model_uri": "/etc"}, 403, "AccessDeniedError", None),
        ({"model_uri": "http://169.254.169.254/latest/x"}, 403, "AccessDeniedError", None),
        ({"model_uri": "http://localhost:1/x.zip"}, 403, "AccessDeniedError", None),
        (
            {"model_uri": "a/b", "download_extra_config": {"hf_endpoint": "http://10.0.0.1"}},
            403,
            "AccessDeniedError",
            None,
        ),
        ({}, 422, "RequestValidationError", "model_uri"),
        ({"model_uri": 5}, 422, "RequestValidationError", "model_uri"),
        ({"model_uri": "a/b", "x": 1}, 422, "RequestValidationError", "x"),
    ],
)
def test_invalid_download_is_refused(
    shared: Runtime, body: dict[str, Any], status: int, kind: str, param: str | None
) -> None:
    before = files_near(shared)
    found, error, _ = shared.ask(DOWNLOAD, body)
    assert (found, error["type"]) == (status, kind)
    assert param is None or error["param"] == param
    assert files_near(shared) == before


def test_missing_models_are_404(runtime: Runtime, hub: FileServer, s3: S3) -> None:
    extra = {"download_extra_config": {**ACCESS, "endpoint": s3.url}}
    bodies = [
        from_hub(hub, model_uri="org/none"),
        {"model_uri": "s3://no-such-bucket/m1/", **extra},
        {"model_uri": f"s3://{BUCKET}/none/", **extra},
    ]
    for body in bodies:
        status, error, _ = runtime.ask(DOWNLOAD, body)
        assert (status, error["type"]) == (404, "ModelNotFoundError")


def test_failed_download_is_shown_and_can_be_repeated(runtime: Runtime, hub: FileServer) -> None:
    may_continue = held_at(hub, "safetensors")
    hub.faults.append(lambda asked: Sent(403) if "safetensors" in asked.path else None)
    try:
        assert runtime.ask(DOWNLOAD, from_hub(hub))[1]["model_status"] == "downloading"
    finally:
        may_continue.set()

    def last_error() -> Any:
        [card] = runtime.ask(LIST)[1]["data"]
        return card["model_status"] == "no_operation" and card["last_error"]

    wait_until(lambda: bool(last_error()))
    assert last_error()["type"] == "AccessDeniedError"
    hub.faults.clear()
    assert finished(runtime, from_hub(hub))["model_status"] == "downloaded"


def test_number_of_downloads_is_limited(hub: FileServer, tmp_path: Path) -> None:
    may_continue = held_at(hub, "safetensors")
    settings = {**folders(tmp_path), "artifact_hosts": ("*",), "max_downloads": 1}
    with runtime_of(FakeEngine(), **settings) as runtime:
        assert runtime.ask(DOWNLOAD, from_hub(hub))[0] == 200
        status, error, headers = runtime.ask(DOWNLOAD, from_hub(hub, model_name="other"))
        assert (status, error["type"], headers["retry-after"]) == (429, "OverloadedError", "1")
        may_continue.set()
        finished(runtime, from_hub(hub))
        assert finished(runtime, from_hub(hub, model_name="other"))["model_status"] == "downloaded"


def children() -> set[str]:
    """The processes that this process has started and not waited for."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(file.parent.name)
    return found


def test_downloads_leave_no_processes(hub: FileServer, tmp_path: Path) -> None:
    before = children()
    may_continue = held_at(hub, "safetensors")
    with runtime_of(FakeEngine(), **folders(tmp_path), artifact_hosts=("*",)) as runtime:
        assert runtime.ask(DOWNLOAD, from_hub(hub))[0] == 200
        assert children() - before
        may_continue.set()
        finished(runtime, from_hub(hub))
        wait_until(lambda: children() == before)
        # The end of the runtime ends a download.
        may_continue.clear()
        assert runtime.ask(DOWNLOAD, from_hub(hub, model_name="other"))[0] == 200
        assert children() - before
        threading.Timer(0.2, may_continue.set).start()
    assert children() == before


def test_list_takes_a_folder_from_the_query_or_the_body(
    runtime: Runtime, hub: FileServer, tmp_path: Path
) -> None:
    folder = str(tmp_path / "model_dir" / "sub")
    finished(runtime, from_hub(hub, local_dir=folder))
    for reply in (
        runtime.ask(f"{LIST}?local_dir={folder}"),
        runtime.ask(LIST, {"local_dir": folder}, method="GET"),
    ):
        assert (reply[0], reply[1]["object"]) == (200, "list")
        assert [card["model_name"] for card in reply[1]["data"]] == ["repo"]
    for unknown in ("/none", "/etc", str(tmp_path / "model_dir" / "none"), "%00"):
        assert runtime.ask(f"{LIST}?local_dir={unknown}")[:2] == (200, {"object": "list", "data": []})


def test_s3_uses_the_credentials_of_the_environment(
    runtime: Runtime, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"AWS_ACCESS_KEY_ID": "ak", "AWS_SECRET_ACCESS_KEY": "sk"}
    for variable, name in names.items():
        monkeypatch.setenv(variable, ACCESS[name])
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    body = {"model_uri": f"s3://{BUCKET}/adapter/"}
    assert runtime.ask(DOWNLOAD, body)[1]["source"] == "s3"
    assert finished(runtime, body)["model_status"] == "downloaded"
    assert files_of(tmp_path / "model_dir" / "adapter") == ADAPTER


# ---- adapters


def artifact(s3: S3, **more: Any) -> dict[str, Any]:
    """The body of a load from S3."""
    config = {"endpoint": s3.url, "region": "us-east-1", "schedulerName": "default"}
    url = f"s3://{BUCKET}/adapter/"
    return {"lora_name": "n", "artifact_url": url, "credentials": KEYS, "additional_config": config, **more}


def test_artifact_is_downloaded_and_loaded(
    runtime: Runtime, engine: FakeEngine, s3: S3, tmp_path: Path
) -> None:
    status, body, _ = runtime.ask(LOAD, artifact(s3))
    assert (status, body["status"], body["engine_response"]) == (200, "success", {"message": "loaded"})
    assert files_of(body["local_path"]) == ADAPTER
    assert Path(body["local_path"]).is_relative_to(tmp_path / "adapter_dir" / "n")
    [call] = engine.calls
    assert call.body == {"lora_name": "n", "lora_path": body["local_path"]}
    status, body, _ = runtime.ask(UNLOAD, {"lora_name": "n"})
    assert (status, body["was_loaded"]) == (200, True)
    assert not (tmp_path / "adapter_dir" / "n").exists()


def test_folder_stays_when_the_request_says_so(runtime: Runtime, s3: S3) -> None:
    path = runtime.ask(LOAD, artifact(s3))[1]["local_path"]
    assert runtime.ask(UNLOAD, {"lora_name": "n", "cleanup_local": False})[0] == 200
    assert files_of(path) == ADAPTER


def test_web_server_gets_the_headers_of_the_request(runtime: Runtime, hub: FileServer) -> None:
    hub.files["/adapter.bin"] = b"weights"
    url = f"{hub.url}/adapter.bin"
    body = {"lora_name": "n", "artifact_url": url, "credentials": {"X-Token": "secret"}}
    status, answer, _ = runtime.ask(LOAD, body)
    assert (status, files_of(answer["local_path"])) == (200, {"adapter.bin": b"weights"})
    assert {asked.headers["X-Token"] for asked in hub.requests} == {"secret"}
    for headers in ({"X": "a\r\nEvil: 1"}, {"X\r\nEvil": "1"}, {"": "x"}, {"Host": "\x00"}):
        other = {**body, "lora_name": "other", "credentials": headers}
        status, error, _ = runtime.ask(LOAD, other)
        assert (status, error["type"], error["param"]) == (422, "InvalidArgumentError", "headers")
    assert not any("Evil" in asked.headers for asked in hub.requests)


def test_dotted_name_is_accepted_to_the_end(runtime: Runtime, engine: FakeEngine, s3: S3) -> None:
    assert runtime.ask(LOAD, artifact(s3, lora_name="a.b"))[0] == 200
    assert engine.calls[0].body["lora_name"] == "a.b"
    assert runtime.ask(UNLOAD, {"lora_name": "a.b"})[0] == 200


def test_key_of_the_configuration_is_sent_to_the_engine(runtime: Runtime, engine: FakeEngine, s3: S3) -> None:
    body = artifact(s3)
    body["additional_config"]["api-key"] = "key"
    assert runtime.ask(LOAD, body)[0] == 200
    assert engine.calls[0].headers["authorization"] == "Bearer key"


def test_credentials_come_from_a_mounted_secret(
    runtime: Runtime, s3: S3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret_dir" / "my-secret"
    (secret / "..data").mkdir(parents=True)
    for name, value in KEYS.items():
        (secret / name).write_text(value + "\n")
    (secret / "..aws_secret_access_key").write_text("wrong")
    assert secrets_of(runtime.application.state.settings, "my-secret") == KEYS
    body = artifact(s3, credentials=None, credentials_secret="my-secret")  # noqa: S106 - a name
    status, found, _ = runtime.ask(LOAD, body)
    assert (status, found["status"]) == (200, "success")
    assert KEYS["aws_secret_access_key"] not in caplog.text


@pytest.mark.parametrize("name", ["none", "../my-secret", "/etc", "", "a/b"])
def test_unknown_secret_is_refused(shared: Runtime, s3: S3, name: str) -> None:
    status, body, _ = shared.ask(LOAD, artifact(s3, credentials=None, credentials_secret=name))
    assert (status, body["type"], body["param"]) == (400, "ValidationError", "credentials_secret")


@pytest.mark.parametrize(
    ("more", "status", "kind"),
    [
        ({"artifact_url": "ftp://x"}, 400, "ValidationError"),
        ({"artifact_url": "org/repo"}, 400, "ValidationError"),
        ({"artifact_url": "file:///etc"}, 400, "ValidationError"),
        ({"artifact_url": "gs://b/x"}, 400, "ValidationError"),
        ({"lora_name": "../evil"}, 400, "ValidationError"),
        ({"lora_name": ".."}, 400, "ValidationError"),
        ({"local_dir": "/etc"}, 400, "ValidationError"),
        ({"artifact_url": f"s3://{BUCKET}/none/"}, 404, "ModelNotFoundError"),
        ({"artifact_url": "http://169.254.169.254/x"}, 403, "AccessDeniedError"),
        ({"additional_config": {"endpoint": "http://10.0.0.1"}}, 403, "AccessDeniedError"),
    ],
)
def test_bad_artifact_is_refused_and_leaves_nothing(
    shared: Runtime, s3: S3, more: dict[str, Any], status: int, kind: str
) -> None:
    before = files_near(shared)
    found, body, _ = shared.ask(LOAD, artifact(s3, **more))
    assert (found, body["type"], body["code"]) == (status, kind, status)
    assert body["error"] == body["message"]
    assert shared.engine.calls == []
    assert files_near(shared) == before
    folder = Path(shared.application.state.settings.adapter_dir)
    assert not folder.exists() or list(folder.iterdir()) == []


def test_strict_compat_has_the_errors_of_aibrix(engine: FakeEngine, s3: S3, tmp_path: Path) -> None:
    with runtime_of(engine, **folders(tmp_path), strict_compat=True, artifact_hosts=("*",)) as runtime:
        for more in ({"artifact_url": "ftp://x"}, {"artifact_url": f"s3://{BUCKET}/none/"}):
            status, body, _ = runtime.ask(LOAD, artifact(s3, **more))
            assert (status, list(body)) == (500, ["error"])


def test_error_of_the_engine_keeps_its_status(runtime: Runtime, engine: FakeEngine, s3: S3) -> None:
    engine.answer("/v1/load_lora_adapter", Answer(409, b"exists"))
    status, body, _ = runtime.ask(LOAD, artifact(s3))
    assert (status, body["type"]) == (409, "ConflictError")


def test_url_as_a_path_is_downloaded(runtime: Runtime, engine: FakeEngine, s3: S3, monkeypatch: Any) -> None:
    for variable, value in {"AWS_ACCESS_KEY_ID": "ak", "AWS_SECRET_ACCESS_KEY": "sk"}.items():
        monkeypatch.setenv(variable, ACCESS[value])
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    url = f"s3://{BUCKET}/adapter/"
    status, text, _ = runtime.ask(LOAD, {"lora_name": "n", "lora_path": url})
    assert (status, text) == (200, f"Success: LoRA adapter 'n' loaded successfully from '{url}'.".encode())
    assert files_of(engine.calls[0].body["lora_path"]) == ADAPTER


def test_folders_of_two_urls_are_never_mixed(runtime: Runtime, s3: S3) -> None:
    first = runtime.ask(LOAD, artifact(s3))[1]["local_path"]
    second = runtime.ask(LOAD, artifact(s3, artifact_url=f"s3://{BUCKET}/adapter/adapter_config.json"))[1]
    assert first != second["local_path"]
    assert runtime.ask(LOAD, artifact(s3, artifact_url=f"s3://{BUCKET}/none/"))[0] == 404
    assert files_of(second["local_path"]) == {"adapter_config.json": ADAPTER["adapter_config.json"]}


def test_engine_without_adapters_downloads_nothing(s3: S3, tmp_path: Path) -> None:
    with runtime_of(FakeEngine(), **folders(tmp_path), engine="trtllm", artifact_hosts=("*",)) as runtime:
        assert runtime.ask(LOAD, artifact(s3))[0] == 501
    assert not (tmp_path / "adapter_dir").exists()


def test_adapter_in_another_folder_is_deleted_there(runtime: Runtime, s3: S3, tmp_path: Path) -> None:
    folder = tmp_path / "model_dir" / "sub"
    path = runtime.ask(LOAD, artifact(s3, local_dir=str(folder)))[1]["local_path"]
    assert Path(path).is_relative_to(folder / "n")
    assert runtime.ask(UNLOAD, {"lora_name": "n"})[0] == 200
    assert not (folder / "n").exists()
