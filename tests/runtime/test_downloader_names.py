"""Remote files with hostile names: nothing is written outside of the model's directory."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from penstock._hub_ids import HubId, parse_hub_id
from penstock.runtime.downloader import (
    AccessDeniedError,
    DownloadError,
    InvalidArgumentError,
    ModelNotFoundError,
    Options,
    TooLargeError,
    UnsafeNameError,
    download,
    model_directory,
    resolve,
)
from penstock.runtime.downloader.names import check_distinct, folders_of, is_safe
from support.runtime.remote import files_of, serving_files
from support.runtime.s3 import ACCESS, BUCKET, S3, serving_s3

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GOOD = (
    *("config.json", "a/b/c.safetensors", ".gitattributes", "x..y/z"),
    *("e\u0301t\u00e9.txt", "100%.txt", "a b+c~.json"),
)
SEGMENTS = (
    *("..", ".", "", "...", " ", "a.", "a ", " a"),
    *("C:", "a\\b", "..\\..", "\x00", "a\nb", "\x1b[2J", "\x7f", "\x85"),
)
ENCODED = (
    *("%2e%2e", "%2E%2e", ".%2e", "%2f", "a%5cb", "a%00b"),
    *("\uff0e\uff0e", "\u2025", "\ufe52\ufe52", "a\u2100b"),
)
EVIL = [
    *(
        f"{before}{segment}{after}"
        for segment in (*SEGMENTS, *ENCODED)
        for before in ("", "x/", "x/y/")
        for after in ("", "/evil.txt", "/../../evil.txt")
    ),
    *("/etc/evil.txt", "//evil.txt", "\\\\server\\share", "\ud800", "x" * 256, "/".join(["y"] * 600)),
    *("../" * depth + "evil.txt" for depth in range(1, 21)),
]


def listing(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving_s3() as server:
        yield server


def fetch(s3: S3, path: str, directory: Path) -> dict[str, bytes]:
    uri = f"s3://{BUCKET}/{path}/"
    options = Options.load(uri, {**ACCESS, "endpoint": s3.url}, {})
    download(resolve(uri, options), directory)
    return files_of(directory)


@pytest.mark.parametrize("name", GOOD)
def test_ordinary_name_is_safe(name: str) -> None:
    assert is_safe(name)


@pytest.mark.parametrize("name", EVIL, ids=ascii)
def test_hostile_name_is_not_safe(name: str) -> None:
    assert not is_safe(name)


def test_random_names_that_are_safe_stay_below_the_directory(tmp_path: Path) -> None:
    """An independent check: the path that the system makes of the name."""
    alphabet = (*SEGMENTS, *ENCODED, "a", "b", "/", "/", "/", "..", "~", "é")
    drawn = random.Random(7)
    names = {"".join(drawn.choices(alphabet, k=drawn.randrange(1, 7))) for _ in range(20_000)}
    safe = [name for name in names if is_safe(name)]
    assert len(safe) > 100
    for name in safe:
        path = (tmp_path / name).resolve()
        assert path.is_relative_to(tmp_path)
        assert path != tmp_path
        assert path.relative_to(tmp_path).as_posix() == name


def test_bucket_with_hostile_keys_writes_nothing(s3: S3, tmp_path: Path) -> None:
    """Two hundred prefixes, each with an ordinary key and a hostile one."""
    home = tmp_path / "home"
    (home / "target").mkdir(parents=True)
    before = listing(tmp_path)
    names = [name for name in EVIL if name and name.isprintable() and len(name) < 1024]
    for number, name in enumerate(names[:200]):
        s3.put(f"evil{number}/config.json", b"{}")
        s3.put(f"evil{number}/{name}", b"evil")
        with pytest.raises(UnsafeNameError):
            fetch(s3, f"evil{number}", home / "target" / "model")
    assert number + 1 == 200
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", ["../evil.txt", "/evil.txt", "a\\..\\evil.txt", "a\x00b"])
def test_hub_with_a_hostile_name_writes_nothing(tmp_path: Path, name: str) -> None:
    with serving_files() as server:
        server.models["o/m"] = {"config.json": b"{}", name: b"evil"}
        options = Options.load("o/m", {"hf_endpoint": server.url}, {})
        with pytest.raises(UnsafeNameError):
            download(resolve("o/m", options), tmp_path / "m")
    assert listing(tmp_path) == set()


@pytest.mark.parametrize(
    "names",
    [
        ("config.json", "Config.JSON"),
        ("a/x", "A/X"),
        ("stra\u00dfe", "STRASSE"),
        ("e\u0301", "\u00e9"),
        ("a", "a/b"),
        ("A", "a/b"),
        ("a/b/c/d", "a/b"),
    ],
)
def test_names_that_differ_only_in_case_are_refused(s3: S3, tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(UnsafeNameError):
        check_distinct(names)
    folder = f"same{names[0].encode().hex()}{names[1].encode().hex()}"
    for name in names:
        s3.put(f"{folder}/{name}", b"")
    with pytest.raises(UnsafeNameError):
        fetch(s3, folder, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_different_names_are_distinct() -> None:
    check_distinct(["a", "b/a", "b/c", "ab", "a.b/c"])


def test_folders_of_a_model_have_a_limit() -> None:
    deep = [f"{index:03}/" + "a/" * 500 + "x" for index in range(20)]
    check_distinct(deep[:19])
    assert len(folders_of(deep[:19])) == 19 * 501
    with pytest.raises(TooLargeError, match="more than 10000 folders"):
        check_distinct(deep)
    check_distinct([f"a/b/{index}" for index in range(20_000)])


def test_links_below_the_target_are_not_followed(s3: S3, tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (outside / "file.txt").write_text("mine")
    s3.put("links/sub/file.txt", b"evil")
    (target / "sub").symlink_to(outside)
    with pytest.raises(UnsafeNameError, match="link"):
        fetch(s3, "links", target)
    assert (outside / "file.txt").read_text() == "mine"
    (target / "sub").unlink()
    (target / "sub").mkdir()
    (target / "sub" / "file.txt").symlink_to(outside / "file.txt")
    assert fetch(s3, "links", target) == {"sub/file.txt": b"evil"}
    assert (outside / "file.txt").read_text() == "mine"
    assert not (target / "sub" / "file.txt").is_symlink()


def test_folder_of_the_state_is_no_link(s3: S3, tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (target / ".cache").symlink_to(outside)
    s3.put("state/config.json", b"{}")
    with pytest.raises(UnsafeNameError, match="link"):
        fetch(s3, "state", target)
    assert listing(outside) == set()


def test_directory_in_place_of_a_file_is_an_error(s3: S3, tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    s3.put("state/config.json", b"{}")
    with pytest.raises(UnsafeNameError, match="directory"):
        fetch(s3, "state", tmp_path)


def test_state_of_other_downloads_is_left_out(s3: S3, tmp_path: Path) -> None:
    for name in ("config.json", ".cache/penstock/manifest.jsonl", ".cache/huggingface/x.lock", ".CACHE/x"):
        s3.put(f"copied/{name}", b"{}")
    assert fetch(s3, "copied", tmp_path) == {"config.json": b"{}"}


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", ".", "", "a//b", ".cache/x", "m/.cache/penstock", "m/.CACHE"]
)
def test_name_of_a_model_stays_below_its_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="model_name"):
        model_directory(tmp_path, name)
    assert model_directory(tmp_path, "a/m1") == tmp_path / "a" / "m1"


def test_directory_of_a_model_has_no_other_model(s3: S3, tmp_path: Path) -> None:
    s3.put("outer/sub/config.json", b"{}")
    s3.put("outer/sub/.cache/penstock/lock", b"")
    assert fetch(s3, "outer", tmp_path / "a" / "m") == {"sub/config.json": b"{}"}
    for name in ("a/m/sub", "a/m/sub/deeper"):
        with pytest.raises(InvalidArgumentError, match="'a/m' is a model itself"):
            model_directory(tmp_path, name)
    with pytest.raises(InvalidArgumentError, match="m' is a model itself: models are in"):
        model_directory(tmp_path / "a" / "m", "m")
    assert model_directory(tmp_path, "a/m") == tmp_path / "a" / "m"


def test_model_writes_no_files_into_another_one(s3: S3, tmp_path: Path) -> None:
    s3.put("inner/config.json", b"inner")
    s3.put("around/m1/config.json", b"around")
    inner = tmp_path / "a" / "m1"
    fetch(s3, "inner", inner)
    with pytest.raises(InvalidArgumentError, match="'m1', which is another model"):
        fetch(s3, "around", tmp_path / "a")
    assert files_of(inner) == {"config.json": b"inner"}
    assert model_directory(tmp_path, "a/m1") == inner


# ---- local models


def test_local_model_is_copied(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    (origin / "sub").mkdir(parents=True)
    files = {"config.json": b"{}", "sub/model.safetensors": random.Random(1).randbytes(3 << 20)}
    for name, content in files.items():
        (origin / name).write_bytes(content)
    for uri in (str(origin), origin.as_uri(), f"{origin}/"):
        path = download(resolve(uri, Options.load(uri, {}, {})), tmp_path / "copies" / origin.name)
        assert files_of(path) == files


def test_local_model_in_its_place_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_bytes(b"{}")
    source = resolve(str(tmp_path / "m"), Options.load("/m", {}, {}))
    assert download(source, tmp_path / "m") == tmp_path / "m"
    assert listing(tmp_path / "m") == {str(tmp_path / "m" / "config.json")}
    with pytest.raises(InvalidArgumentError, match="in the other"):
        download(source, tmp_path / "m" / "copy")


def test_local_model_in_its_place_is_checked(tmp_path: Path) -> None:
    model, options = tmp_path / "m", Options.load("/m", {}, {})
    with pytest.raises(ModelNotFoundError, match="no such file"):
        download(resolve(str(model), options), model)
    model.mkdir()
    with pytest.raises(ModelNotFoundError, match="no files"):
        download(resolve(str(model), options), model)
    (model / "config.json").write_bytes(b"{}")
    closed = Options.load("/m", {}, {"DOWNLOADER_ALLOWED_ROOTS": str(tmp_path / "other")})
    with pytest.raises(AccessDeniedError, match="not in an allowed directory"):
        download(resolve(str(model), closed), model)


@pytest.mark.parametrize("kind", ["directory", "link", "parent"])
def test_local_model_outside_of_allowed_roots_is_refused(tmp_path: Path, kind: str) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    allowed.mkdir()
    secret.mkdir()
    (secret / "key.txt").write_text("secret")
    (allowed / "key.txt").symlink_to(secret / "key.txt")
    path = {"directory": secret, "link": allowed, "parent": allowed / ".." / "secret"}[kind]
    options = Options.load(str(path), {}, {"DOWNLOADER_ALLOWED_ROOTS": str(allowed)})
    with pytest.raises(DownloadError, match="not in an allowed directory"):
        download(resolve(str(path), options), tmp_path / "m")


@pytest.mark.parametrize("name", ["nothing", "fifo"])
def test_local_model_that_is_no_directory_is_an_error(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    uri = str(tmp_path / name)
    with pytest.raises(DownloadError):
        download(resolve(uri, Options.load(uri, {}, {})), tmp_path / "m")


@pytest.mark.parametrize(
    "uri",
    ["", "a/b/c", "a", "ftp://x/y", "gs://b/m", "http://", "http://h/", "hu\x00b/x", "a/..", "s3://"],
)
def test_uri_that_names_no_model_is_refused(uri: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        resolve(uri, Options.load(uri, {}, {}))
    assert caught.value.field == "model_uri"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("org/name", HubId("org/name", None)),
        ("0rg/_a.b-c@refs/pr/1", HubId("0rg/_a.b-c", "refs/pr/1")),
        ("x" * 96 + "/y", HubId("x" * 96 + "/y", None)),
        *((text, None) for text in ("", "name", "a/b/c", "a//b", "./b", "a/..", "-a/b", "é/b")),
        *((text, None) for text in ("a/b@", "a/b@c..d", "a/b@c d", "a/b\n", "x" * 97 + "/y")),
    ],
)
def test_hub_id_is_two_names_and_a_revision(text: str, found: HubId | None) -> None:
    assert parse_hub_id(text) == found
