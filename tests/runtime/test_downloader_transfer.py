"""Downloads from the hub and from web servers: interruptions, faults of servers, existing files."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pytest

from penstock.runtime.downloader import (
    AccessDeniedError,
    ModelNotFoundError,
    Options,
    download,
    model_state,
    resolve,
)
from support.runtime.remote import COMMIT, Asked, FileServer, Sent, files_of, serving_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


MIB = 1 << 20
RANDOM = random.Random(2)
WEIGHTS = RANDOM.randbytes(4 * MIB + 123)
MODEL = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": RANDOM.randbytes(100_000),
    "tokenizer.json": b"[]" * 1000,
    "nested/folder/notes.txt": b"notes",
}
PARTS = {"part_threshold": MIB, "part_chunksize": MIB, "num_threads": 4}
NAME = "acme/tiny"

#: For each line on standard input: a download in a process that kills itself after a number of written bytes:
#: before the next write, in the middle of it, or between a write and its record (8 bytes).
FORKS = """
import json, os, signal, sys, threading
from pathlib import Path
from penstock.runtime.downloader import Options, download, resolve
import penstock.runtime.downloader.hub

pwrite, lock, rest, moment = os.pwrite, threading.Lock(), 0, ""

def write(file, data, offset):
    global rest
    with lock:
        rest -= len(data)
        if rest < 0 and (moment != "record" or len(data) == 8):
            if moment == "write":
                pwrite(file, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(file, data, offset)

for line in sys.stdin:
    uri, directory, extra, rest, moment = json.loads(line)
    child = os.fork()
    if child == 0:
        if rest:
            os.pwrite = write
        download(resolve(uri, Options.load(uri, extra, {})), Path(directory))
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Forks:
    """Downloads in processes; their parent has no threads."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, *arguments: object) -> int:
        """The status of the process of a download."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture
def forks() -> Iterator[Forks]:
    """A parent of downloads."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Forks(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A hub with the model."""
    with serving_files() as server:
        server.models[NAME] = dict(MODEL)
        yield server


def fetch(server: FileServer, directory: Path, uri: str = NAME, **extra: Any) -> dict[str, bytes]:
    """The files of a download."""
    keywords = {name: extra.pop(name) for name in ("clock", "cancelled", "progress") if name in extra}
    options = Options.load(uri, {"hf_endpoint": server.url, **PARTS, **extra}, {})
    download(resolve(uri, options), directory, **keywords)
    return files_of(directory)


def is_weights(asked: Asked) -> bool:
    return asked.method == "GET" and "model-00001" in asked.path


class Record(NamedTuple):
    """The record of an incomplete file on disk."""

    data: bytes
    part_size: int
    #: The complete bytes of each part.
    done: list[int]

    @classmethod
    def read(cls, directory: Path) -> Self:
        """That of the only such file."""
        [state] = directory.glob(".cache/penstock/*.state")
        facts, counts = state.read_bytes()[:4096], state.read_bytes()[4096:]
        part_size = json.loads(facts.partition(b"\n")[0])["part_size"]
        done = [count for (count,) in struct.iter_unpack("<Q", counts)]
        return cls(state.with_suffix(".part").read_bytes(), part_size, done)

    def ranges(self) -> list[tuple[int, int]]:
        """The offset of the first recorded byte of each part, and that after the last one."""
        return [
            (number * self.part_size, number * self.part_size + size) for number, size in enumerate(self.done)
        ]

    def missing(self) -> set[tuple[int, int]]:
        """The offsets of the first and the last byte of the rest of each part."""
        ends = [min(start + self.part_size, len(self.data)) for start, _ in self.ranges()]
        found = zip(self.ranges(), ends, strict=True)
        return {(stop, end - 1) for (_, stop), end in found if stop < end}


# ---- the hub


@pytest.mark.parametrize("uri", [NAME, f"huggingface://{NAME}", f"hf://{NAME}", f"{NAME}@main"])
def test_model_of_the_hub_is_one_commit(server: FileServer, tmp_path: Path, uri: str) -> None:
    assert fetch(server, tmp_path, uri) == MODEL
    assert model_state(tmp_path) == ("complete", "huggingface")
    files = server.asked("/resolve/")
    assert all(f"/resolve/{COMMIT}/" in asked.path for asked in files)
    ranges = {asked.range() for asked in files if "model-00001" in asked.path}
    assert len(ranges) == 5
    assert len(files) == len(MODEL) + 4


def test_variables_of_the_hub_hold_for_its_schemes() -> None:
    for uri in (NAME, f"huggingface://{NAME}", f"hf://{NAME}", f"HF://{NAME}"):
        assert Options.load(uri, {}, {"HF_REVISION": "v2"}).hf_revision == "v2"
        assert resolve(uri, Options.load(uri, {}, {"HF_REVISION": "v2"})).uri == f"huggingface://{NAME}@v2"


def test_second_download_fetches_no_file(server: FileServer, tmp_path: Path) -> None:
    fetch(server, tmp_path)
    server.requests.clear()
    assert fetch(server, tmp_path) == MODEL
    assert server.asked("/resolve/") == []


def test_file_of_another_program_is_kept_if_its_checksum_matches(server: FileServer, tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "config.json"):
        (tmp_path / name).write_bytes(MODEL[name])
    (tmp_path / "tokenizer.json").write_bytes(b"x" * len(MODEL["tokenizer.json"]))
    assert fetch(server, tmp_path) == MODEL
    names = {asked.path.rpartition("/")[2] for asked in server.asked("/resolve/")}
    assert names == {"model-00002-of-00002.safetensors", "tokenizer.json", "notes.txt"}


def test_removed_file_makes_the_model_partial(server: FileServer, tmp_path: Path) -> None:
    assert model_state(tmp_path / "m") == ("absent", None)
    assert model_state(tmp_path) == ("unknown", None)
    fetch(server, tmp_path)
    (tmp_path / "config.json").unlink()
    assert model_state(tmp_path) == ("partial", "huggingface")
    assert fetch(server, tmp_path) == MODEL


def test_files_of_earlier_versions_are_removed(server: FileServer, tmp_path: Path) -> None:
    """Files that are not in the model now; also those of another version that are not selected now."""
    fetch(server, tmp_path)
    (tmp_path / "mine.safetensors").write_bytes(b"mine")
    server.models[NAME] = {"model.safetensors": b"new", "config.json": b"{}", "tokenizer.json": b"new"}
    expected = {"model.safetensors": b"new", "config.json": b"{}", "mine.safetensors": b"mine"}
    assert fetch(server, tmp_path, allow_patterns=["model*"]) == expected
    assert model_state(tmp_path) == ("complete", "huggingface")


def test_files_that_are_not_selected_stay(server: FileServer, tmp_path: Path) -> None:
    fetch(server, tmp_path)
    assert fetch(server, tmp_path, allow_file_suffix=["txt"]) == MODEL
    server.models[NAME] = {"nested/folder/notes.txt": b"notes"}
    assert fetch(server, tmp_path, allow_file_suffix=["txt"]) == server.models[NAME]


def test_forged_record_removes_no_file_elsewhere(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"mine")
    fetch(server, tmp_path / "m")
    with (tmp_path / "m/.cache/penstock/manifest.jsonl").open("a") as manifest:
        for name in ("../mine.txt", "nested", "none/x", "config.json/x"):
            manifest.write(json.dumps({"file": name, "size": 4, "version": "1"}) + "\n")
    assert fetch(server, tmp_path / "m") == MODEL
    assert (tmp_path / "mine.txt").read_bytes() == b"mine"


@pytest.mark.parametrize("uri", ["acme/none", f"{NAME}@none"])
def test_unknown_model_or_revision_is_not_found(server: FileServer, tmp_path: Path, uri: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"hub|revision"):
        fetch(server, tmp_path / "m", uri)
    assert not (tmp_path / "m").exists()


def test_restricted_model_is_access_denied(server: FileServer, tmp_path: Path) -> None:
    server.faults.append(lambda _: Sent(403, b"", {"X-Error-Code": "GatedRepo"}))
    with pytest.raises(AccessDeniedError, match="accept the terms"):
        fetch(server, tmp_path)


def test_options_select_files(server: FileServer, tmp_path: Path) -> None:
    assert fetch(server, tmp_path / "a", allow_file_suffix=["json"]).keys() == {
        "config.json",
        "tokenizer.json",
    }
    selected = fetch(server, tmp_path / "b", allow_patterns=["nested/*", "*.json"], ignore_patterns=["tok*"])
    assert selected.keys() == {"config.json", "nested/folder/notes.txt"}
    with pytest.raises(
        ModelNotFoundError, match="none of the model's 5 files is selected: allow_file_suffix='gguf'"
    ):
        fetch(server, tmp_path / "c", allow_file_suffix=["gguf"])


def test_other_weights_beside_safetensors_are_left_out(server: FileServer, tmp_path: Path) -> None:
    server.models[NAME] |= {"pytorch_model.bin": b"pickle", "other/pytorch_model.bin": b"pickle"}
    assert "pytorch_model.bin" not in fetch(server, tmp_path / "a")
    assert (tmp_path / "a/other/pytorch_model.bin").exists()
    assert "pytorch_model.bin" in fetch(server, tmp_path / "b", prefer_safetensors=False)


def test_safetensors_begin_first_and_large_files_before_small(server: FileServer, tmp_path: Path) -> None:
    server.models[NAME]["large.json"] = bytes(200_000)
    fetch(server, tmp_path, num_threads=1)
    names = list(dict.fromkeys(asked.path.rpartition("/")[2] for asked in server.asked("/resolve/")))
    assert names[:3] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "large.json",
    ]


