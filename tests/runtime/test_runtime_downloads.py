"""Models that the runtime downloads in the background."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.runtime import downloads
from support.api.engines import wait_until
from support.runtime.remote import FileServer, Sent, files_of, held_at, serving_files
from support.runtime.runtime import FakeEngine, Runtime, files_near, folders, runtime_of
from support.runtime.s3 import ACCESS, BUCKET, S3, serving_s3

if TYPE_CHECKING:
    from collections.abc import Iterator

DOWNLOAD, LIST = "/v1/model/download", "/v1/model/list"
FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving_s3() as server:
        for name, content in FILES.items():
            server.put(f"model/{name}", content)
        yield server


@pytest.fixture
def hub() -> Iterator[FileServer]:
    with serving_files() as server:
        server.models["org/repo"] = dict(FILES)
        yield server


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with runtime_of(FakeEngine(), **folders(tmp_path), artifact_hosts=("127.0.0.1",)) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A runtime for requests that change nothing."""
    folder = tmp_path_factory.mktemp("shared")
    with runtime_of(FakeEngine(), **folders(folder), artifact_hosts=("127.0.0.1",)) as runtime:
        yield runtime


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


def test_download_reports_progress_until_it_is_complete(
    runtime: Runtime, hub: FileServer, tmp_path: Path
) -> None:
    may_continue = held_at(hub, "safetensors")
    try:
        status, card, _ = runtime.ask(DOWNLOAD, from_hub(hub))
        assert status == 200
        total = sum(map(len, FILES.values()))
        assert card["progress"]["total_bytes"] == total
        assert card["progress"]["done_bytes"] < total
        path = str(tmp_path / "model_dir" / "org" / "repo")
        names = {"model_name": "org/repo", "model_root_path": path, "source": "huggingface"}
        assert card.items() >= {**names, "model_status": "downloading", "last_error": None}.items()
        [listed] = runtime.ask(LIST)[1]["data"]
        assert listed["model_status"] == "downloading"
        assert runtime.ask("/healthz")[0] == 200  # the event loop is free meanwhile
    finally:
        may_continue.set()
    card = finished(runtime, from_hub(hub))
    assert (card["model_status"], card["progress"]["done_bytes"]) == ("downloaded", total)
    assert files_of(tmp_path / "model_dir" / "org" / "repo") == FILES
    [listed] = runtime.ask(LIST)[1]["data"]
    assert (listed["model_name"], listed["model_status"]) == ("org/repo", "downloaded")


@pytest.mark.parametrize("uri", ["hf://org/repo", "HF://org/repo@main", "huggingface://org/repo@main"])
def test_schemes_of_the_hub_name_its_models(
    runtime: Runtime, hub: FileServer, tmp_path: Path, uri: str
) -> None:
    card = finished(runtime, from_hub(hub, model_uri=uri))
    assert (card["model_name"], card["source"]) == ("org/repo", "huggingface")
    assert card["model_status"] == "downloaded"
    assert files_of(tmp_path / "model_dir" / "org" / "repo") == FILES


def test_forced_download_is_reported_before_it_is_repeated(runtime: Runtime, hub: FileServer) -> None:
    body = from_hub(hub)
    finished(runtime, body)
    body["download_extra_config"]["force_download"] = True
    for number in (2, 3):
        may_continue = held_at(hub, "safetensors")
        assert runtime.ask(DOWNLOAD, body)[1]["model_status"] == "downloading"
        may_continue.set()
        [job] = runtime.application.state.downloads._jobs.values()
        wait_until(job.has_ended.is_set)
        assert runtime.ask(DOWNLOAD, body)[1]["model_status"] == "downloaded"
        assert len(hub.asked("model.safetensors")) == number


def test_finished_download_is_not_repeated(runtime: Runtime, hub: FileServer) -> None:
    finished(runtime, from_hub(hub))
    num_requests = len(hub.requests)
    assert finished(runtime, from_hub(hub))["model_status"] == "downloaded"
    assert len(hub.requests) == num_requests


def test_deleted_file_makes_a_model_incomplete(runtime: Runtime, hub: FileServer, tmp_path: Path) -> None:
    finished(runtime, from_hub(hub, model_name="a/m1"))
    (tmp_path / "model_dir" / "a" / "m1" / "config.json").unlink()
    [card] = runtime.ask(LIST)[1]["data"]
    assert (card["model_name"], card["model_status"]) == ("a/m1", "no_operation")
    assert finished(runtime, from_hub(hub, model_name="a/m1"))["model_status"] == "downloaded"
    assert files_of(tmp_path / "model_dir" / "a" / "m1") == FILES


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


