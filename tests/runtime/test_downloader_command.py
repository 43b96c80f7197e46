"""`penstock download`, its other names, and downloads in child processes."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from penstock.runtime.downloader import (
    DownloadError,
    InvalidArgumentError,
    ModelNotFoundError,
    Options,
    Progress,
    default_local_dir,
    download_model,
    model_state,
    run,
)
from support.compat.aliases import ALIASES
from support.runtime.remote import Asked, FileServer, Sent, files_of, serving_files
from support.runtime.s3 import BUCKET, S3, serving_s3

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.rare  # each gate runs test_downloader_transfer.py

MODEL = {"config.json": b"{}", "model.safetensors": b"weights" * 30_000, "notes.txt": b"notes"}
NAME = "acme/tiny"
COMMANDS = {
    "penstock": ["-m", "penstock", "download"],
    "module": ["-m", "penstock.runtime.downloader"],
    "aibrix": ["-m", "aibrix.downloader"],
    "script": ["-c", "from penstock.runtime.downloader.command import download; download()"],
}
SECRETS = (
    "AKIASECRETKEY",
    "very/secret+key",
    "sessiontoken",
    "hf_secrettoken",
    "passwordofurl",
    "signatureofurl",
)


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A hub with the model."""
    with serving_files() as server:
        server.models[NAME] = dict(MODEL)
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    """A bucket with the model."""
    with serving_s3() as server:
        for name, content in MODEL.items():
            server.put(f"m1/{name}", content)
        yield server


def start(*arguments: object, command: str = "penstock", **environment: str) -> subprocess.Popen[str]:
    """The process of a command."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "AWS_", "TOS_", "DOWNLOADER_")) and not name.lower().endswith("_proxy")
    }
    path = os.pathsep.join([str(ALIASES / "aibrix"), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-W", "error", *COMMANDS[command], *map(str, arguments)],
        env={**inherited, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit status, standard output and standard error."""
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


@pytest.mark.needs("sources")
@pytest.mark.parametrize("command", COMMANDS)
def test_path_is_the_only_line_of_standard_output(server: FileServer, tmp_path: Path, command: str) -> None:
    arguments = ("--model-uri", NAME, "--local-dir", tmp_path, "--enable-progress-bar")
    status, output, errors = finish(start(*arguments, command=command, HF_ENDPOINT=server.url))
    assert (status, output) == (0, f"{tmp_path / NAME}\n"), errors
    assert files_of(tmp_path / NAME) == MODEL
    [line] = [line for line in errors.splitlines() if "downloading 3 of 3 files" in line]
    assert re.fullmatch(r"[\d-]+ [\d:,]+ INFO .*", line.rpartition("\r")[2])  # not after the bar
    assert "3/3" in errors


@pytest.mark.needs("sources")
def test_environment_of_the_document_is_used(s3: S3, tmp_path: Path) -> None:
    environment = {
        "DOWNLOADER_ALLOW_FILE_SUFFIX": "json, safetensors",
        "DOWNLOADER_NUM_THREADS": "16",
        "DOWNLOADER_LOCAL_DIR": str(tmp_path),
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_ENDPOINT_URL": s3.url,
        "AWS_REGION": "us-west-2",
    }
    s3.requests.clear()
    status, output, errors = finish(start("--model-uri", f"s3://{BUCKET}/m1/", **environment))
    assert (status, output) == (0, f"{tmp_path / 'm1'}\n"), errors
    assert files_of(tmp_path / "m1").keys() == {"config.json", "model.safetensors"}
    assert all("/us-west-2/s3/" in request.headers["AUTHORIZATION"] for request in s3.requests)


@pytest.mark.needs("sources")
def test_name_and_patterns_are_options(server: FileServer, tmp_path: Path) -> None:
    extra = json.dumps({"hf_endpoint": server.url, "num_threads": 1})
    options = ["--model-name", "a/b", "--allow-pattern", "*.json", "--allow-pattern", "*.txt"]
    options += ["--ignore-pattern", "n*", "--download-extra-config", extra]
    status, output, _ = finish(start("--model-uri", NAME, "--local-dir", tmp_path, *options))
    assert (status, output) == (0, f"{tmp_path / 'a' / 'b'}\n")
    assert files_of(tmp_path / "a" / "b") == {"config.json": b"{}"}


