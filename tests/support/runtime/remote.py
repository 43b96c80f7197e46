"""Servers for downloads, on real sockets: files, the hub's protocol, and faults that a test adds."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Mapping
    from email.message import Message
    from pathlib import Path

COMMIT = "c0ffee" + "0" * 34
PAGE = 3


class FakeClock:
    """A clock that waits without time; it records the times."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self._now = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Seconds."""
        return self._now

    def wait(self, seconds: float) -> None:
        """Advance the time."""
        with self._lock:
            self.waits.append(seconds)
            self._now += seconds


def files_of(directory: Path) -> dict[str, bytes]:
    """The files of a model."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    names = {path.relative_to(directory).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".cache/")}


class Asked(NamedTuple):
    """A request."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: Message

    def range(self) -> tuple[int, int | None] | None:
        """The first and the last byte of the range."""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        return (int(found[1]), int(found[2]) if found[2] else None) if found else None


class Sent(NamedTuple):
    """A response. Its connection ends after `cut` bytes of the body."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}
    cut: int | None = None


class FileServer(ThreadingHTTPServer):
    """Sends `files`, by their paths, and `models` in the hub's protocol; records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.models: dict[str, dict[str, bytes]] = {}
        #: Called with each request; the first result that is not None is the response.
        self.faults: list[Callable[[Asked], Sent | None]] = []
        self.requests: list[Asked] = []
        self.num_sent = 0
        self.has_ranges = True
        #: Set when `stop_after` stops the bodies.
        self.is_stopped = threading.Event()
        self._rest: int | None = None
        #: The number of calls of `stop_after`.
        self.number = 0
        self._changed = threading.Condition()

    def answer(self, asked: Asked) -> Sent:
        """The response to a request."""
        self.requests.append(asked)
        for fault in self.faults:
            if (sent := fault(asked)) is not None:
                return sent
        if asked.path in self.files:
            return self.send_range(asked, self.files[asked.path])
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", asked.path):
            return self._describe(asked, found)
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", asked.path):
            files = self.models.get(found[1], {})
            if found[2] == COMMIT and found[3] in files:
                return self.send_range(asked, files[found[3]], {"X-Repo-Commit": COMMIT})
        return Sent(404, b"", {"X-Error-Code": "RepoNotFound"})

    def send_range(self, asked: Asked, content: bytes, headers: Mapping[str, str] | None = None) -> Sent:
        """The range of a content that a request asks for."""
        headers = {"ETag": etag_of(content), **(headers or {})}
        if asked.headers.get("If-Match") not in (None, etag_of(content)):
            return Sent(412)
        bounds = asked.range()
        if bounds is None or not self.has_ranges:
            return Sent(200, content, headers)
        start, last = bounds[0], len(content) - 1 if bounds[1] is None else min(bounds[1], len(content) - 1)
        if start > last:
            return Sent(416)
        headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
        return Sent(206, content[start : last + 1], headers)

    def _describe(self, asked: Asked, found: re.Match[str]) -> Sent:
        files = self.models.get(found[1])
        if files is None:
            return Sent(404, b"", {"X-Error-Code": "RepoNotFound"})
        if found[3] not in ("main", COMMIT):
            return Sent(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if found[2] == "revision":
            return Sent(200, json.dumps({"id": found[1], "sha": COMMIT}).encode())
        first = int(asked.query.get("cursor", ["0"])[0])
        names = sorted(files)[first : first + PAGE]
        following = f'<{asked.path}?recursive=true&cursor={first + PAGE}>; rel="next"'
        headers = {"Link": following} if len(files) > first + PAGE else {}
        return Sent(200, json.dumps([_entry(name, files[name]) for name in names]).encode(), headers)

    def asked(self, part: str, method: str = "GET") -> list[Asked]:
        """The requests with this text in their paths."""
        return [asked for asked in self.requests if part in asked.path and asked.method == method]

    def stop_after(self, size: int | None) -> None:
        """Stop all bodies after this number of bytes; None does not stop them. Those that are stopped end."""
        with self._changed:
            self._rest = size
            self.number += 1
            self.is_stopped.clear()
            self._changed.notify_all()

    def pass_bytes(self, size: int, number: int) -> None:
        """Count bytes of a body that are sent now. Ends a body that began before the last `stop_after`."""
        with self._changed:
            if self.number == number and self._rest is not None and self._rest < size:
                self.is_stopped.set()
                self._changed.wait_for(lambda: self.number != number, 20)
            if self.number != number:
                raise BrokenPipeError
            if self._rest is not None:
                self._rest -= size
            self.num_sent += size


def held_at(hub: FileServer, part: str) -> threading.Event:
    """Hold the requests with this text in the path until the event is set."""
    may_continue = threading.Event()

    def wait(asked: Asked) -> Sent | None:
        if part in asked.path and asked.method == "GET":
            may_continue.wait(60)
        return None

    hub.faults.append(wait)
    return may_continue


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: FileServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        asked = Asked(self.command, unquote(parts.path), parse_qs(parts.query), self.headers)
        number = self.server.number
        sent = self.server.answer(asked)
        self.send_response(sent.status)
        for name, value in ({"Content-Length": str(len(sent.body))} | dict(sent.headers)).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = memoryview(sent.body)[: sent.cut]
        for start in range(0, len(body), 1 << 16):
            data = body[start : start + (1 << 16)]
            try:
                self.server.pass_bytes(len(data), number)
                self.wfile.write(data)
                self.wfile.flush()
            except OSError:
                self.close_connection = True
                return
        if sent.cut is not None or not sent.headers.get("Content-Length", "1"):
            self.close_connection = True

    def finish(self) -> None:
        """The client may be gone."""
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Log nothing."""


@functools.lru_cache
def etag_of(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


@functools.lru_cache
def _entry(name: str, content: bytes) -> dict[str, object]:
    """A file in a list of the hub: large files are stored with LFS."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": blob}
    if name.endswith(".safetensors"):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return entry


@contextmanager
def serving_files(context: ssl.SSLContext | None = None) -> Iterator[FileServer]:
    """A server in a thread, with TLS if there is a context."""
    with FileServer() as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
            server.url = server.url.replace("http", "https")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.stop_after(None)
            server.shutdown()
            thread.join()
