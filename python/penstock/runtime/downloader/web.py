"""A single file of a web server, such as a LoRA adapter."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from penstock.runtime.downloader.checksums import Checksum
from penstock.runtime.downloader.errors import InvalidArgumentError
from penstock.runtime.downloader.files import RemoteFile
from penstock.runtime.downloader.retries import FileChangedError
from penstock.runtime.downloader.transport import parsed, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.downloader.options import Options
    from penstock.runtime.downloader.transport import Body, Reply, Session

__all__ = ["WebSource"]

_FRAGMENT = re.compile(r"sha256=([0-9a-fA-F]{64})")


class WebSource:
    """A file at a URL; the URL can end with `#sha256=DIGEST`. Its user and password become a header."""

    kind = "http"

    def __init__(self, url: str, options: Options) -> None:
        parts = parsed(url)
        name = unquote((parts.path or "").rpartition("/")[2])
        if not parts.host or not name:
            raise InvalidArgumentError(f"model_uri: {shown(url)} names no file", "model_uri")
        self._headers = dict(options.headers)
        if parts.auth:
            self._headers["Authorization"] = (
                f"Basic {base64.b64encode(unquote(parts.auth).encode()).decode()}"
            )
        digest = _FRAGMENT.fullmatch(parts.fragment or "")
        if parts.fragment and digest is None:
            message = f"model_uri: {shown(url)}: expected #sha256= and 64 hexadecimal digits after the URL"
            raise InvalidArgumentError(message, "model_uri")
        self._checksum = Checksum("sha256", digest[1].lower()) if digest else None
        self._url = parts._replace(auth=None, fragment=None).url
        self.uri = shown(url)
        self.model_name = name
        self.options = options

    def files(self, session: Session) -> Iterator[RemoteFile]:
        """The file."""
        yield session.repeat(lambda: self._describe(session))

    def refresh(self, session: Session, _file: RemoteFile) -> RemoteFile:
        """The file as it is now."""
        return session.repeat(lambda: self._describe(session))

    def open(self, session: Session, file: RemoteFile, start: int, stop: int | None) -> Body:
        """The range of the file."""
        headers = {**self._headers, **self._range(file, start, stop)}
        reply = session.send("GET", self._url, headers)
        reply.check()
        etag = _etag(reply)
        if file.key and etag and etag != file.key:
            reply.close()
            raise FileChangedError(f"{reply.label}: the file changed")
        return reply.body(file, start, stop)

    def _range(self, file: RemoteFile, start: int, stop: int | None) -> dict[str, str]:
        if start == 0 and stop == file.size:
            return {}
        condition = {"If-Match": file.key} if file.key.startswith('"') else {}
        return {"Range": f"bytes={start}-{'' if stop is None else stop - 1}", **condition}

    def _describe(self, session: Session) -> RemoteFile:
        reply = session.send("HEAD", self._url, self._headers)
        if reply.status in (403, 405, 501):  # signed URLs are for one method
            reply.close()
            reply = session.send("GET", self._url, self._headers)
        reply.check()
        reply.close()
        etag = _etag(reply)
        # A file with another digest than that of the URL is another version, also with an equal ETag.
        version = f"sha256:{self._checksum.digest}" if self._checksum else etag
        return RemoteFile(self.model_name, reply.length, version, self._checksum, etag)


def _etag(reply: Reply) -> str:
    """The strong ETag or the time of the last change; empty without both."""
    etag = reply.header("ETag") or ""
    return etag if etag.startswith('"') else reply.header("Last-Modified") or ""