# ---- credentials


def test_redirect_to_another_host_gets_no_credentials(server: FileServer, tmp_path: Path) -> None:
    with serving_files() as store:
        store.files = {f"/{name}": content for name, content in MODEL.items()}

        def redirect(asked: Asked) -> Sent | None:
            name = asked.path.partition(f"/resolve/{COMMIT}/")[2]
            signed = f"{store.url}/{name}?X-Signature=secret"
            return Sent(302, b"moved", {"Location": signed}) if name else None

        server.faults.append(redirect)
        assert fetch(server, tmp_path, hf_token="hf_secret") == MODEL  # noqa: S106 - a test
        assert {asked.headers["Authorization"] for asked in server.requests} == {"Bearer hf_secret"}
        assert {asked.headers["Authorization"] for asked in store.requests} == {None}
        assert len(store.requests) == len(MODEL) + 4
    # All parts of a file use one redirect, but for those that begin at the same time.
    assert len(server.asked("model-00001")) <= PARTS["num_threads"]


def test_expired_redirect_is_asked_for_again(server: FileServer, tmp_path: Path) -> None:
    with serving_files() as store:
        store.files = {f"/{name}": content for name, content in MODEL.items()}
        tokens = iter(range(100))
        used: set[str] = set()

        def redirect(asked: Asked) -> Sent | None:
            name = asked.path.partition(f"/resolve/{COMMIT}/")[2]
            return Sent(302, b"", {"Location": f"{store.url}/{name}?token={next(tokens)}"}) if name else None

        def expire(asked: Asked) -> Sent | None:
            token = asked.query["token"][0]
            if token in used:
                return Sent(403)
            used.add(token)
            return None

        server.faults.append(redirect)
        store.faults.append(expire)
        assert fetch(server, tmp_path, num_threads=1) == MODEL
        assert len(server.asked("model-00001")) == 5


