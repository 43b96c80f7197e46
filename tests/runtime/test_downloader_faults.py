"""Downloads from servers that fail, and to disks that are full."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import random
import ssl
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from penstock.runtime.downloader import (
    AccessDeniedError,
    DownloadCancelledError,
    DownloadError,
    InsufficientSpaceError,
    IntegrityError,
    InvalidArgumentError,
    ModelNotFoundError,
    Options,
    TransferError,
    download,
    model_state,
    resolve,
    transport,
)
from penstock.runtime.downloader import target as target_module
from support.api.engines import wait_until
from support.runtime.remote import Asked, FakeClock, FileServer, Sent, files_of, serving_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.runtime.downloader import Progress

MIB = 1 << 20
RANDOM = random.Random(3)
CONTENT = RANDOM.randbytes(3 * MIB + 77)
PATH = "/adapters/a.safetensors"
PARTS = {"part_threshold": MIB, "part_chunksize": MIB, "num_threads": 2}


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A web server with one file."""
    with serving_files() as server:
        server.files[PATH] = CONTENT
        yield server


def fetch(server: FileServer, directory: Path, *, suffix: str = "", **extra: Any) -> bytes | None:
    """The downloaded file."""
    keywords = {name: extra.pop(name) for name in ("clock", "cancelled", "progress") if name in extra}
    uri = server.url + PATH + suffix
    download(resolve(uri, Options.load(uri, {**PARTS, **extra}, {})), directory, **keywords)
    return files_of(directory).get("a.safetensors")


def first(count: int, sent: Sent, method: str = "GET") -> Any:
    """A fault of the first requests."""
    rest = iter(range(count))
    return lambda asked: sent if asked.method == method and next(rest, None) is not None else None


def always(sent: Sent, method: str = "GET") -> Any:
    return lambda asked: sent if asked.method == method else None


# ---- failures


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_temporary_failures_are_repeated(server: FileServer, tmp_path: Path, status: int) -> None:
    clock = FakeClock()
    server.faults += [first(3, Sent(status)), first(1, Sent(status), "HEAD")]
    assert fetch(server, tmp_path, clock=clock) == CONTENT
    assert len(clock.waits) >= 4


def test_delays_grow_until_the_download_fails(server: FileServer, tmp_path: Path) -> None:
    clock = FakeClock()
    server.faults.append(always(Sent(500), "HEAD"))
    with pytest.raises(TransferError, match="the server answers 500"):
        fetch(server, tmp_path, clock=clock)
    assert len(clock.waits) == 8
    limits = [min(20, 0.25 * 2**number) for number in range(1, 9)]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(clock.waits, limits, strict=True))


def test_too_long_retry_after_is_an_error(server: FileServer, tmp_path: Path) -> None:
    clock = FakeClock()
    server.faults.append(always(Sent(429, b"", {"Retry-After": "86400"}), "HEAD"))
    with pytest.raises(TransferError, match="429"):
        fetch(server, tmp_path, clock=clock)
    assert clock.waits == []