def test_missing_models_are_404(
    runtime: Runtime, hub: FileServer, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A request is answered once its download has failed, and does not wait for the first file.
    monkeypatch.setattr(downloads, "_FIRST_ANSWER", 3600)
    extra = {"download_extra_config": {**ACCESS, "endpoint": s3.url}}
    bodies = [
        from_hub(hub, model_uri="org/none"),
        {"model_uri": "s3://no-such-bucket/m1/", **extra},
        {"model_uri": f"s3://{BUCKET}/none/", **extra},
    ]
    for body in bodies:
        status, error, _ = runtime.ask(DOWNLOAD, body)
        assert (status, error["type"]) == (404, "ModelNotFoundError")


def test_strict_compat_takes_a_prefix_without_objects(s3: S3, tmp_path: Path) -> None:
    settings = {**folders(tmp_path), "artifact_hosts": ("127.0.0.1",), "strict_compat": True}
    body = {"model_uri": f"s3://{BUCKET}/none/", "download_extra_config": {**ACCESS, "endpoint": s3.url}}
    with runtime_of(FakeEngine(), **settings) as runtime:
        assert finished(runtime, body)["model_status"] == "downloaded"
        missing = {**body, "model_uri": f"s3://{BUCKET}/none.bin"}
        assert runtime.ask(DOWNLOAD, missing)[0] == 404
    assert files_of(tmp_path / "model_dir" / "none") == {}


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


def cancel(runtime: Runtime, query: str) -> tuple[int, Any]:
    """The status and the body of the answer to a request that cancels a download."""
    return runtime.ask(f"{DOWNLOAD}?{query}", method="DELETE")[:2]


def test_cancelled_download_ends_and_resumes(runtime: Runtime, hub: FileServer, tmp_path: Path) -> None:
    size = 4 << 20
    hub.models["org/repo"]["model.safetensors"] = bytes(size)
    hub.stop_after(3 << 20)
    processes = children()
    assert runtime.ask(DOWNLOAD, from_hub(hub))[1]["model_status"] == "downloading"
    assert hub.is_stopped.wait(20)
    wait_until(lambda: runtime.ask(LIST)[1]["data"][0]["progress"]["done_bytes"] > 2 << 20)
    assert cancel(runtime, "model_name=other")[0] == 404
    status, card = cancel(runtime, "model_name=org/repo")
    assert (status, card["model_status"]) == (200, "no_operation")
    assert card["last_error"]["type"] == "DownloadCancelledError"
    assert children() == processes
    assert runtime.application.state.downloads.num_running() == 0
    assert cancel(runtime, "model_name=org/repo")[0] == 404
    hub.stop_after(None)
    card = finished(runtime, from_hub(hub))
    assert card["model_status"] == "downloaded"
    assert 0 < card["progress"]["fetched_bytes"] < size
    assert (tmp_path / "model_dir" / "org" / "repo" / "model.safetensors").stat().st_size == size


def test_request_that_waits_for_a_cancelled_download_ends(runtime: Runtime, hub: FileServer) -> None:
    may_continue = held_at(hub, "/revision/")
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(runtime.ask(DOWNLOAD, from_hub(hub))))
    thread.start()
    wait_until(lambda: bool(hub.asked("/revision/")))
    status, card, _ = runtime.ask(DOWNLOAD, {"model_name": "org/repo"}, method="DELETE")
    assert (status, card["model_status"]) == (200, "no_operation")
    thread.join()
    may_continue.set()
    [(status, error, _)] = answers
    assert (status, error["type"]) == (409, "DownloadCancelledError")


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("", 422, "model_name"),
        ("model_name=..", 422, "model_name"),
        ("model_name=m&local_dir=/etc", 422, "local_dir"),
        ("model_name=m&x=1", 422, "x"),
        ("model_name=" + "m" * 999, 422, "model_name"),
        ("model_name=m", 404, "model_name"),
    ],
)
def test_invalid_cancellation_is_refused(shared: Runtime, query: str, status: int, param: str) -> None:
    found, error = cancel(shared, query)
    assert (found, error["param"]) == (status, param)


def test_time_of_a_download_is_limited(hub: FileServer, tmp_path: Path) -> None:
    may_continue = held_at(hub, "/revision/")
    settings = {**folders(tmp_path), "artifact_hosts": ("*",), "download_timeout": 0.2}
    with runtime_of(FakeEngine(), **settings) as runtime:
        status, error, _ = runtime.ask(DOWNLOAD, from_hub(hub))
        assert (status, error["type"]) == (408, "TimeoutError")
        assert "0.2 seconds" in error["message"]
        assert runtime.application.state.downloads.num_running() == 0
    may_continue.set()


def test_web_server_gets_the_headers_of_the_request(runtime: Runtime, hub: FileServer) -> None:
    hub.files["/model.gguf"] = b"weights"
    body = {"model_uri": f"{hub.url}/model.gguf"}
    assert finished(runtime, {**body, "download_extra_config": {"headers": {"X-Token": "secret"}}})
    assert {asked.headers["X-Token"] for asked in hub.requests} == {"secret"}
    for headers in ({"X": "a\r\nEvil: 1"}, {"X\r\nEvil": "1"}, {"": "x"}, {"Host": "\x00"}):
        other = {**body, "model_name": "other", "download_extra_config": {"headers": headers}}
        status, error, _ = runtime.ask(DOWNLOAD, other)
        assert (status, error["type"], error["param"]) == (422, "InvalidArgumentError", "headers")
    assert not any("Evil" in asked.headers for asked in hub.requests)


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
    hub.stop_after(1000)
    with runtime_of(FakeEngine(), **folders(tmp_path), artifact_hosts=("*",)) as runtime:
        assert runtime.ask(DOWNLOAD, from_hub(hub))[0] == 200
        assert children() - before
        hub.stop_after(None)
        finished(runtime, from_hub(hub))
        wait_until(lambda: children() == before)
        # The end of the runtime ends a download.
        hub.stop_after(1000)
        assert runtime.ask(DOWNLOAD, from_hub(hub, model_name="other"))[0] == 200
        assert hub.is_stopped.wait(60)
        assert children() - before
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
        assert [card["model_name"] for card in reply[1]["data"]] == ["org/repo"]
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
    body = {"model_uri": f"s3://{BUCKET}/model/"}
    assert runtime.ask(DOWNLOAD, body)[1]["source"] == "s3"
    assert finished(runtime, body)["model_status"] == "downloaded"
    assert files_of(tmp_path / "model_dir" / "model") == FILES
