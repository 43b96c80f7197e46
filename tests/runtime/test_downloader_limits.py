"""Limits of downloads, and servers that send numbers, lists and documents without a limit."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme

from penstock.runtime.downloader import (
    InvalidArgumentError,
    Options,
    TooLargeError,
    TransferError,
    download,
    resolve,
    transport,
)
from support.runtime.remote import Asked, FakeClock, FileServer, Sent, files_of, serving_files
from support.runtime.s3 import ACCESS

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
CONTENT = random.Random(4).randbytes(3 * MIB + 77)
PATH = "/adapters/a.safetensors"


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A server without files."""
    with serving_files() as server:
        yield server


def test_limits_of_files_and_bytes_hold_before_the_first_file(server: FileServer, tmp_path: Path) -> None:
    server.models["o/m"] = {"a.json": b"12345", "b.json": b"67890"}
    for limit, expected in {"MAX_FILES": "1", "MAX_BYTES": "9"}.items():
        options = Options.load("o/m", {"hf_endpoint": server.url}, {f"DOWNLOADER_{limit}": expected})
        with pytest.raises(TooLargeError, match=rf"more than {expected}.*DOWNLOADER_{limit}"):
            download(resolve("o/m", options), tmp_path / "m")
    assert server.asked("/resolve/") == []
    assert not (tmp_path / "m").exists()


def test_limit_of_bytes_holds_for_files_without_a_size(server: FileServer, tmp_path: Path) -> None:
    server.faults.append(lambda _: Sent(200, CONTENT, {"Content-Length": ""}))
    uri = server.url + PATH
    for limit in (MIB, len(CONTENT)):
        options = Options.load(uri, {}, {"DOWNLOADER_MAX_BYTES": str(limit)})
        if limit == len(CONTENT):
            download(resolve(uri, options), tmp_path)
            assert files_of(tmp_path) == {"a.safetensors": CONTENT}
            break
        with pytest.raises(TooLargeError, match=f"more than {MIB} bytes"):
            download(resolve(uri, options), tmp_path)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.part")) <= MIB


def test_limits_cannot_be_set_by_requests() -> None:
    for name in ("allow_empty", "max_files", "max_bytes", "allowed_hosts", "allowed_roots"):
        with pytest.raises(InvalidArgumentError, match=f"{name}: unknown key"):
            Options.load("o/m", {name: None}, {})


def test_size_of_too_many_digits_is_unknown(server: FileServer, tmp_path: Path) -> None:
    server.files[PATH] = CONTENT
    too_long = Sent(200, b"", {"Content-Length": "9" * 5000})
    server.faults.append(lambda asked: too_long if asked.method == "HEAD" else None)
    download(resolve(server.url + PATH, Options.load(server.url + PATH, {}, {})), tmp_path)
    assert files_of(tmp_path) == {"a.safetensors": CONTENT}


def test_list_of_the_hub_has_an_end(server: FileServer, tmp_path: Path) -> None:
    numbers = itertools.count(1)

    def answer(asked: Asked) -> Sent | None:
        link = {"Link": f'<{server.url}{asked.path}?cursor={next(numbers)}>; rel="next"'}
        return Sent(200, b"[]", link) if "/tree/" in asked.path else None

    server.models["o/m"] = {}
    server.faults.append(answer)
    options = Options.load("o/m", {"hf_endpoint": server.url}, {"DOWNLOADER_MAX_FILES": "200"})
    with pytest.raises(TooLargeError, match="more than 102 pages"):
        download(resolve("o/m", options), tmp_path)
    assert len(server.asked("/tree/")) == 102


@pytest.mark.parametrize("size", [-1, 1 << 60, 10**30])
def test_size_of_the_hub_has_limits(server: FileServer, tmp_path: Path, size: int) -> None:
    entry = {"type": "file", "path": "config.json", "oid": "0" * 40, "size": size}
    server.models["o/m"] = {}
    server.faults.append(
        lambda asked: Sent(200, json.dumps([entry]).encode()) if "/tree/" in asked.path else None
    )
    with pytest.raises(TransferError, match="not as expected"):
        download(resolve("o/m", Options.load("o/m", {"hf_endpoint": server.url}, {})), tmp_path)


LIST = (
    '<?xml version="1.0"{}?>{}<ListBucketResult><IsTruncated>{}</IsTruncated>'
    "<NextContinuationToken>{}</NextContinuationToken>{}</ListBucketResult>"
)
OBJECT = "<Contents><Key>m/a.json</Key><Size>{}</Size></Contents>"


def fetch_list(pages: Iterator[bytes], directory: Path) -> None:
    """Download from a server that sends these lists."""
    with serving_files() as server:
        server.faults.append(lambda _: Sent(200, next(pages)))
        options = Options.load(
            "s3://b/m/", {**ACCESS, "endpoint": server.url}, {"DOWNLOADER_MAX_FILES": "200"}
        )
        try:
            download(resolve("s3://b/m/", options), directory)
        finally:
            assert len(server.requests) <= 102