def test_hosts_that_are_not_allowed_get_no_request(server: FileServer, tmp_path: Path) -> None:
    with serving_files() as store:
        elsewhere = store.url.replace("127.0.0.1", "localhost")
        server.faults.append(
            lambda asked: (
                Sent(302, b"", {"Location": f"{elsewhere}/x"}) if "/resolve/" in asked.path else None
            )
        )
        options = Options.load(NAME, {"hf_endpoint": server.url}, {"DOWNLOADER_ALLOWED_HOSTS": "127.0.0.1"})
        with pytest.raises(AccessDeniedError, match="localhost: not among the allowed hosts"):
            download(resolve(NAME, options), tmp_path)
        assert store.requests == []


# ---- interruptions


def test_killed_downloads_resume_to_the_same_bytes(server: FileServer, forks: Forks, tmp_path: Path) -> None:
    """Fifty downloads end in the middle of a write; the bytes that are recorded are right each time."""
    content = RANDOM.randbytes(16 * MIB)
    server.models[NAME] = {"model.safetensors": content, "config.json": b"{}"}
    order = NAME, str(tmp_path), {"hf_endpoint": server.url, **PARTS}
    moments = itertools.cycle(("before", "write", "record"))
    for moment in itertools.islice(moments, 50):
        size = RANDOM.randrange(1 << 16, 3 << 17)
        assert forks.run(*order, size, moment) == signal.SIGKILL
        assert "model.safetensors" not in files_of(tmp_path)
        assert model_state(tmp_path) == ("partial", "huggingface")
        record = Record.read(tmp_path)
        assert all(record.data[start:stop] == content[start:stop] for start, stop in record.ranges())
    assert sum(record.done) > 4 * MIB
    server.requests.clear()
    assert forks.run(*order, 0, "") == 0
    assert files_of(tmp_path) == server.models[NAME]
    # Each part continues after its record. Requests of processes that were killed can be among these.
    assert record.missing() <= {asked.range() for asked in server.asked("model.safetensors")}
