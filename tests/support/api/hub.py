"""A local server with the hub's protocol, and processes that use it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL, GATED, BROKEN, BUSY, STALLED = "acme/tiny", "acme/gated", "acme/broken", "acme/busy", "acme/stalled"
TOKEN = "hf_secret"  # noqa: S105


#: Suffixes of the files that the hub stores by checksum and sends from another address.
STORED = (".safetensors", ".gguf")
LICENCE = "apache-2.0"


class Repository(NamedTuple):
    """One revision of a model."""

    folder: Path
    sha: str

    def files(self) -> dict[str, Path]:
        """All files, by their names on the hub."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path for path in paths}


class Hub(ThreadingHTTPServer):
    """Serves revisions of `MODEL`, and the first revision of `others` by id; records the requests."""

    daemon_threads = True

    def __init__(self, revisions: dict[str, Repository], others: dict[str, Repository] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.revisions = revisions | {repository.sha: repository for repository in revisions.values()}
        self.others = others or {}
        self.requests: list[tuple[str, str]] = []
        #: The `Range` of each request for a stored file, empty if it has none.
        self.ranges: list[str] = []
        #: Numbers of bytes after which the next transfers of stored files break.
        self.breaks: list[int] = []
        #: Number of bytes after which transfers of stored files stall until they are released.
        self.stall_after: int | None = None
        #: Whether stored files are sent with another first byte.
        self.is_damaging = False
        #: Whether no request is answered before the end of the test.
        self.is_silent = False
        #: Sizes that the API names in place of the real ones, by the name of the file.
        self.sizes: dict[str, int] = {}
        self.is_stalled, self.is_released = threading.Event(), threading.Event()

    @property
    def address(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server_port}"

    def revisions_of(self, hub_id: str) -> dict[str, Repository] | None:
        """The revisions of a repository by name and commit; None if there is no such repository."""
        if (other := self.others.get(hub_id)) is not None:
            return {"main": other, other.sha: other}
        return self.revisions if hub_id in (MODEL, GATED, STALLED) else None

    def asked_revisions(self) -> set[str]:
        """The revisions whose commit was requested."""
        found = (re.search(r"/revision/(.+)", path) for _, path in self.requests)
        return {match[1] for match in found if match}

    def transfers(self, name: str) -> list[str]:
        """The addresses from which a stored file was requested, in order."""
        stored = re.compile(rf"/stored/.+/{re.escape(name)}")
        return [path for method, path in self.requests if method == "GET" and stored.fullmatch(path)]

    def asked_files(self, method: str) -> list[str]:
        """The files requested with this method, by name or where they are stored; each once, sorted."""
        place = re.compile(r"/(?:resolve|stored/(?:[^/]+/)?[^/]+)/[^/]+/(.+)")
        found = (place.search(path) for asked, path in self.requests if asked == method)
        return sorted({match[1] for match in found if match})


class HubHandler(BaseHTTPRequestHandler):
    """The part of the hub's API that `huggingface_hub` uses: commits, lists of files, files."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        """The same as GET, without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Send an answer, or an error like the hub's."""
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.server.requests.append((self.command, path))
        if self.server.is_silent:
            self.server.is_stalled.set()
            self.server.is_released.wait()
            self.close_connection = True
            return
        if stored := re.fullmatch(r"/stored/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            self.send_stored(*stored.groups())
            return
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match := api or file:
            hub_id = match[1]
            revision = match[3] if api else match[2]
            revisions = self.server.revisions_of(hub_id)
            if hub_id == BROKEN:
                self.close_connection = True
            elif hub_id == BUSY:
                self.send_error_code(HTTPStatus.TOO_MANY_REQUESTS, None)
            elif hub_id == GATED and file and self.headers["Authorization"] != f"Bearer {TOKEN}":
                # The list of files is public, the files are not.
                self.send_error_code(HTTPStatus.FORBIDDEN, "GatedRepo")
            elif revisions is None:
                self.send_error_code(HTTPStatus.NOT_FOUND, "RepoNotFound")
            elif revision not in revisions:
                self.send_error_code(HTTPStatus.NOT_FOUND, "RevisionNotFound")
            elif file:
                if hub_id == STALLED and self.command == "GET":
                    self.server.is_stalled.set()
                    self.server.is_released.wait()
                self.send_file(hub_id, revisions[revision], file[3])
            else:
                self.send_info(hub_id, revisions[revision], match[2], has_blobs="blobs=" in parts.query)
        else:
            self.send_error_code(HTTPStatus.NOT_FOUND, None)

    def send_info(self, hub_id: str, repository: Repository, kind: str, *, has_blobs: bool) -> None:
        """Send the commit and the files of a revision, or the list of its files with their metadata."""
        files = repository.files()
        facts: object
        if kind == "revision":
            siblings: list[dict[str, object]] = [{"rfilename": name} for name in files]
            if has_blobs:
                siblings = [{"rfilename": name, **self.blob_of(name, path)} for name, path in files.items()]
            facts = {
                "_id": "0",
                "id": hub_id,
                "sha": repository.sha,
                "private": False,
                "cardData": {"license": LICENCE},
                "siblings": siblings,
            }
        else:
            facts = [self.entry_of(name, path) for name, path in files.items()]
        self.answer(HTTPStatus.OK, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def blob_of(self, name: str, path: Path) -> dict[str, object]:
        """The entry of a file in the description of a model."""
        size = self.server.sizes.get(name, path.stat().st_size)
        found: dict[str, object] = {"size": size, "blobId": etag(path)[:40]}
        if name.endswith(STORED):
            found["lfs"] = {"sha256": etag(path), "size": size, "pointerSize": 134}
        return found

    def entry_of(self, name: str, path: Path) -> dict[str, object]:
        """The entry of a file in a list of files."""
        size = path.stat().st_size
        found: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": etag(path)}
        if name.endswith(STORED):
            found["lfs"] = {"oid": etag(path), "size": size, "pointerSize": 134}
        return found

    def send_file(self, hub_id: str, repository: Repository, name: str) -> None:
        """Send a file, or the address of a stored one."""
        path = repository.files().get(name)
        if path is None:
            self.send_error_code(HTTPStatus.NOT_FOUND, "EntryNotFound")
            return
        headers = {"ETag": f'"{etag(path)}"', "X-Repo-Commit": repository.sha}
        if name.endswith(STORED):
            size = str(path.stat().st_size)
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": size}
            port = self.server.server_port  # another host, as that of the real hub
            headers["Location"] = f"http://localhost:{port}/stored/{hub_id}/{repository.sha}/{name}"
            self.answer(HTTPStatus.FOUND, b"", headers)
        else:
            self.answer(HTTPStatus.OK, path.read_bytes(), headers)

    def send_stored(self, hub_id: str, sha: str, name: str) -> None:
        """Send a stored file, or the rest of it from the byte that the client asks for."""
        body = ((self.server.revisions_of(hub_id) or {})[sha].folder / name).read_bytes()
        if self.server.is_damaging:
            body = bytes([body[0] ^ 1]) + body[1:]
        asked = self.headers["Range"] or ""
        self.server.ranges.append(asked)
        first = int(match[1]) if (match := re.fullmatch(r"bytes=(\d+)-", asked)) else 0
        status = HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK
        headers = {"Content-Range": f"bytes {first}-{len(body) - 1}/{len(body)}"} if asked else {}
        rest, stall = body[first:], self.server.stall_after
        if stall is None or self.command == "HEAD":
            self.answer(status, rest, headers, self.server.breaks.pop(0) if self.server.breaks else None)
            return
        self.answer(status, rest, headers, stall)
        self.wfile.flush()
        self.server.is_stalled.set()
        self.server.is_released.wait()
        with contextlib.suppress(OSError):  # the client has ended
            self.wfile.write(rest[stall:])

    def send_error_code(self, status: HTTPStatus, code: str | None) -> None:
        """Send an error; the client reads its code."""
        self.answer(status, b"", {"X-Error-Code": code} if code else {})

    def answer(
        self, status: HTTPStatus, body: bytes, headers: dict[str, str], sent: int | None = None
    ) -> None:
        """Send a response: complete, or with the first bytes of its body, after which the connection ends."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
        if sent is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Log nothing."""


def etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving(revisions: dict[str, Repository], others: dict[str, Repository] | None = None) -> Iterator[Hub]:
    with Hub(revisions, others) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.is_released.set()
            hub.shutdown()
            thread.join()


def run_in_process(
    hub: Hub, code: str, home: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=home,  # no directory there has the name of a model
        env=environment_of(hub, home) | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def environment_of(hub: Hub, home: Path) -> dict[str, str]:
    """The environment of a process that uses this hub, with its cache at `home`."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING")) and not name.lower().endswith("_proxy")
    }
    return inherited | {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
