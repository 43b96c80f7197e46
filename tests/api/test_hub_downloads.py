"""Downloads of GGUF files and aliases from a local hub: resumption, checksums, space, without a network."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import _hub
from penstock._hub_aliases import aliases, default_alias
from penstock._hub_ids import parse_hub_model
from support.api.engines import wait_until
from support.api.ggufs import Type, write_gguf
from support.api.hub import Hub, Repository, environment_of, run_in_process, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

GGUFS = "acme/ggufs"
LARGE = "acme/large"
PARTS = "acme/parts"
SIZE = 1 << 20

#: Prints the path of each model, or the error; after `offline`, without a network. Files are received in
#: parts of 64 KiB.
RESOLVE = """
import sys
import penstock
from penstock import _hub
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 1 << 16
for model in sys.argv[1:]:
    if model == "offline":
        constants.HF_HUB_OFFLINE = True
        continue
    try:
        print(_hub.resolve(model))
    except penstock.ModelLoadError as error:
        print(f"{type(error).__name__}: {error}")
"""
#: Prints the context of an engine, an encoded text and the bytes of the weights.
OPEN = """
import sys
import penstock
with penstock.Engine(sys.argv[1], threads=1) as engine:
    print(engine.info.max_model_len, penstock.Tokenizer(sys.argv[1]).encode("ab"))
print(penstock.describe(sys.argv[1])["bytes"])
"""
#: Prints the error of a download; after a line of input, waits for the transfers that go on.
FIND = """
import sys
import threading
import penstock
from penstock import _hub
try:
    _hub.find(sys.argv[1])
except penstock.ModelLoadError as error:
    print(error, flush=True)