@pytest.mark.needs("sources")
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--download-extra-config", "{bad"], 2, "a JSON object is expected"),
        (["--download-extra-config", "[1]"], 2, "a JSON object is expected"),
        (["--download-extra-config", '{"bogus": 1}'], 2, "bogus: unknown key"),
        (["--download-extra-config", '{"num_threads": 0}'], 2, "num_threads=0: expected `int` >= 1"),
        (
            ["--download-extra-config", '{"num_threads": "64MB"}'],
            2,
            "num_threads='64MB': expected an integer",
        ),
        (["--download-extra-config", f'{{"num_threads": "{"9" * 5000}"}}'], 2, "expected an integer"),
        (["--download-extra-config", '{"hf_endpoint": "x"}'], 2, "HF_ENDPOINT): expected a URL such as"),
        (["--model-uri", "a/b/c"], 2, "expected org/name of the hub, a URI, /path or ./path"),
        (
            ["--model-uri", "s3://b/m", "--download-extra-config", '{"ak": "x"}'],
            2,
            "sk (AWS_SECRET_ACCESS_KEY) is missing",
        ),
        (["--model-uri", "tos://b/m"], 2, "ak (TOS_ACCESS_KEY) is missing"),
        (["--model-uri", "https://h/f#sha256=00"], 2, "64 hexadecimal digits"),
        (["--ignore-pattern", "*"], 1, "files is selected: ignore_patterns='*'"),
        (["--model-name", "../x"], 2, "model_name"),
        (["--model-uri", "acme/none"], 1, "not found on the hub"),
        (["--nonsense"], 2, "--nonsense"),
    ],
)
def test_error_is_one_line_without_a_traceback(
    server: FileServer, tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    found = finish(start("--model-uri", NAME, "--local-dir", tmp_path, *arguments, HF_ENDPOINT=server.url))
    assert found[:2] == (status, "")
    assert message in found[2].splitlines()[-1]
    assert "Traceback" not in found[2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs("sources")
def test_missing_prefix_has_a_status_that_is_not_zero(s3: S3, tmp_path: Path) -> None:
    environment = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": s3.url}
    process = start("--model-uri", f"s3://{BUCKET}/none/", "--local-dir", tmp_path, **environment)
    status, output, errors = finish(process)
    assert (status, output) == (1, "")
    assert f"s3://{BUCKET}/none/: no object" in errors


@pytest.mark.needs("sources")
@pytest.mark.parametrize(
    "variable", ["DOWNLOADER_NUM_THREADS", "DOWNLOADER_FORCE_DOWNLOAD", "DOWNLOADER_MAX_BYTES"]
)
def test_error_names_the_environment_variable(tmp_path: Path, variable: str) -> None:
    process = start("--model-uri", NAME, "--local-dir", tmp_path, **{variable: "often"})
    status, _, errors = finish(process)
    assert (status, variable in errors) == (2, True)


@pytest.mark.needs("sources")
def test_credentials_are_in_no_output(server: FileServer, s3: S3, tmp_path: Path) -> None:
    """Successes and failures of all kinds, with all log records."""
    key, secret, session, token, password, signature = SECRETS
    environment = {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_SESSION_TOKEN": session,
        "AWS_ENDPOINT_URL": s3.url,
        "TOS_ACCESS_KEY": key,
        "TOS_SECRET_KEY": secret,
        "TOS_ENDPOINT": s3.url,
        "HF_TOKEN": token,
        "HF_ENDPOINT": server.url,
    }
    signed = f"?X-Amz-Signature={signature}"

    def answer(asked: Asked) -> Sent | None:
        if "/resolve/" in asked.path and asked.path.endswith("notes.txt"):
            return Sent(302, b"", {"Location": f"{server.url}/none{signed}"})
        if asked.path == "/echo.bin":
            return Sent(403, repr(asked.headers.items()).encode())
        return None

    server.faults.append(answer)
    host = server.url.removeprefix("http://")
    extra = json.dumps({"ak": key, "sk": secret, "hf_token": token, "headers": {"X-Key": secret}})
    runs: list[list[str]] = [
        ["--model-uri", f"s3://{BUCKET}/m1/", "--enable-progress-bar"],
        ["--model-uri", f"s3://{BUCKET}/none/"],
        ["--model-uri", "s3://none/none/"],
        ["--model-uri", f"tos://{BUCKET}/m1"],
        ["--model-uri", NAME],
        ["--model-uri", "acme/none"],
        ["--model-uri", f"http://user:{password}@{host}/echo.bin{signed}"],
        ["--model-uri", f"http://user:{password}@{host}/{signed}"],
        ["--model-uri", f"http://user:{password}@[/x.bin{signed}"],
        ["--model-uri", f"ftp://user:{password}@{host}/x"],
        ["--model-uri", f"s3://{BUCKET}/m1/", "--download-extra-config", extra],
        ["--download-extra-config", extra[:-1]],
        ["--download-extra-config", json.dumps({"ak": [key], "sk": secret})],
        ["--download-extra-config", json.dumps({"headers": [secret]})],
        # Credentials that no header can have, or no signature.
        ["--model-uri", NAME, "--download-extra-config", json.dumps({"hf_token": f"{token}\nx"})],
        ["--model-uri", NAME, "--download-extra-config", json.dumps({"hf_token": f"{token}\u20ac"})],
        [
            "--model-uri",
            f"{server.url}/x",
            "--download-extra-config",
            json.dumps({"headers": {"X": f"{secret}\n"}}),
        ],
        [
            "--model-uri",
            f"s3://{BUCKET}/m1/",
            "--download-extra-config",
            json.dumps({"ak": f"{key}\n", "sk": secret}),
        ],
        [
            *("--model-uri", f"s3://{BUCKET}/m1/"),
            *("--download-extra-config", json.dumps({"ak": key, "sk": f"{secret}\ud800"})),
        ],
    ]
    processes = [
        start(*arguments, "--local-dir", tmp_path / str(number), "--log-level", "debug", **environment)
        for number, arguments in enumerate(runs)
    ]
    for arguments, (_, output, errors) in zip(runs, map(finish, processes), strict=True):
        assert output or errors
        assert "Traceback" not in errors
        for value in SECRETS:
            assert value not in output + errors, arguments
    asked = [item.headers.get("Authorization", "") for item in server.requests]
    assert f"Bearer {token}" in asked  # the credentials were used
    states = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(value.encode() in state for state in states for value in SECRETS)


@pytest.mark.needs("sources")
def test_two_processes_with_one_target_download_once(server: FileServer, tmp_path: Path) -> None:
    server.stop_after(100_000)
    arguments = ("--model-uri", NAME, "--local-dir", tmp_path)
    first = start(*arguments, HF_ENDPOINT=server.url)
    assert server.is_stopped.wait(20)
    second = start(*arguments, HF_ENDPOINT=server.url)
    assert second.stderr is not None
    assert "waiting for another download" in second.stderr.readline()
    assert model_state(tmp_path / NAME) == ("downloading", "huggingface")
    server.stop_after(None)
    assert finish(first)[:2] == (0, f"{tmp_path / NAME}\n")
    assert finish(second)[:2] == (0, f"{tmp_path / NAME}\n")
    assert files_of(tmp_path / NAME) == MODEL
    names = [asked.path.rpartition("/")[2] for asked in server.asked("/resolve/")]
    assert sorted(set(names)) == sorted(MODEL)
    assert names.count("config.json") == names.count("notes.txt") == 1


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let children receive SIGINT, also if this process ignores it (as a background job)."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.needs("sources")
@pytest.mark.usefixtures("interruptible")
def test_interrupt_ends_a_download_and_its_lock(server: FileServer, tmp_path: Path) -> None:
    server.stop_after(100_000)
    arguments = ("--model-uri", NAME, "--local-dir", tmp_path)
    process = start(*arguments, command="penstock", HF_ENDPOINT=server.url)
    assert server.is_stopped.wait(20)
    process.send_signal(signal.SIGINT)
    status, output, errors = finish(process)
    assert (status, output) == (130, ""), errors
    assert "Traceback" not in errors
    server.stop_after(None)
    assert finish(start(*arguments, HF_ENDPOINT=server.url))[0] == 0


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import penstock.cli", ("msgspec", "urllib3", "botocore")),
        ("from penstock.runtime.downloader import Options, download, resolve, run", ("urllib3", "botocore")),
    ],
)
def test_libraries_are_imported_by_downloads_only(statement: str, absent: tuple[str, ...]) -> None:
    code = f"import sys\n{statement}\nprint([name for name in {absent} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_function_of_aibrix_downloads(server: FileServer, tmp_path: Path) -> None:
    extra = {"hf_endpoint": server.url}
    path = download_model(NAME, str(tmp_path), "named", extra, True)  # noqa: FBT003 - AIBrix's signature
    assert path == tmp_path / "named"
    assert files_of(path) == MODEL
    assert list(inspect.signature(download_model).parameters) == [
        "model_uri",
        "local_path",
        "model_name",
        "download_extra_config",
        "enable_progress_bar",
    ]


