"""Adapters that the runtime downloads: the credentials that are sent, and the folders that are deleted."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.api.engines import wait_until
from support.paths import TESTS
from support.runtime.remote import COMMIT, FileServer, Sent, files_of, held_at, serving_files
from support.runtime.runtime import TOKEN, Answer, FakeEngine, Runtime, runtime_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.rare  # each gate runs test_runtime_downloads.py

LOAD, UNLOAD = "/v1/lora_adapter/load", "/v1/lora_adapter/unload"
DOWNLOAD = "/v1/model/download"
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights" * 1000}


@pytest.fixture
def hub() -> Iterator[FileServer]:
    with serving_files() as server:
        server.models["org/repo"] = dict(ADAPTER)
        server.models["org/other"] = {"adapter_config.json": b"{ }"}
        server.files["/adapter.bin"] = b"weights"
        yield server


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    engine = FakeEngine()
    engine.answer("/v1/load_lora_adapter", Answer(body=b"loaded"))
    engine.answer("/v1/unload_lora_adapter", Answer(body=b"unloaded"))
    folders = {name: str(tmp_path / name) for name in ("model_dir", "adapter_dir", "secret_dir")}
    with runtime_of(engine, **folders, artifact_hosts=("127.0.0.1",), tokens=(TOKEN,)) as runtime:
        yield runtime


def artifact(hub: FileServer, name: str = "org/repo", **more: Any) -> dict[str, Any]:
    """The body of a load from the hub."""
    config = {"hf_endpoint": hub.url}
    return {"lora_name": "n", "artifact_url": f"huggingface://{name}", "additional_config": config, **more}


def loaded(runtime: Runtime, body: dict[str, Any]) -> Path:
    """The folder of an adapter that is loaded."""
    status, answer, _ = runtime.ask(LOAD, body)
    assert status == 200, answer
    return Path(answer["local_path"])


# ---- credentials


def write_secrets(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "aws_secret_access_key").write_text("SECRET")
    (folder / "huggingface_token").write_text("hf_SECRET")


def sent_text(hub: FileServer) -> str:
    """The headers of all requests."""
    assert hub.requests
    return "".join(str(asked.headers) for asked in hub.requests)


@pytest.mark.parametrize("scheme", ["http", "HTTP", "https"])
def test_adapter_of_a_web_server_is_refused_unseen(runtime: Runtime, hub: FileServer, scheme: str) -> None:
    url = f"{scheme}://127.0.0.1:{hub.server_port}/adapter.bin"
    for field in ("artifact_url", "lora_path"):
        status, error, _ = runtime.ask(LOAD, {"lora_name": "n", field: url})
        assert (status, error["type"], error["param"]) == (400, "ValidationError", "artifact_url")
        assert "an adapter is a directory" in error["message"]
    assert hub.requests == []
    assert runtime.engine.calls == []


def test_endpoint_of_a_request_gets_no_token_of_the_operator(
    runtime: Runtime, hub: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_secrets(tmp_path / "secret_dir")
    monkeypatch.setenv("HF_TOKEN", "hf_SECRET")
    loaded(runtime, artifact(hub))
    body = {"model_uri": "org/repo", "download_extra_config": {"hf_endpoint": hub.url}}
    assert runtime.ask(DOWNLOAD, body)[0] == 200
    assert "SECRET" not in sent_text(hub)


@pytest.mark.parametrize(("scheme", "field"), [("huggingface", "hf_endpoint"), ("s3", "endpoint")])
def test_endpoint_of_a_request_gets_no_mounted_secret(
    runtime: Runtime, hub: FileServer, tmp_path: Path, scheme: str, field: str
) -> None:
    write_secrets(tmp_path / "secret_dir" / "team")
    config = {field: hub.url}
    body = artifact(hub, artifact_url=f"{scheme}://org/repo", additional_config=config)
    status, error, _ = runtime.ask(LOAD, {**body, "credentials_secret": "team"})
    assert (status, error["type"], error["param"]) == (400, "ValidationError", f"additional_config.{field}")
    assert hub.requests == []


def test_endpoint_of_the_operator_gets_the_tokens(
    runtime: Runtime, hub: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_SECRET")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    loaded(runtime, artifact(hub))
    assert "Bearer hf_SECRET" in sent_text(hub)


def test_stored_token_is_not_sent_to_an_endpoint_of_a_request(
    runtime: Runtime, hub: FileServer, tmp_path: Path
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_SECRET")
    status, error, _ = runtime.ask(LOAD, artifact(hub))
    assert (status, error["type"], error["param"]) == (422, "InvalidArgumentError", "hf_token")
    assert hub.requests == []
    loaded(runtime, artifact(hub, credentials={"huggingface_token": "hf_mine"}))
    assert "hf_mine" in sent_text(hub)
    assert "SECRET" not in sent_text(hub)


def test_endpoint_of_s3_needs_credentials_of_the_request(
    runtime: Runtime, hub: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "SECRET")
    body = {"lora_name": "n", "artifact_url": "s3://b/m/", "additional_config": {"endpoint": hub.url}}
    status, error, _ = runtime.ask(LOAD, body)
    assert (status, error["type"], error["param"]) == (422, "InvalidArgumentError", "ak")
    assert hub.requests == []


@pytest.mark.parametrize(
    "uri",
    [
        "https://ec2-203-0-113-5.compute-1.amazonaws.com:8000/x",
        "https://name.us-east-1.elb.amazonaws.com/x",
        "https://evil.volces.com/x",
        "http://huggingface.co/x",
        "http://b.s3.us-east-1.amazonaws.com/x",
    ],
)
def test_only_https_hosts_of_the_stores_are_allowed(runtime: Runtime, uri: str) -> None:
    status, error, _ = runtime.ask(DOWNLOAD, {"model_uri": uri})
    assert (status, error["type"]) == (403, "AccessDeniedError")
    body = {"model_uri": "org/repo", "download_extra_config": {"hf_endpoint": uri.removesuffix("/x")}}
    status, error, _ = runtime.ask(DOWNLOAD, body)
    assert (status, error["type"]) == (403, "AccessDeniedError")


# ---- folders


@pytest.mark.parametrize("url", ["hf://org/repo", "HF://org/repo@main", "huggingface://org/repo"])
def test_adapter_of_each_scheme_of_the_hub_is_loaded(runtime: Runtime, hub: FileServer, url: str) -> None:
    assert files_of(loaded(runtime, artifact(hub, artifact_url=url))) == ADAPTER


@pytest.mark.parametrize("status", [200, 404])
def test_unload_leaves_the_folder_of_the_operator(runtime: Runtime, tmp_path: Path, status: int) -> None:
    folder = tmp_path / "adapter_dir" / "sql"
    (folder / ("0" * 12)).mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / ("0" * 12) / "weights").write_text("w")
    assert runtime.ask(LOAD, {"lora_name": "sql", "lora_path": str(folder)})[0] == 200
    runtime.engine.answer("/v1/unload_lora_adapter", Answer(status))
    assert runtime.ask(UNLOAD, {"lora_name": "sql"})[0] == 200
    assert sorted(path.name for path in folder.rglob("*")) == ["0" * 12, "adapter_config.json", "weights"]


def test_unload_leaves_the_model_of_the_same_name(runtime: Runtime, hub: FileServer, tmp_path: Path) -> None:
    model = tmp_path / "model_dir" / "llama"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"base")
    path = loaded(runtime, artifact(hub, lora_name="llama", local_dir=str(model.parent)))
    assert runtime.ask(UNLOAD, {"lora_name": "llama"})[0] == 200
    assert not path.exists()
    assert files_of(model) == {"model.safetensors": b"base"}


def test_unload_deletes_downloads_of_an_earlier_runtime(runtime: Runtime, hub: FileServer) -> None:
    path = loaded(runtime, artifact(hub))
    runtime.application.state.adapters._paths.clear()
    assert runtime.ask(UNLOAD, {"lora_name": "n"})[0] == 200
    assert not path.parent.exists()


@pytest.mark.parametrize(("status", "expected"), [(404, 404), (403, 403)])
def test_failed_reload_keeps_the_files(runtime: Runtime, hub: FileServer, status: int, expected: int) -> None:
    path = loaded(runtime, artifact(hub))
    hub.faults.append(lambda _: Sent(status))
    assert runtime.ask(LOAD, artifact(hub))[0] == expected
    runtime.application.state.adapters._paths.clear()  # as after a restart
    assert runtime.ask(LOAD, artifact(hub))[0] == expected
    assert files_of(path) == ADAPTER


def test_failed_reload_of_a_changed_source_keeps_the_folder(runtime: Runtime, hub: FileServer) -> None:
    path = loaded(runtime, artifact(hub))
    hub.models["org/repo"]["adapter_model.safetensors"] = b"other"
    hub.faults.append(lambda asked: Sent(403) if "/resolve/" in asked.path else None)
    assert runtime.ask(LOAD, artifact(hub))[0] == 403  # the folder is incomplete now
    runtime.application.state.adapters._paths.clear()  # as after a restart
    assert runtime.ask(LOAD, artifact(hub))[0] == 403
    assert files_of(path) == ADAPTER


def test_versions_of_a_url_have_folders_of_their_own(runtime: Runtime, hub: FileServer) -> None:
    path = loaded(runtime, artifact(hub))
    hub.models["org/repo"] = {"adapter_config.json": b"v2"}
    body = artifact(hub)
    body["additional_config"]["hf_revision"] = COMMIT
    runtime.engine.answer("/v1/load_lora_adapter", Answer(400), Answer(body=b"loaded"))
    assert runtime.ask(LOAD, body)[0] == 400
    assert files_of(path) == ADAPTER
    assert files_of(loaded(runtime, body)) == {"adapter_config.json": b"v2"}
    assert not path.exists()


def test_folder_stays_if_only_the_repeated_load_is_refused(
    runtime: Runtime, hub: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first load may have had an effect."""

    async def sleep(_: float) -> None:
        return

    monkeypatch.setattr(runtime.application.state.engine, "_sleep", sleep)
    runtime.engine.answer("/v1/load_lora_adapter", Answer(504), Answer(400, b"has already been loaded"))
    assert runtime.ask(LOAD, artifact(hub))[0] == 400
    assert files_of(Path(runtime.engine.calls[0].body["lora_path"])) == ADAPTER


