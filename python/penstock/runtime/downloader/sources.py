"""Model URIs: `org/name`, `huggingface://`, `hf://`, `s3://`, `tos://`, `http(s)://`, `file://`, paths."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from penstock.runtime.downloader.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.downloader.checksums import Checksum
    from penstock.runtime.downloader.files import RemoteFile
    from penstock.runtime.downloader.options import Options
    from penstock.runtime.downloader.transport import Session

__all__ = ["Content", "Source", "resolve"]

_SCHEME = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*)://(?P<rest>.*)")
_LOCAL = ("/", "./", "../", "~")


class Content(Protocol):
    """The content of a file from `start` on."""

    #: 0 if the server ignores ranges.
    start: int
    #: That of the whole file, if it comes with the content.
    checksum: Checksum | None

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; none at the end. Raises `TemporaryError`."""

    def close(self) -> None:
        """Release the connection."""


class Source(Protocol):
    """A model at a place from which it can be downloaded. Three methods send requests."""

    #: `huggingface`, `s3`, `tos`, `http` or `local`.
    kind: str
    #: Without credentials, for messages.
    uri: str
    #: The default name of the model's directory: `org/name` of the hub, else the last part of the URI.
    model_name: str
    options: Options

    def files(self, session: Session, /) -> Iterator[RemoteFile]:
        """All files. Raises `ModelNotFoundError` if there is none."""

    def refresh(self, session: Session, file: RemoteFile, /) -> RemoteFile:
        """The file as it is now, with its checksum if the server has one."""

    def open(self, session: Session, file: RemoteFile, start: int, stop: int | None, /) -> Content:
        """A range of a file. Raises `FileChangedError` if it is another version, and `TemporaryError`."""


def resolve(uri: str, options: Options) -> Source:
    """The source that `uri` names; nothing is sent yet. Raises `InvalidArgumentError`."""
    uri = uri.strip()
    if not uri or not uri.isprintable():
        raise InvalidArgumentError(f"model_uri={uri!r:.200}: not a model URI", "model_uri")
    found = _SCHEME.fullmatch(uri)
    scheme, rest = (found["scheme"].lower(), found["rest"]) if found else ("", uri)
    if scheme in ("http", "https"):
        from penstock.runtime.downloader.web import WebSource

        return WebSource(uri, options)
    if scheme in ("s3", "tos"):
        from penstock.runtime.downloader.s3 import S3Source

        return S3Source(scheme, rest, options)
    if scheme in ("huggingface", "hf") or (not scheme and not uri.startswith(_LOCAL)):
        from penstock.runtime.downloader.hub import HubSource

        return HubSource(rest, options)
    if scheme in ("", "file"):
        from penstock.runtime.downloader.local import LocalSource

        path = unquote(urlsplit(uri).path) if scheme else uri
        return LocalSource(path, options)
    expected = "org/name, huggingface://, hf://, s3://, tos://, http://, https://, file:// or a path"
    raise InvalidArgumentError(f"model_uri: unknown scheme {scheme!r:.50}; expected {expected}", "model_uri")