def test_default_directory_is_that_of_aibrix() -> None:
    assert default_local_dir({}) == Path(tempfile.gettempdir()) / f"aibrix-{os.geteuid()}" / "models"
    assert default_local_dir({"DOWNLOADER_LOCAL_DIR": "/models"}) == Path("/models")


# ---- child processes


@pytest.mark.anyio
async def test_child_downloads_and_reports_progress(server: FileServer, tmp_path: Path) -> None:
    options = Options.load(NAME, {"hf_endpoint": server.url, "hf_token": "hf_secret"}, {})
    seen: list[Progress] = []
    assert await run(NAME, tmp_path / "m", options, seen.append) == tmp_path / "m"
    assert files_of(tmp_path / "m") == MODEL
    assert seen[-1].phase == "done"
    assert seen[-1].done_bytes == sum(map(len, MODEL.values()))
    assert server.requests[0].headers["Authorization"] == "Bearer hf_secret"


@pytest.mark.anyio
async def test_child_raises_the_errors_of_a_download(server: FileServer, tmp_path: Path) -> None:
    options = Options.load(NAME, {"hf_endpoint": server.url}, {})
    with pytest.raises(ModelNotFoundError, match="acme/none"):
        await run("acme/none", tmp_path / "m", options)
    with pytest.raises(InvalidArgumentError) as caught:
        await run("a/b/c", tmp_path / "m", options)
    assert caught.value.field == "model_uri"
    invalid = Options.load(NAME, {"hf_endpoint": server.url, "hf_token": "secret\n"}, {})
    with pytest.raises(InvalidArgumentError, match="credential is invalid") as caught:
        await run(NAME, tmp_path / "m", invalid)
    assert caught.value.field == "headers"