def test_invalid_options_of_a_reload_keep_the_files(runtime: Runtime, hub: FileServer) -> None:
    path = loaded(runtime, artifact(hub))
    runtime.application.state.adapters._paths.clear()
    body = artifact(hub)
    body["additional_config"]["hf_endpoint"] = "x"
    assert runtime.ask(LOAD, body)[0] == 422
    assert files_of(path) == ADAPTER


@pytest.mark.parametrize("status", [400, 404, 409])
def test_refused_adapter_leaves_nothing(
    runtime: Runtime, hub: FileServer, tmp_path: Path, status: int
) -> None:
    kept = loaded(runtime, artifact(hub))
    runtime.engine.answer("/v1/load_lora_adapter", Answer(status))
    for name in ("org/other", "org/repo"):
        assert runtime.ask(LOAD, artifact(hub, name))[0] == status
    assert list((tmp_path / "adapter_dir" / "n").iterdir()) == [kept]


def test_new_version_replaces_the_last_one(runtime: Runtime, hub: FileServer, tmp_path: Path) -> None:
    loaded(runtime, artifact(hub))
    second = loaded(runtime, artifact(hub, "org/other"))
    assert list((tmp_path / "adapter_dir" / "n").iterdir()) == [second]


def test_adapter_does_not_wait_for_a_model(hub: FileServer, tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.answer("/v1/load_lora_adapter", Answer(body=b"loaded"))
    hub.models["org/model"] = {"model.bin": b"m" * 100_000}
    folders = {name: str(tmp_path / name) for name in ("model_dir", "adapter_dir", "secret_dir")}
    may_continue = held_at(hub, "model.bin")
    with runtime_of(engine, **folders, artifact_hosts=("127.0.0.1",), max_downloads=1) as runtime:
        body = {"model_uri": "org/model", "download_extra_config": {"hf_endpoint": hub.url}}
        assert runtime.ask(DOWNLOAD, body)[1]["model_status"] == "downloading"
        loaded(runtime, artifact(hub))
        assert runtime.ask(DOWNLOAD, body)[1]["model_status"] == "downloading"
        may_continue.set()


# ---- models


def is_downloaded(runtime: Runtime, body: dict[str, Any]) -> bool:
    return bool(runtime.ask(DOWNLOAD, body)[1]["model_status"] == "downloaded")


def test_model_of_another_uri_is_downloaded_to_the_same_folder(
    runtime: Runtime, hub: FileServer, tmp_path: Path
) -> None:
    hub.files |= {"/a/m.bin": b"a", "/b/m.bin": b"bb"}
    for name, content in (("a", b"a"), ("b", b"bb")):
        body = {"model_uri": f"{hub.url}/{name}/m.bin"}
        wait_until(partial(is_downloaded, runtime, body))
        assert files_of(tmp_path / "model_dir" / "m.bin") == {"m.bin": content}


def test_other_files_of_a_model_are_another_download(
    runtime: Runtime, hub: FileServer, tmp_path: Path
) -> None:
    def body(**options: Any) -> dict[str, Any]:
        return {"model_uri": "org/repo", "download_extra_config": {"hf_endpoint": hub.url, **options}}

    wait_until(partial(is_downloaded, runtime, body(allow_file_suffix=["json"])))
    assert files_of(tmp_path / "model_dir" / "org" / "repo").keys() == {"adapter_config.json"}
    may_continue = held_at(hub, "safetensors")
    assert runtime.ask(DOWNLOAD, body())[1]["model_status"] == "downloading"
    assert runtime.ask(DOWNLOAD, body(ignore_patterns=["*.bin"]))[0] == 409
    may_continue.set()
    wait_until(partial(is_downloaded, runtime, body()))
    assert files_of(tmp_path / "model_dir" / "org" / "repo") == ADAPTER


def test_model_of_another_uri_waits_for_the_first_one(runtime: Runtime, hub: FileServer) -> None:
    hub.files |= {"/a/m.bin": b"a" * 100_000, "/b/m.bin": b"b"}
    hub.stop_after(1)
    assert runtime.ask(DOWNLOAD, {"model_uri": f"{hub.url}/a/m.bin"})[1]["model_status"] == "downloading"
    status, error, _ = runtime.ask(DOWNLOAD, {"model_uri": f"{hub.url}/b/m.bin"})
    assert (status, error["type"], error["param"]) == (409, "ConflictError", "model_name")
    hub.stop_after(None)


def test_engine_of_another_url_with_the_same_name_is_a_conflict(hub: FileServer, tmp_path: Path) -> None:
    hub.files |= {"/a/m": b"a", "/b/m": b"b"}
    command = f"{sys.executable} {TESTS / 'support' / 'runtime' / 'engine_script.py'} {tmp_path}"
    folders = {"registry_path": str(tmp_path / "engines.json"), "model_dir": str(tmp_path / "models")}
    with runtime_of(
        FakeEngine(), engine_command=command, artifact_hosts=("127.0.0.1",), tokens=(TOKEN,), **folders
    ) as runtime:
        path = "/v1/runtime/models/activate"
        secret = hub.url.replace("//", "//user:PASSWORD@") + "/a/m?signature=SIGNATURE"
        body = {"model_name": "q", "artifact_url": secret}
        assert runtime.ask(path, body)[0] == 200
        assert runtime.ask(path, body)[0] == 200
        assert runtime.ask(path, {**body, "artifact_url": f"{hub.url}/b/m"})[0] == 409
        [model] = runtime.ask("/v1/runtime/snapshot")[1]["models"]
        assert model["artifact_url"].startswith(hub.url)
        text = (tmp_path / "engines.json").read_text()
        for shown in (text, str(model)):
            assert "PASSWORD" not in shown
            assert "SIGNATURE" not in shown


# ---- values of requests


def test_path_of_the_form_of_a_hub_id_is_a_path(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines read a folder here before they ask the hub."""
    monkeypatch.chdir(tmp_path)
    for name in ("secrets/model", "adapter_dir/model"):
        (tmp_path / name).mkdir(parents=True)
    status, error, _ = runtime.ask(LOAD, {"lora_name": "n", "lora_path": "secrets/model"})
    assert (status, error["param"]) == (400, "lora_path")
    for url in ("secrets/model", "hf://secrets/model"):
        body = {"model_name": "m", "artifact_url": url}
        status, error, _ = runtime.ask("/v1/runtime/models/activate", body)
        assert (status, error["param"]) == (400, "artifact_url")
    assert runtime.engine.calls == []
    assert runtime.ask(LOAD, {"lora_name": "n", "lora_path": "adapter_dir/model"})[0] == 200
    assert runtime.engine.calls[0].body["lora_path"] == str(tmp_path / "adapter_dir" / "model")


@pytest.mark.parametrize("url", ["http://[", "https://[::1/x", "s3://[", "huggingface://["])
def test_malformed_url_is_no_internal_error(runtime: Runtime, url: str) -> None:
    found = [
        runtime.ask(LOAD, {"lora_name": "n", "artifact_url": url}),
        runtime.ask(LOAD, {"lora_name": "n", "lora_path": url}),
        runtime.ask("/v1/runtime/models/activate", {"model_name": "m", "artifact_url": url}),
    ]
    assert {status for status, _, _ in found} <= {400, 422}
    assert runtime.engine.calls == []


@pytest.mark.parametrize("key", ["a\nb", "ä", "a\x7f"])
def test_malformed_key_of_the_engine_is_refused(runtime: Runtime, hub: FileServer, key: str) -> None:
    status, error, _ = runtime.ask(LOAD, artifact(hub, additional_config={"api-key": key}))
    assert (status, error["param"]) == (400, "additional_config.api-key")
    assert runtime.engine.calls == []


@pytest.mark.parametrize("name", ["_x", "-x"])
def test_adapter_that_is_loaded_can_be_unloaded(runtime: Runtime, name: str) -> None:
    assert runtime.ask(LOAD, {"lora_name": name, "lora_path": "org/repo"})[0] == 200
    assert runtime.ask(UNLOAD, {"lora_name": name})[0] == 200
