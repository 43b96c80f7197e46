"""Adapters that the runtime downloads and the engine loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from penstock.runtime import RuntimeSettings
from penstock.runtime.adapters import Adapters
from penstock.runtime.artifacts import secrets_of
from penstock.runtime.downloads import Downloads
from penstock.runtime.engine import EngineClient, Reply
from support.api.engines import BACKENDS
from support.runtime.remote import files_of
from support.runtime.runtime import Answer, FakeEngine, Runtime, files_near, folders, runtime_of
from support.runtime.s3 import ACCESS, BUCKET, S3, serving_s3

if TYPE_CHECKING:
    from collections.abc import Iterator

LOAD, UNLOAD = "/v1/lora_adapter/load", "/v1/lora_adapter/unload"
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights" * 1000}
KEYS = {"aws_access_key_id": ACCESS["ak"], "aws_secret_access_key": ACCESS["sk"]}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving_s3() as server:
        for name, content in FILES.items():
            server.put(f"adapter/{name}", content)
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
    assert files_of(Path(body["local_path"])) == FILES
    assert Path(body["local_path"]).is_relative_to(tmp_path / "adapter_dir" / "n")
    [call] = engine.calls
    assert call.body == {"lora_name": "n", "lora_path": body["local_path"]}
    status, body, _ = runtime.ask(UNLOAD, {"lora_name": "n"})
    assert (status, body["was_loaded"]) == (200, True)
    assert not (tmp_path / "adapter_dir" / "n").exists()


def test_folder_stays_when_the_request_says_so(runtime: Runtime, s3: S3) -> None:
    path = runtime.ask(LOAD, artifact(s3))[1]["local_path"]
    assert runtime.ask(UNLOAD, {"lora_name": "n", "cleanup_local": False})[0] == 200
    assert files_of(Path(path)) == FILES


def test_dotted_name_is_accepted_to_the_end(runtime: Runtime, engine: FakeEngine, s3: S3) -> None:
    assert runtime.ask(LOAD, artifact(s3, lora_name="a.b"))[0] == 200
    assert engine.calls[0].body["lora_name"] == "a.b"
    assert runtime.ask(UNLOAD, {"lora_name": "a.b"})[0] == 200


def test_key_of_the_configuration_is_sent_to_the_engine(runtime: Runtime, engine: FakeEngine, s3: S3) -> None:
    body = artifact(s3)
    body["additional_config"]["api-key"] = "key"
    assert runtime.ask(LOAD, body)[0] == 200
    assert engine.calls[0].headers["authorization"] == "Bearer key"


def test_token_as_the_key_of_a_request_is_not_sent(engine: FakeEngine, s3: S3, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**folders(tmp_path), "artifact_hosts": ("127.0.0.1",)}
    body = artifact(s3)
    body["additional_config"]["api-key"] = "token"
    with runtime_of(engine, **settings, tokens=("token",), engine_key="boss") as runtime:
        assert runtime.ask(LOAD, body, headers={"Authorization": "Bearer token"})[0] == 200
    assert engine.calls[0].headers["authorization"] == "Bearer boss"


def test_credentials_come_from_a_mounted_secret(
    runtime: Runtime, s3: S3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret_dir" / "my-secret"
    (secret / "..data").mkdir(parents=True)
    facts = {**KEYS, "aws_endpoint_url": s3.url}
    for name, value in facts.items():
        (secret / name).write_text(value + "\n")
    (secret / "..aws_secret_access_key").write_text("wrong")
    assert secrets_of(runtime.application.state.settings, "my-secret") == facts
    body = artifact(s3, credentials=None, credentials_secret="my-secret")  # noqa: S106 - a name
    body["additional_config"]["endpoint"] = "http://127.0.0.1:1"  # that of the secret comes first
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
        ({"artifact_url": "http://169.254.169.254/x"}, 400, "ValidationError"),
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
    assert files_of(Path(engine.calls[0].body["lora_path"])) == FILES


def test_folders_of_two_urls_are_never_mixed(runtime: Runtime, s3: S3) -> None:
    first = runtime.ask(LOAD, artifact(s3))[1]["local_path"]
    second = runtime.ask(LOAD, artifact(s3, artifact_url=f"s3://{BUCKET}/adapter/adapter_config.json"))[1]
    assert first != second["local_path"]
    assert runtime.ask(LOAD, artifact(s3, artifact_url=f"s3://{BUCKET}/none/"))[0] == 404
    assert files_of(Path(second["local_path"])) == {"adapter_config.json": FILES["adapter_config.json"]}


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_cancelled_unload_deletes_the_folder(backend: dict[str, Any], tmp_path: Path) -> None:
    """The engine has unloaded the adapter: there is no second chance."""
    folder = tmp_path / "elsewhere" / "n" / ("0" * 12)
    (folder / ".cache" / "penstock").mkdir(parents=True)
    (folder / ".cache" / "penstock" / "lock").touch()
    settings = RuntimeSettings(adapter_dir=str(tmp_path / "adapters"))

    async def main() -> None:
        scope = anyio.CancelScope()

        class Engine(EngineClient):
            async def unload_adapter(self, *_: object) -> Reply:
                scope.cancel()
                return Reply(200, b"")

        adapters = Adapters(settings, Engine(settings), Downloads(settings))
        adapters._paths["n"] = folder
        with scope:
            await adapters._unload("n", None, None, deletes=True)
        assert adapters._paths == {}

    anyio.run(main, **backend)
    assert not folder.exists()