def test_attempts_are_logged(server: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.runtime.downloader")
    server.faults.append(first(2, Sent(503)))
    fetch(server, tmp_path, clock=FakeClock(), num_threads=1)
    found = [text for text in caplog.messages if "the server answers 503; attempt" in text]
    assert ["attempt 2 of 9" in text for text in found] == [True, False]


def test_unreachable_server_is_an_error(tmp_path: Path) -> None:
    options = Options.load("http://127.0.0.1:1/x", {}, {})
    with pytest.raises(TransferError, match="no response"):
        download(resolve("http://127.0.0.1:1/x", options), tmp_path / "m", clock=FakeClock())
    assert not (tmp_path / "m").exists()


def test_cut_bodies_continue_where_they_ended(server: FileServer, tmp_path: Path) -> None:
    cuts = iter([1000, 70_000, 1, 500_000])

    def cut(asked: Asked) -> Sent | None:
        size = next(cuts, None) if asked.method == "GET" else None
        return server.send_range(asked, CONTENT)._replace(cut=size) if size else None

    server.faults.append(cut)
    assert fetch(server, tmp_path, clock=FakeClock()) == CONTENT
    assert server.num_sent < len(CONTENT) + 65536


@pytest.mark.parametrize("has_beginning", [False, True])
def test_server_that_ignores_ranges_sends_the_whole_file(
    server: FileServer, tmp_path: Path, *, has_beginning: bool
) -> None:
    if has_beginning:
        server.faults.append(lambda asked: Sent(400) if (asked.range() or (0,))[0] else None)
        with pytest.raises(TransferError):
            fetch(server, tmp_path, num_threads=1)
        server.faults.clear()
    server.has_ranges = False
    assert fetch(server, tmp_path) == CONTENT


def test_slow_server_is_left_after_a_timeout(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "READ_TIMEOUT", 0.1)
    server.stop_after(MIB)
    clock = FakeClock()
    original = clock.wait

    def wait(seconds: float) -> None:
        server.stop_after(None)
        original(seconds)

    monkeypatch.setattr(clock, "wait", wait)
    assert fetch(server, tmp_path, clock=clock) == CONTENT
    assert clock.waits


def test_cancelled_download_ends_at_once_and_resumes(server: FileServer, tmp_path: Path) -> None:
    cancelled = threading.Event()
    seen: list[Progress] = []

    def show(progress: Progress) -> None:
        seen.append(progress)
        if server.is_stopped.is_set() and progress.fetched_bytes > 0:
            cancelled.set()

    server.stop_after(MIB + MIB // 2)
    with pytest.raises(DownloadCancelledError):
        fetch(server, tmp_path, cancelled=cancelled, progress=show, num_threads=1)
    assert model_state(tmp_path) == ("partial", "http")
    fetched = seen[-1].fetched_bytes
    server.stop_after(None)
    assert fetch(server, tmp_path, progress=seen.append) == CONTENT
    assert seen[-1].phase == "done"
    assert (seen[-1].done_files, seen[-1].total_files) == (1, 1)
    assert (seen[-1].done_bytes, seen[-1].total_bytes) == (len(CONTENT), len(CONTENT))
    assert 0 < seen[-1].fetched_bytes <= len(CONTENT) - fetched


def test_cancel_before_the_first_answer_ends_at_once(server: FileServer, tmp_path: Path) -> None:
    released, cancelled = threading.Event(), threading.Event()

    def hang(_: Asked) -> None:
        cancelled.set()
        released.wait(60)

    server.faults.append(hang)
    with pytest.raises(DownloadCancelledError):
        fetch(server, tmp_path, cancelled=cancelled)
    assert not has_threads()
    released.set()


def has_threads() -> bool:
    """Whether a download has threads."""
    return any(thread.name == "penstock download" for thread in threading.enumerate())


def test_threads_end_with_the_download(server: FileServer, tmp_path: Path) -> None:
    fetch(server, tmp_path)
    wait_until(lambda: not has_threads())


# ---- answers that are not as expected


@pytest.mark.parametrize(
    "sent",
    [
        Sent(206, b"x" * MIB, {"Content-Range": f"bytes 5-{MIB + 4}/{len(CONTENT)}"}),
        Sent(206, b"x" * (MIB - 5), {"Content-Range": f"bytes 5-{MIB - 1}/{len(CONTENT)}"}),
        Sent(206, b"x" * MIB),
        Sent(206, b"x" * MIB, {"Content-Range": "bytes nonsense"}),
        Sent(200, CONTENT, {"Content-Encoding": "gzip"}),
        Sent(204),
        Sent(301, b"", {"Location": PATH}),
        Sent(302, b"", {"Location": "gopher://127.0.0.1/x"}),
        Sent(302, b"", {"Location": "//[::1"}),
        Sent(418),
        Sent(429, b"", {"Retry-After": "9" * 5000}),
        Sent(206, b"x" * MIB, {"Content-Range": f"bytes 0-{MIB - 1}/{'9' * 5000}"}),
    ],
)
def test_unexpected_answer_is_an_error(server: FileServer, tmp_path: Path, sent: Sent) -> None:
    server.faults.append(always(sent))
    with pytest.raises(DownloadError):
        fetch(server, tmp_path, clock=FakeClock())
    assert files_of(tmp_path) == {}


def test_file_that_changes_meanwhile_begins_again(server: FileServer, tmp_path: Path) -> None:
    new = RANDOM.randbytes(2 * MIB + 5)

    def change(asked: Asked) -> None:
        if asked.method == "GET" and asked.range() == (2 * MIB, 3 * MIB - 1):
            server.files[PATH] = new

    server.faults.append(change)
    assert fetch(server, tmp_path) == new


@pytest.mark.parametrize(("headers", "cut"), [({}, MIB), ({"Content-Length": ""}, None)])
def test_file_without_version_has_one_part(
    server: FileServer, tmp_path: Path, headers: dict[str, str], cut: int | None
) -> None:
    server.faults.append(first(1, Sent(200, CONTENT, {"ETag": "", **headers}, cut=cut)))
    server.faults.append(lambda _: Sent(200, CONTENT, {"ETag": "", **headers}))
    assert fetch(server, tmp_path, clock=FakeClock()) == CONTENT
    assert {asked.headers["Range"] for asked in server.requests} == {None}


def test_digest_in_the_url_is_verified(server: FileServer, tmp_path: Path) -> None:
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert fetch(server, tmp_path / "a", suffix=f"?q=1#sha256={digest}") == CONTENT
    for folder in ("a", "b"):  # also of a file that an earlier download left
        with pytest.raises(IntegrityError, match="checksum"):
            fetch(server, tmp_path / folder, suffix=f"#sha256={'0' * 64}")
    server.requests.clear()
    assert fetch(server, tmp_path / "a", suffix=f"#sha256={digest.upper()}") == CONTENT
    assert server.asked(PATH) == []


@pytest.mark.parametrize("fragment", ["sha256=00", f"sha256={'0' * 63}x", "md5=00", "x"])
def test_digest_that_is_none_is_refused(server: FileServer, fragment: str) -> None:
    with pytest.raises(InvalidArgumentError, match="64 hexadecimal digits"):
        resolve(f"{server.url}{PATH}#{fragment}", Options())


def test_signed_url_for_get_needs_no_head(server: FileServer, tmp_path: Path) -> None:
    server.faults.append(always(Sent(403), "HEAD"))
    assert fetch(server, tmp_path) == CONTENT


def test_user_of_the_url_and_headers_are_sent_and_not_shown(server: FileServer, tmp_path: Path) -> None:
    uri = server.url.replace("//", "//user:pass%20word@") + "/none.bin?token=query"
    source = resolve(uri, Options.load(uri, {"headers": {"X-Key": "value-of-key"}}, {}))
    with pytest.raises(ModelNotFoundError) as caught:
        download(source, tmp_path)
    expected = f"Basic {base64.b64encode(b'user:pass word').decode()}"
    assert {asked.headers["Authorization"] for asked in server.requests} == {expected}
    assert {asked.headers["X-Key"] for asked in server.requests} == {"value-of-key"}
    for secret in ("user", "pass", "query", "value-of-key"):
        assert secret not in f"{caught.value} {source.uri} {source.options}"


def test_user_of_the_proxy_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_files() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//user:pass%20word@"))
        monkeypatch.setenv("no_proxy", "")
        uri = "http://models.example/none.bin"
        with pytest.raises(ModelNotFoundError):
            download(resolve(uri, Options.load(uri, {}, {})), tmp_path)
        expected = f"Basic {base64.b64encode(b'user:pass word').decode()}"
        assert {asked.headers["Proxy-Authorization"] for asked in proxy.requests} == {expected}
        assert {asked.headers["Host"] for asked in proxy.requests} == {"models.example"}


def test_redirect_from_https_to_http_is_refused(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with serving_files(context) as secure:
        secure.files["/x.bin"] = b"secure"
        uri = secure.url + "/x.bin"
        download(resolve(uri, Options.load(uri, {}, {})), tmp_path / "a")
        assert files_of(tmp_path / "a") == {"x.bin": b"secure"}
        secure.faults.append(lambda _: Sent(302, b"", {"Location": server.url + PATH}))
        with pytest.raises(AccessDeniedError, match="not encrypted"):
            download(resolve(uri, Options.load(uri, {}, {})), tmp_path / "b")
    assert server.requests == []


def test_part_of_another_version_is_not_resumed(server: FileServer, tmp_path: Path) -> None:
    server.faults.append(lambda asked: Sent(400) if (asked.range() or (0,))[0] else None)
    with pytest.raises(TransferError):
        fetch(server, tmp_path, num_threads=1)
    server.faults.clear()
    server.files[PATH] = changed = CONTENT[::-1]
    assert fetch(server, tmp_path) == changed


def test_forced_download_does_not_resume(server: FileServer, tmp_path: Path) -> None:
    server.faults.append(lambda asked: Sent(400) if (asked.range() or (0,))[0] else None)
    with pytest.raises(TransferError):
        fetch(server, tmp_path, num_threads=1)
    server.faults.clear()
    seen: list[Progress] = []
    assert fetch(server, tmp_path, force_download=True, progress=seen.append) == CONTENT
    assert seen[-1].fetched_bytes == len(CONTENT)


# ---- limits and disks


def test_free_space_is_checked_before_the_first_byte(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module.Target, "free_bytes", lambda _: len(CONTENT) - 1)
    with pytest.raises(InsufficientSpaceError, match=f"{len(CONTENT)} bytes are needed"):
        fetch(server, tmp_path)
    (tmp_path / "a.safetensors").write_bytes(bytes(len(CONTENT)))  # another content
    with pytest.raises(InsufficientSpaceError, match=f"{len(CONTENT)} bytes are needed"):
        fetch(server, tmp_path)
    assert server.asked(PATH) == []
    monkeypatch.undo()
    assert fetch(server, tmp_path) == CONTENT


def test_full_disk_is_an_error_after_which_the_download_resumes(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    num_written = 0

    def fill(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal num_written
        if num_written > MIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_written += len(data)
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fill)
    with pytest.raises(InsufficientSpaceError, match="No space left"):
        fetch(server, tmp_path)
    monkeypatch.undo()
    seen: list[Progress] = []
    assert fetch(server, tmp_path, progress=seen.append) == CONTENT
    assert seen[-1].fetched_bytes < len(CONTENT)


def test_full_file_system_is_an_error(server: FileServer, tmp_path: Path) -> None:
    """A real file system of one megabyte; its free space is less when the first bytes arrive."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1M", "penstock-test", str(disk)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a file system")
    try:
        with pytest.raises(InsufficientSpaceError, match="bytes are needed"):
            fetch(server, disk / "m")
        server.files[PATH] = CONTENT[: MIB - 100_000]

        def fill(_: Asked) -> None:
            (disk / "other").write_bytes(bytes(400_000))

        server.faults.append(fill)
        with pytest.raises(InsufficientSpaceError, match=r"No space left|bytes are needed"):
            fetch(server, disk / "m")
    finally:
        subprocess.run(["umount", disk], check=True)  # noqa: S607 - of the system