if sys.stdin.readline():
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join()
"""
FULL_DISK = """
import shutil
from collections import namedtuple
shutil.disk_usage = lambda folder: namedtuple("Usage", "total used free")(9, 9, 1000)
"""


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repository]:
    """Small models as GGUF files, also under the name of an alias; a large file; a small and a large part."""
    ggufs, large, parts = (tmp_path_factory.mktemp(name) for name in ("ggufs", "large", "parts"))
    for kind in (Type.Q8_0, Type.Q4_0):
        write_gguf(ggufs / f"Model-{kind.name}.gguf", kind)
    shutil.copy(ggufs / "Model-Q4_0.gguf", ggufs / "Model-Q4_K_M.gguf")
    (large / "model.gguf").write_bytes(bytes(range(256)) * (SIZE // 256))
    for number, size in enumerate((1000, SIZE), start=1):
        (parts / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes(size))
    (parts / "config.json").write_text("{}")
    source = parse_hub_model(aliases()[default_alias()])
    assert source is not None
    found = Repository(ggufs, "1" * 40)
    others = {LARGE: Repository(large, "2" * 40), PARTS: Repository(parts, "3" * 40)}
    return {GGUFS: found, source.name: found} | others


@pytest.fixture
def hub(repositories: dict[str, Repository]) -> Iterator[Hub]:
    with serving({}, dict(repositories)) as hub:
        yield hub


def resolved(hub: Hub, home: Path, *models: str, prefix: str = "", **environment: str) -> list[str]:
    """The path of each model, or the error."""
    done = run_in_process(hub, prefix + RESOLVE, home, *models, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def partial_files(home: Path) -> list[Path]:
    """Files that are not complete."""
    return list(home.glob("hub/models--*/blobs/*.incomplete"))


@pytest.mark.parametrize(
    ("model", "file"),
    [
        (f"{GGUFS}:q8_0", "Model-Q8_0.gguf"),
        (GGUFS, "Model-Q4_K_M.gguf"),
        (default_alias(), "Model-Q8_0.gguf"),
    ],
)
def test_gguf_file_of_the_hub_opens_everywhere(
    hub: Hub, repositories: dict[str, Repository], tmp_path: Path, model: str, file: str
) -> None:
    local = run_in_process(hub, OPEN, tmp_path, str(repositories[GGUFS].folder / file))
    done = run_in_process(hub, OPEN, tmp_path, model)
    assert (done.returncode, done.stdout) == (0, local.stdout), done.stderr
    assert hub.asked_files("GET") == [file]
    hub.requests.clear()
    assert run_in_process(hub, OPEN, tmp_path, model, HF_HUB_OFFLINE="1").stdout == local.stdout
    assert hub.requests == []


def test_file_of_a_repository_is_downloaded_at_a_revision(hub: Hub, tmp_path: Path) -> None:
    name = f"{GGUFS}/Model-Q4_0.gguf@{'1' * 40}"
    paths = resolved(hub, tmp_path, name, f"{GGUFS}@main:Q4_0")
    assert [path.rpartition("/")[2] for path in paths] == ["Model-Q4_0.gguf"] * 2
    assert hub.asked_files("GET") == ["Model-Q4_0.gguf"], "the same file is downloaded once"


def test_cached_models_open_without_a_network(repositories: dict[str, Repository], tmp_path: Path) -> None:
    names = [f"{GGUFS}:Q4_0", default_alias()]
    with serving({}, repositories) as hub:
        *expected, parts = resolved(hub, tmp_path, *names, PARTS)
    (Path(parts) / "model-00002-of-00002.safetensors").unlink()
    missing = [f"{GGUFS}:Q8_0", "qwen3-8b", GGUFS, PARTS]
    found = resolved(hub, tmp_path, *names, *missing, "offline", *names, missing[0])
    assert found[:2] == found[6:8] == expected
    first, second, third, fourth = found[2:6]
    assert first.startswith(
        f"ModelLoadError: {GGUFS}:Q8_0: not in the local cache, and the hub at {hub.address}"
    )
    assert "cannot be reached" in first
    assert second.startswith(f"ModelLoadError: qwen3-8b ({aliases()['qwen3-8b']}): not in the local cache")
    assert third.startswith(f"ModelLoadError: {GGUFS}: not in the local cache"), "it stands for Q4_K_M"
    assert fourth.startswith(f"ModelLoadError: {PARTS}: not in the local cache"), "it is not complete"
    assert found[8].endswith(f"run this first: hf download {GGUFS} --include '*Q8_0.gguf'")


@pytest.mark.parametrize(
    ("cached", "model", "found"),
    [
        ("m-Q2_K.gguf", "acme/m", None),
        ("m-Q2_K.gguf", "acme/m:Q2_K", "m-Q2_K.gguf"),
        ("m-Q2_K.gguf", "acme/m/m-Q2_K.gguf", "m-Q2_K.gguf"),
        ("m-Q4_K_M.gguf", "acme/m", "m-Q4_K_M.gguf"),
        ("config.json", "acme/m", ""),
    ],
)
def test_cached_file_alone_is_a_model_only_if_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: str, model: str, found: str | None
) -> None:
    """Without the names of the repository's files, as programs leave it that download a file."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--acme--m"
    folder = repository / "snapshots" / ("1" * 40)
    for path, text in ((folder / cached, ""), (repository / "refs" / "main", folder.name)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert _hub.cached(model) == (None if found is None else str(folder / found))


def test_first_error_does_not_wait_for_other_transfers(hub: Hub, tmp_path: Path) -> None:
    hub.is_damaging, hub.stall_after = True, SIZE // 2
    environment = environment_of(hub, tmp_path) | {"HF_HUB_DOWNLOAD_TIMEOUT": "1000"}
    for is_released in (False, True):
        process = subprocess.Popen(
            [sys.executable, "-c", FIND, PARTS],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                assert process.stdout is not None
                assert "model-00001-of-00002.safetensors was received" in process.stdout.readline()
                if is_released:
                    hub.stall_after = None
                    hub.is_released.set()
                process.communicate("\n" if is_released else "", timeout=60)
            finally:
                process.kill()
    [partial] = partial_files(tmp_path)
    assert partial.stat().st_size < SIZE, "the other transfer was stopped"


def test_unknown_repository_is_an_error_with_an_alias(hub: Hub, tmp_path: Path) -> None:
    [message] = resolved(hub, tmp_path, "Qwen/Qwen3-06B")
    assert "not found on the hub" in message
    assert message.endswith("; did you mean qwen3-0.6b?")


def test_broken_transfer_continues(hub: Hub, repositories: dict[str, Repository], tmp_path: Path) -> None:
    """In the same call, or in the next one with versions of the library that do not try again."""
    hub.breaks = [300_000, 300_000]
    for _ in range(3):
        [found] = resolved(hub, tmp_path, LARGE)
        if not found.startswith("ModelLoadError"):
            break
        assert found.endswith("the next attempt continues the download")
    expected = (repositories[LARGE].folder / "model.gguf").read_bytes()
    assert Path(found).read_bytes() == expected
    starts = [int(asked.removeprefix("bytes=").rstrip("-") or 0) for asked in hub.ranges]
    assert len(starts) == 3
    assert starts[0] == 0
    assert 0 < starts[1] <= 300_000
    assert starts[1] < starts[2] <= 600_000


def test_download_of_a_killed_process_continues(
    hub: Hub, repositories: dict[str, Repository], tmp_path: Path
) -> None:
    hub.stall_after = 500_000
    process = subprocess.Popen(
        [sys.executable, "-c", RESOLVE, LARGE],
        cwd=tmp_path,
        env=environment_of(hub, tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with process:
        try:
            assert hub.is_stalled.wait(60)
            wait_until(lambda: sum(file.stat().st_size for file in partial_files(tmp_path)) >= 400_000)
        finally:
            process.kill()
    [partial] = partial_files(tmp_path)
    size = partial.stat().st_size
    hub.stall_after = None
    hub.is_released.set()
    hub.ranges.clear()
    [path] = resolved(hub, tmp_path, LARGE)
    assert hub.ranges == [f"bytes={size}-"]
    assert not partial.exists()
    assert Path(path).read_bytes() == (repositories[LARGE].folder / "model.gguf").read_bytes()


def test_wrong_checksum_deletes_the_file(
    hub: Hub, repositories: dict[str, Repository], tmp_path: Path
) -> None:
    content = (repositories[LARGE].folder / "model.gguf").read_bytes()
    damaged = bytes([content[0] ^ 1]) + content[1:]
    hub.is_damaging = True
    [message] = resolved(hub, tmp_path, LARGE)
    sums = [hashlib.sha256(data).hexdigest() for data in (damaged, content)]
    assert message == (
        f"ModelLoadError: {LARGE}: model.gguf was received with the SHA-256 {sums[0]}, and not {sums[1]}, "
        "which the hub names; the file was deleted"
    )
    assert [file for file in tmp_path.glob("hub/models--*/*/*") if file.is_file()] == []
    hub.is_damaging = False
    [path] = resolved(hub, tmp_path, LARGE)
    assert Path(path).read_bytes() == content


def test_cached_file_is_not_verified_again(hub: Hub, tmp_path: Path) -> None:
    [path] = resolved(hub, tmp_path, LARGE)
    Path(path).write_bytes(b"other contents")
    hub.requests.clear()
    assert resolved(hub, tmp_path, LARGE) == [path]
    assert Path(path).read_bytes() == b"other contents"
    assert hub.asked_files("GET") == hub.asked_files("HEAD") == []


def test_too_little_space_is_an_error_before_the_download(hub: Hub, tmp_path: Path) -> None:
    [message] = resolved(hub, tmp_path, LARGE, prefix=FULL_DISK)
    folder = tmp_path / "hub"
    assert message == (
        f"ModelLoadError: {LARGE}: the download needs {SIZE:,} bytes, and {folder} has 1,000 bytes free"
    )
    assert hub.asked_files("GET") == []


def test_new_commit_downloads_only_new_files(hub: Hub, tmp_path: Path) -> None:
    name = f"{GGUFS}:Q8_0"
    [first] = resolved(hub, tmp_path, name)
    hub.others[GGUFS] = hub.others[GGUFS]._replace(sha="3" * 40)
    hub.requests.clear()
    [second] = resolved(hub, tmp_path, name)
    assert hub.asked_files("GET") == []
    assert Path(first).samefile(second)
    assert first != second
