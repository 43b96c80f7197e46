"""Models of the Hugging Face hub, or of a mirror with its protocol. All files are of one commit."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import quote

import msgspec

from penstock._hub_ids import parse_hub_id
from penstock.runtime.downloader.checksums import Checksum
from penstock.runtime.downloader.errors import (
    AccessDeniedError,
    DownloadError,
    InvalidArgumentError,
    ModelNotFoundError,
    TooLargeError,
    TransferError,
)
from penstock.runtime.downloader.files import RemoteFile
from penstock.runtime.downloader.retries import FileChangedError
from penstock.runtime.downloader.transport import joined, origin_of, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.downloader.options import Options
    from penstock.runtime.downloader.transport import Body, Reply, Session

__all__ = ["HubSource", "stored_token"]

T = TypeVar("T")
_NEXT = re.compile(r'<([^<>]+)>;\s*rel="next"')


class _Commit(msgspec.Struct):
    sha: str


_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class _Lfs(msgspec.Struct):
    oid: str
    size: _Size


class _Entry(msgspec.Struct):
    type: str
    path: str
    size: _Size = 0
    oid: str = ""
    lfs: _Lfs | None = None


class HubSource:
    """A model of the hub: `org/name`, or `org/name@revision`."""

    kind = "huggingface"

    def __init__(self, name: str, options: Options) -> None:
        found = parse_hub_id(name)
        if found is None:
            message = f"model_uri={name!r:.200}: expected org/name of the hub, a URI, /path or ./path"
            raise InvalidArgumentError(message, "model_uri")
        self._id = found.name
        self._revision = found.revision or options.hf_revision or "main"
        self._endpoint = options.hf_endpoint.rstrip("/")
        endpoint = parsed(self._endpoint)
        if endpoint.scheme not in ("http", "https") or not endpoint.host:
            message = "hf_endpoint (HF_ENDPOINT): expected a URL such as https://huggingface.co"
            raise InvalidArgumentError(message, "hf_endpoint")
        self._token = options.hf_token or stored_token()
        #: The URLs of files after redirects, and the commit of the files.
        self._locations: dict[str, str] = {}
        self._commit = ""
        self.uri = f"huggingface://{self._id}@{self._revision}"
        self.model_name = self._id
        self.options = options

    def files(self, session: Session) -> Iterator[RemoteFile]:
        """All files of the commit that the revision names now."""
        api = f"{self._endpoint}/api/models/{self._id}"
        revision = quote(self._revision, safe="")
        content, _ = self._get(session, f"{api}/revision/{revision}")
        self._commit = _decoded(content, _Commit).sha
        if not re.fullmatch(r"[0-9a-f]{1,64}", self._commit):
            raise TransferError(f"{self.uri}: the hub sends no commit")
        following = f"{api}/tree/{self._commit}?recursive=true&expand=false"
        for _ in range(self.options.max_pages):
            content, link = self._get(session, following)
            for entry in _decoded(content, list[_Entry]):
                if entry.type == "file":
                    yield _file_of(entry)
            found = _NEXT.search(link)
            if found is None:
                return
            page, following = following, joined(following, found[1])
            if origin_of(following) != origin_of(page) or following == page:
                raise TransferError(f"{self.uri}: the hub's list of files continues at another place")
        raise TooLargeError(f"{self.uri}: the list of files has more than {self.options.max_pages} pages")

    def refresh(self, _session: Session, file: RemoteFile) -> RemoteFile:
        """The same: a commit does not change."""
        return file

    def open(self, session: Session, file: RemoteFile, start: int, stop: int | None) -> Body:
        """A range of a file: from the URL of an earlier redirect if there is one, while it is valid."""
        ranges = {} if start == 0 and stop == file.size else {"Range": f"bytes={start}-{(stop or 0) - 1}"}
        if location := self._locations.get(file.name):
            reply = session.send("GET", location, ranges)
            if 200 <= reply.status < 300:  # noqa: PLR2004 - successes
                return reply.body(file, start, stop)
            reply.check_temporary()
            reply.close()
            self._locations.pop(file.name, None)
        url = f"{self._endpoint}/{self._id}/resolve/{self._commit}/{quote(file.name)}"
        reply = session.send("GET", url, {**self._headers(), **ranges})
        self._check(reply)
        if origin_of(reply.url) != origin_of(url):
            self._locations[file.name] = reply.url
        commit = reply.header("X-Repo-Commit")
        if commit not in (None, self._commit):
            reply.close()
            raise FileChangedError(f"{reply.label}: the file is of another commit")
        return reply.body(file, start, stop)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _get(self, session: Session, url: str) -> tuple[bytes, str]:
        """A document, and its header with links."""

        def attempt() -> tuple[bytes, str]:
            reply = session.send("GET", url, self._headers())
            self._check(reply)
            return reply.document(), reply.header("Link") or ""

        return session.repeat(attempt)

    def _check(self, reply: Reply) -> None:
        """Raise the error of a status that is not a success, with the hub's reason."""
        try:
            reply.check()
        except DownloadError:
            match reply.header("X-Error-Code"):
                case "GatedRepo":
                    message = (
                        f"{self.uri}: access is restricted; accept the terms on the model's page of the hub"
                    )
                    raise AccessDeniedError(message) from None
                case "RepoNotFound":
                    hint = "" if self._token else " (a private model needs HF_TOKEN)"
                    raise ModelNotFoundError(f"{self.uri}: not found on the hub{hint}") from None
                case "RevisionNotFound":
                    raise ModelNotFoundError(f"{self.uri}: no such revision") from None
            raise


def _file_of(entry: _Entry) -> RemoteFile:
    if entry.lfs is not None:
        return RemoteFile(entry.path, entry.lfs.size, entry.lfs.oid, Checksum("sha256", entry.lfs.oid))
    is_blob = re.fullmatch(r"[0-9a-f]{40}", entry.oid)
    return RemoteFile(entry.path, entry.size, entry.oid, Checksum("git-sha1", entry.oid) if is_blob else None)


def _decoded(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise TransferError(f"the hub's response is not as expected: {error}") from None


def stored_token() -> str | None:
    """The token that `hf auth login` stores."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    path = Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token")
    try:
        return path.expanduser().read_text(encoding="ascii").strip() or None
    except (OSError, ValueError, RuntimeError):
        return None