@pytest.mark.anyio
async def test_unforeseen_error_in_the_child_has_no_details(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_METADATA_SERVICE_TIMEOUT", "secret")  # botocore raises a ValueError
    uri = "s3://models/m1/"
    with pytest.raises(DownloadError) as caught:
        await run(uri, tmp_path / "m", Options.load(uri, {"endpoint": "http://127.0.0.1:1"}, {}))
    assert str(caught.value) == "the download failed: ValueError"


@pytest.mark.anyio
async def test_cancelled_task_ends_the_child(server: FileServer, tmp_path: Path) -> None:
    server.stop_after(100_000)
    options = Options.load(NAME, {"hf_endpoint": server.url}, {})
    with anyio.CancelScope() as scope:

        def show(_: Progress) -> None:
            if server.is_stopped.is_set():
                scope.cancel()

        await run(NAME, tmp_path / "m", options, show)
    assert scope.cancelled_caught
    server.stop_after(None)
    assert await run(NAME, tmp_path / "m", options) == tmp_path / "m"
    assert files_of(tmp_path / "m") == MODEL


@pytest.mark.anyio
async def test_killed_child_is_an_error(server: FileServer, tmp_path: Path) -> None:
    server.stop_after(100_000)
    options = Options.load(NAME, {"hf_endpoint": server.url}, {})

    def kill(_: Progress) -> None:
        if server.is_stopped.is_set():
            for child in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
                for pid in child.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)

    with pytest.raises(DownloadError, match="killed"):
        await run(NAME, tmp_path / "m", options, kill)
    server.stop_after(None)
