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


class Repository(NamedTuple):
    """One revision of a model."""

    folder: Path
    sha: str

    def files(self) -> dict[str, Path]:
        """All files, by their names on the hub."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path for path in paths}


class Hub(ThreadingHTTPServer):
    """Serves revisions of `MODEL`; records the requests."""

    daemon_threads = True

    def __init__(self, revisions: dict[str, Repository]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.revisions = revisions | {repository.sha: repository for repository in revisions.values()}
        self.requests: list[tuple[str, str]] = []
        self.is_stalled, self.is_released = threading.Event(), threading.Event()

    def asked_revisions(self) -> set[str]:
        """The revisions whose commit was requested."""
        found = (re.search(r"/revision/(.+)", path) for _, path in self.requests)
        return {match[1] for match in found if match}

    def asked_files(self, method: str) -> list[str]:
        """The files requested with this method, sorted by name."""
        found = (re.search(r"/resolve/[^/]+/(.+)", path) for asked, path in self.requests if asked == method)
        return sorted(match[1] for match in found if match)


class HubHandler(BaseHTTPRequestHandler):
    """The part of the hub's API that `huggingface_hub` uses: commits, lists of files, files."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        """The same as GET, without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Send an answer, or an error like the hub's."""
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match := api or file:
            hub_id = match[1]
            revision = match[3] if api else match[2]
            if hub_id == BROKEN:
                self.close_connection = True
            elif hub_id == BUSY:
                self.send_error_code(HTTPStatus.TOO_MANY_REQUESTS, None)
            elif hub_id == GATED and file and self.headers["Authorization"] != f"Bearer {TOKEN}":
                # The list of files is public, the files are not.
                self.send_error_code(HTTPStatus.FORBIDDEN, "GatedRepo")
            elif hub_id not in (MODEL, GATED, STALLED):
                self.send_error_code(HTTPStatus.NOT_FOUND, "RepoNotFound")
            elif revision not in self.server.revisions:
                self.send_error_code(HTTPStatus.NOT_FOUND, "RevisionNotFound")
            elif file:
                if hub_id == STALLED and self.command == "GET":
                    self.server.is_stalled.set()
                    self.server.is_released.wait()
                self.send_file(self.server.revisions[revision], file[3])
            else:
                self.send_info(hub_id, self.server.revisions[revision], match[2])
        else:
            self.send_error_code(HTTPStatus.NOT_FOUND, None)

    def send_info(self, hub_id: str, repository: Repository, kind: str) -> None:
        """Send the commit of a revision, or the list of its files with their metadata."""
        files = repository.files()
        facts: object
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            facts = {"_id": "0", "id": hub_id, "sha": repository.sha, "private": False, "siblings": siblings}
        else:
            facts = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": etag(path)}
                for name, path in files.items()
            ]
        self.answer(HTTPStatus.OK, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def send_file(self, repository: Repository, name: str) -> None:
        """Send a file."""
        path = repository.files().get(name)
        if path is None:
            self.send_error_code(HTTPStatus.NOT_FOUND, "EntryNotFound")
            return
        headers = {"ETag": f'"{etag(path)}"', "X-Repo-Commit": repository.sha}
        self.answer(HTTPStatus.OK, path.read_bytes(), headers)

    def send_error_code(self, status: HTTPStatus, code: str | None) -> None:
        """Send an error; the client reads its code."""
        self.answer(status, b"", {"X-Error-Code": code} if code else {})

    def answer(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        """Send a complete response."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Log nothing."""


def etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving(revisions: dict[str, Repository]) -> Iterator[Hub]:
    with Hub(revisions) as hub:
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
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