def test_list_of_empty_pages_has_an_end(tmp_path: Path) -> None:
    pages = (LIST.format("", "", "true", number, "").encode() for number in itertools.count())
    with pytest.raises(TooLargeError, match="more than 102 pages"):
        fetch_list(pages, tmp_path)


ENTITY = LIST.format(' encoding="{}"', '<!DOCTYPE x [<!ENTITY n "1">]>', "false", "", OBJECT.format("&n;"))
PREFIX, _, REST = ENTITY.partition("?>")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (LIST.format("", "", "false", "", OBJECT.format("9" * 5000)).encode(), "not as expected"),
        (LIST.format("", "", "false", "", OBJECT.format("\xb2")).encode(), "not as expected"),
        (ENTITY.format("utf-8").encode(), "declarations"),
        (ENTITY.format("utf-16").encode("utf-16"), "not XML"),
        (ENTITY.format("utf-16").encode("utf-16-le"), "not XML"),
        (f"{PREFIX}?>".format("cp037").encode() + REST.encode("cp037"), "not XML"),
    ],
    ids=["digits", "superscript", "entity", "utf-16", "utf-16 without a mark", "ebcdic"],
)
def test_hostile_list_is_an_error(tmp_path: Path, page: bytes, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        fetch_list(iter([page]), tmp_path)


class SlowClock(FakeClock):
    """A clock on which each reading takes time."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step

    def now(self) -> float:
        """Seconds."""
        self._now += self.step
        return self._now


def test_server_below_the_least_rate_is_left(server: FileServer, tmp_path: Path) -> None:
    server.files[PATH] = CONTENT
    uri = server.url + PATH
    # Each read has at most 16 KiB and takes two minutes.
    options = Options.load(uri, {"num_threads": 1, "io_chunksize": 16 << 10}, {})
    clock = SlowClock(120)
    with pytest.raises(TransferError, match="less than 16384 bytes per minute"):
        download(resolve(uri, options), tmp_path, clock=clock)
    assert len(clock.waits) == 8
    assert len(server.asked(PATH)) == 9
    server.requests.clear()
    download(resolve(uri, options), tmp_path, clock=SlowClock(1))
    assert files_of(tmp_path) == {"a.safetensors": CONTENT}
    # The bytes of all attempts are kept.
    bounds = server.asked(PATH)[0].range()
    assert bounds is not None
    assert 0 < bounds[0] <= 9 * (16 << 10)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_server_without_the_head_of_a_response_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """A byte before each timeout of a read does not hold the download."""
    monkeypatch.setattr(transport, "READ_TIMEOUT", 1000.0)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    released, clock = threading.Event(), SlowClock(0)
    steps = iter([61])

    def hang(_: Asked) -> None:
        clock.step = next(steps, 0)
        if clock.step:
            released.wait(60)

    with serving_files(context if scheme == "https" else None) as server:
        server.files[PATH] = CONTENT
        server.faults.append(hang)
        uri = server.url + PATH
        download(resolve(uri, Options.load(uri, {"num_threads": 1}, {})), tmp_path / "m", clock=clock)
        assert files_of(tmp_path / "m") == {"a.safetensors": CONTENT}
        assert len(clock.waits) == 1
        released.set()


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nX: x", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nX: x\r\n"]
)
def test_head_of_a_response_that_ends_too_early_is_no_file(tmp_path: Path, head: bytes) -> None:
    def answer(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(head)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}/x.bin"
        try:
            with pytest.raises(TransferError, match="no response"):
                download(resolve(uri, Options.load(uri, {}, {})), tmp_path, clock=FakeClock())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert files_of(tmp_path) == {}


def test_list_below_the_least_rate_is_left(server: FileServer, tmp_path: Path) -> None:
    server.models["o/m"] = {"config.json": b"{}"}
    options = Options.load("o/m", {"hf_endpoint": server.url}, {})
    clock = SlowClock(120)
    with pytest.raises(TransferError, match="bytes per minute"):
        download(resolve("o/m", options), tmp_path, clock=clock)
    assert len(clock.waits) == 8


def test_few_bytes_are_no_progress(server: FileServer, tmp_path: Path) -> None:
    server.faults.append(
        lambda asked: server.send_range(asked, CONTENT)._replace(cut=1000) if asked.method == "GET" else None
    )
    server.files[PATH] = CONTENT
    options = Options.load(server.url + PATH, {"num_threads": 1}, {})
    with pytest.raises(TransferError, match="the connection broke"):
        download(resolve(server.url + PATH, options), tmp_path, clock=FakeClock())
    assert len(server.asked(PATH)) == 9


def test_content_is_on_the_disk_before_it_has_its_name(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        events.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def record_rename(old: str, new: str, **folders: int) -> None:
        events.append(("rename", old))
        rename(old, new, **folders)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    server.files[PATH] = CONTENT
    download(resolve(server.url + PATH, Options.load(server.url + PATH, {}, {})), tmp_path)
    part = next(name for kind, name in events if kind == "rename" and name.endswith(".part"))
    assert events[-5:] == [
        ("fsync", part),
        ("rename", part),
        ("fsync", "manifest.jsonl.new"),
        ("rename", "manifest.jsonl.new"),
        ("fsync", "penstock"),
    ]
