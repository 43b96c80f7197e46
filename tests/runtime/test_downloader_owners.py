"""Directories of models that other users of the machine own, or can write to."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.runtime import RuntimeSettings
from penstock.runtime.downloader import (
    ForeignFileError,
    Options,
    default_local_dir,
    download,
    model_state,
    resolve,
)
from support.runtime.remote import FileServer, files_of, serving_files
from support.runtime.runtime import FakeEngine, runtime_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "acme/tiny"
MODEL = {"config.json": b"{}", "model.safetensors": b"w" * 5000, "nested/notes.txt": b"notes"}
STATE = ".cache/penstock"
STRANGER = 65533
ALL = ["", ".cache", STATE, f"{STATE}/lock", f"{STATE}/manifest.jsonl", "nested", *MODEL]
COMPLETE = ("complete", "huggingface")


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serving_files() as server:
        server.models[NAME] = dict(MODEL)
        yield server


def fetch(server: FileServer, directory: Path) -> dict[str, bytes]:
    """Download the model; returns the files of the directory."""
    options = {"hf_endpoint": server.url}
    download(resolve(NAME, Options.load(NAME, options, {})), directory)
    return files_of(directory)


def fetched(server: FileServer) -> set[str]:
    """The names of the files that were fetched."""
    return {asked.path.partition("/resolve/")[2].partition("/")[2] for asked in server.asked("/resolve/")}


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Give a file or a directory to another user: by its owner, or for ordinary users by their own id."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, STRANGER, STRANGER)
            return
        facts, real = path.stat(), (os.stat_result, os.fstat, Path.stat, Path.lstat)

        def other(found: os.stat_result) -> os.stat_result:
            values = list(found)
            if (found.st_dev, found.st_ino) == (facts.st_dev, facts.st_ino):
                values[stat.ST_UID] = STRANGER
            return real[0](values)

        monkeypatch.setattr(os, "fstat", lambda file: other(real[1](file)))
        monkeypatch.setattr(Path, "stat", lambda self, **options: other(real[2](self, **options)))
        monkeypatch.setattr(Path, "lstat", lambda self: other(real[3](self)))

    return give


def test_download_is_private_to_its_user(server: FileServer, tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        assert fetch(server, tmp_path / "models" / "m") == MODEL
    finally:
        os.umask(mask)
    for name in ALL:
        facts = (tmp_path / "models" / "m" / name).stat()
        assert facts.st_mode & 0o022 == 0, name
    assert model_state(tmp_path / "models" / "m") == COMPLETE


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("name", ALL)
def test_what_others_can_write_is_hashed_again(
    server: FileServer, tmp_path: Path, name: str, mode: int
) -> None:
    fetch(server, tmp_path / "m")
    path = tmp_path / "m" / name
    (tmp_path / "m" / "model.safetensors").write_bytes(b"v" * 5000)  # the size is right
    if name == "":
        assert model_state(tmp_path / "m") == COMPLETE
    path.chmod(path.stat().st_mode | mode)
    if name != f"{STATE}/lock":
        assert model_state(tmp_path / "m") == ("partial", "huggingface")
    server.requests.clear()
    found = fetch(server, tmp_path / "m")
    assert model_state(tmp_path / "m") == COMPLETE
    assert path.stat().st_mode & 0o022 == 0
    if name in (f"{STATE}/lock", "config.json", "nested/notes.txt"):
        assert fetched(server) == set()
    else:
        assert found == MODEL
        assert fetched(server) == {"model.safetensors"}


@pytest.mark.parametrize("name", ALL)
def test_what_another_user_owns_is_not_used(
    server: FileServer, tmp_path: Path, give: Callable[[Path], None], name: str
) -> None:
    fetch(server, tmp_path / "m")
    path = tmp_path / "m" / name
    give(path)
    assert model_state(tmp_path / "m") != COMPLETE
    server.requests.clear()
    if name in MODEL:
        assert fetch(server, tmp_path / "m") == MODEL
        assert fetched(server) == {name}
        assert path.stat().st_uid == os.geteuid()
        assert model_state(tmp_path / "m") == COMPLETE
        return
    with pytest.raises(ForeignFileError) as caught:
        fetch(server, tmp_path / "m")
    assert str(caught.value).startswith(f"{path}: it belongs to uid {STRANGER} and has the mode 0")
    assert fetched(server) == set()


def test_parts_of_an_open_directory_are_not_resumed(server: FileServer, tmp_path: Path) -> None:
    fetch(server, tmp_path / "m")
    state = tmp_path / "m" / STATE
    (state / "x.part").write_bytes(b"x")
    state.chmod(0o777)
    assert fetch(server, tmp_path / "m") == MODEL
    assert sorted(path.name for path in state.iterdir()) == ["lock", "manifest.jsonl"]


# ---- default directories


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files of all users."""
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_default_directories_are_those_of_the_user(server: FileServer, shared: Path) -> None:
    folder = shared / f"aibrix-{os.geteuid()}"
    assert default_local_dir({}) == folder / "models"
    settings = RuntimeSettings()
    names = {
        Path(path).parent.name for path in (settings.model_dir, settings.adapter_dir, settings.registry_path)
    }
    assert names == {folder.name}
    fetch(server, default_local_dir({}) / "m")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_default_directory_of_another_user_is_refused(
    server: FileServer, shared: Path, give: Callable[[Path], None]
) -> None:
    folder = shared / f"aibrix-{os.geteuid()}"
    folder.mkdir(0o777)
    folder.chmod(0o777)
    with pytest.raises(ForeignFileError, match="has the mode 0777"):
        fetch(server, folder / "models" / "m")
    folder.chmod(0o700)
    give(folder)
    with pytest.raises(ForeignFileError, match="belongs to uid"):
        fetch(server, folder / "models" / "m")
    folder.rmdir()
    (shared / "elsewhere").mkdir()
    folder.symlink_to(shared / "elsewhere")
    with pytest.raises(ForeignFileError, match="aibrix-"):
        fetch(server, folder / "models" / "m")
    assert list((shared / "elsewhere").iterdir()) == []


def test_runtime_names_the_directory_of_another_user(
    server: FileServer, tmp_path: Path, give: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("the download runs in a child process, where only a real owner counts")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    fetch(server, tmp_path / "models" / "m")
    give(tmp_path / "models" / "m")
    with runtime_of(FakeEngine(), model_dir=str(tmp_path / "models")) as runtime:
        assert runtime.ask("/v1/model/list")[1]["data"] == []
        body = {"model_uri": NAME, "model_name": "m"}
        status, error, _ = runtime.ask("/v1/model/download", body)
        assert (status, error["type"]) == (403, "ForeignFileError")
        assert f"{tmp_path}/models/m: it belongs to uid {STRANGER}" in error["message"]
