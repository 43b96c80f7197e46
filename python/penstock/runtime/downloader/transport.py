"""HTTP requests of a download: retries, redirects, allowed hosts, ranges, cancellation.

Headers of a request stay with its origin: a redirect to another host gets none of them but those of ranges.
"""

from __future__ import annotations

import fnmatch
import re
import threading
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urljoin

import urllib3
from urllib3.util import Timeout, Url, make_headers, parse_url

from penstock.runtime.downloader.errors import (
    AccessDeniedError,
    DownloadCancelledError,
    InvalidArgumentError,
    ModelNotFoundError,
    TransferError,
)
from penstock.runtime.downloader.retries import Attempts, FileChangedError, Rate, TemporaryError, seconds_of
from penstock.runtime.downloader.waiting import Waiting, pool_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.runtime.downloader.checksums import Checksum
    from penstock.runtime.downloader.files import RemoteFile
    from penstock.runtime.downloader.retries import Pacer

__all__ = ["Body", "Reply", "Session", "joined", "origin_of", "parsed", "shown", "size_of"]

T = TypeVar("T")

CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 30.0
MAX_REDIRECTS = 5
MAX_DOCUMENT = 16 << 20
#: Bytes per minute and connection.
MIN_RATE = 16 << 10
MAX_DRAINED = 16 << 10
MAX_DIGITS = 18
#: Headers that every origin gets.
_PUBLIC_HEADERS = {"accept-encoding", "range", "user-agent"}
_REDIRECTS = {301, 302, 303, 307, 308}
_TEMPORARY = {408, 425, 429}
_THROTTLED = {429, 503}


class Body:
    """The content of a file from `start` on; the caller closes it."""

    def __init__(self, reply: Reply, start: int, size: int | None, checksum: Checksum | None = None) -> None:
        self._reply = reply
        #: The offset of the first byte, which is 0 if the server ignores ranges.
        self.start = start
        self._rest = size
        #: That of the whole file, if the response has it.
        self.checksum = checksum

    def read(self, size: int) -> bytes:
        """Up to `size` bytes as they arrive; none at the end. Raises `TemporaryError`."""
        if self._rest == 0:
            return b""
        data = self._reply.read(size if self._rest is None else min(size, self._rest))
        if self._rest is not None:
            if not data:
                raise TemporaryError(f"{self._reply.label}: the response is {self._rest} bytes short")
            self._rest -= len(data)
        return data

    def close(self) -> None:
        """Keep the connection for another request if the response has ended."""
        self._reply.close()


class Reply(NamedTuple):
    """A response without its content."""

    response: urllib3.BaseHTTPResponse
    #: The URL after redirects.
    url: str
    #: The URL for messages.
    label: str
    session: Session
    rate: Rate

    @property
    def status(self) -> int:
        """The status."""
        return self.response.status

    def header(self, name: str) -> str | None:
        """The value of a header."""
        return self.response.headers.get(name)

    @property
    def length(self) -> int | None:
        """The size of the content; None if the server does not send it."""
        return size_of(self.header("Content-Length"))

    def read(self, size: int) -> bytes:
        """Up to `size` bytes as they arrive; none at the end. Raises `TemporaryError`."""
        if self.rate.is_too_low():
            raise TemporaryError(f"{self.label}: the server sends less than {MIN_RATE} bytes per minute")
        try:
            data = self.response.read1(size)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise TemporaryError(f"{self.label}: the connection broke: {_reason(error)}") from None
        self.rate.add(len(data))
        return data

    def document(self) -> bytes:
        """All of the content, which has a limit."""
        parts, size = [], 0
        try:
            while data := self.read(1 << 16):
                parts.append(data)
                if (size := size + len(data)) > MAX_DOCUMENT:
                    raise TransferError(f"{self.label}: the response has more than {MAX_DOCUMENT} bytes")
        finally:
            self.close()
        return b"".join(parts)

    def body(self, file: RemoteFile, start: int, stop: int | None, checksum: Checksum | None = None) -> Body:
        """The content, which is this range of the file, or the whole file from a server that ignores ranges.

        Raises `FileChangedError` if the file has another size.
        """
        total = self.length
        size, begin = total, 0
        if self.status == 206:  # noqa: PLR2004 - Partial Content
            found = re.fullmatch(
                r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", self.header("Content-Range") or ""
            )
            if found is None or int(found[1]) != start or (stop is not None and int(found[2]) != stop - 1):
                self.close()
                raise TransferError(f"{self.label}: the response has another range than the request")
            size, begin = int(found[2]) + 1 - start, start
            total = int(found[3]) if found[3] != "*" else None
        if file.size is not None and total is not None and total != file.size:
            self.close()
            raise FileChangedError(f"{self.label}: the file has {total} bytes in place of {file.size}")
        return Body(self, begin, size, checksum)

    def check(self) -> None:
        """Raise the error of a status that is not a success."""
        if 200 <= self.status < 300:  # noqa: PLR2004 - successes
            return
        self.close()
        message = f"{self.label}: the server answers {self.status}"
        if self.status in (401, 403, 407):
            raise AccessDeniedError(message)
        if self.status in (404, 410):
            raise ModelNotFoundError(message)
        if self.status in (412, 416):
            raise FileChangedError(message)
        self.check_temporary()
        raise TransferError(message)

    def check_temporary(self) -> None:
        """Raise the error of a status after which another attempt can succeed."""
        if self.status in _TEMPORARY or self.status >= 500:  # noqa: PLR2004 - errors of the server
            self.close()
            raise TemporaryError(
                f"{self.label}: the server answers {self.status}",
                retry_after=seconds_of(self.header("Retry-After")),
                is_throttled=self.status in _THROTTLED,
            )

    def close(self) -> None:
        """End the response."""
        self.session.forget(self)


class Session:
    """The connections of a download."""

    def __init__(
        self,
        pacer: Pacer,
        stopped: threading.Event,
        num_connections: int,
        allowed_hosts: tuple[str, ...] | None,
    ) -> None:
        self.pacer = pacer
        self._stopped = stopped
        self._allowed_hosts = allowed_hosts
        self._settings: dict[str, Any] = {
            "maxsize": num_connections,
            "timeout": Timeout(connect=CONNECT_TIMEOUT, read=READ_TIMEOUT),
            "retries": False,
        }
        self._pools: dict[str | None, urllib3.PoolManager] = {}
        self._lock = threading.Lock()
        self._open: dict[int, Reply] = {}
        self._waiting = Waiting(pacer.clock)
        self._pool_classes = pool_classes(self._waiting)

    @property
    def is_aborted(self) -> bool:
        """Whether the download has ended."""
        return self._stopped.is_set()

    def attempts(self) -> Attempts:
        """The attempts of one request."""
        return Attempts(self.pacer)

    def repeat(self, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, which is called again after temporary failures."""
        attempts = self.attempts()
        while True:
            try:
                return attempt()
            except TemporaryError as error:
                attempts.failed(error)

    def send(
        self, method: str, url: str, headers: Mapping[str, str], *, max_redirects: int = MAX_REDIRECTS
    ) -> Reply:
        """One attempt: the response after redirects, of any status. Raises `TemporaryError`."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "penstock", **headers}
        origin = origin_of(url)
        for _ in range(max_redirects + 1):
            self.check_url(url)
            reply = self._send_once(method, url, headers)
            target = reply.header("Location")
            if reply.status not in _REDIRECTS or target is None or max_redirects == 0:
                if reply.header("Content-Encoding") not in (None, "identity"):
                    reply.close()
                    raise TransferError(f"{reply.label}: the response is compressed")
                return reply
            reply.close()
            target = joined(url, target)
            if parsed(url).scheme == "https" and parsed(target).scheme != "https":
                raise AccessDeniedError(f"{shown(url)}: the redirect to {shown(target)} is not encrypted")
            url = target
            if origin_of(url) != origin:
                headers = {name: value for name, value in headers.items() if name.lower() in _PUBLIC_HEADERS}
        raise TransferError(f"{shown(url)}: more than {max_redirects} redirects")

    def _send_once(self, method: str, url: str, headers: Mapping[str, str]) -> Reply:
        self.pacer.pass_request()
        try:
            response = self._pool(url).request(
                method, url, headers=headers, redirect=False, preload_content=False, decode_content=False
            )
        except urllib3.exceptions.SSLError as error:
            raise TransferError(f"{shown(url)}: {_reason(error)}") from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise TemporaryError(f"{shown(url)}: no response: {_reason(error)}") from None
        except ValueError:  # its message has the header
            raise InvalidArgumentError(
                f"{shown(url)}: a header or a credential is invalid", "headers"
            ) from None
        reply = Reply(response, url, shown(url), self, Rate(self.pacer.clock, MIN_RATE))
        with self._lock:
            self._open[id(response)] = reply
        if self.is_aborted:
            reply.close()
            raise DownloadCancelledError("the download is cancelled")
        return reply

    def check_url(self, url: str) -> None:
        """Raise an error unless requests to this URL are allowed."""
        parts = parsed(url)
        host = (parts.host or "").rstrip(".")
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidArgumentError(f"{shown(url)}: not an HTTP URL", "endpoint")
        allowed = self._allowed_hosts
        if allowed is not None and not any(fnmatch.fnmatchcase(host, item.lower()) for item in allowed):
            options = "DOWNLOADER_ALLOWED_HOSTS, or --artifact-host of the runtime"
            raise AccessDeniedError(f"{host}: not among the allowed hosts ({options})")

    def _pool(self, url: str) -> urllib3.PoolManager:
        """The connections to a host, or to the proxy of the environment for it."""
        parts = parsed(url)
        proxy = urllib.request.getproxies().get(parts.scheme or "")
        if proxy is not None and urllib.request.proxy_bypass(parts.host or ""):
            proxy = None
        with self._lock:
            if (pool := self._pools.get(proxy)) is None:
                settings = self._settings
                pool = urllib3.PoolManager(**settings) if proxy is None else _proxy(proxy, settings)
                pool.pool_classes_by_scheme = self._pool_classes
                self._pools[proxy] = pool
            return pool

    def forget(self, reply: Reply) -> None:
        """End a response: the connection is kept if little or nothing of the response is unread."""
        with self._lock:
            self._open.pop(id(reply.response), None)
        rest = reply.response.length_remaining
        if rest is not None and 0 < rest <= MAX_DRAINED:
            reply.response.drain_conn()
        reply.response.close()

    def end_late(self) -> None:
        """End the requests that wait too long for the head of a response."""
        self._waiting.end_late()

    def abort(self) -> None:
        """End all requests, also those for which other threads wait, and all responses that they read."""
        self._stopped.set()
        self._waiting.end_all()
        with self._lock:
            replies = list(self._open.values())
        for reply in replies:
            with suppress(Exception):  # it has just ended
                reply.response.shutdown()

    def close(self) -> None:
        """Close the connections."""
        for pool in self._pools.values():
            pool.clear()


def _proxy(url: str, settings: Mapping[str, Any]) -> urllib3.ProxyManager:
    """The connections through a proxy; its URL can have a user and a password."""
    auth = parsed(url).auth
    headers = make_headers(proxy_basic_auth=unquote(auth)) if auth else None
    return urllib3.ProxyManager(url, proxy_headers=headers, **settings)


def parsed(url: str) -> Url:
    """The parts of a URL, as the library that connects reads them. Raises `InvalidArgumentError`."""
    try:
        return parse_url(url)
    except urllib3.exceptions.LocationParseError:
        raise InvalidArgumentError("the URL is invalid", "model_uri") from None


def size_of(text: str | None) -> int | None:
    """The number of bytes that a server sends as text; None if it is none."""
    return int(text) if text and text.isdecimal() and len(text) <= MAX_DIGITS else None


def joined(url: str, target: str) -> str:
    """A URL that a response at `url` names."""
    try:
        return urljoin(url, target)
    except ValueError:
        raise TransferError(f"{shown(url)}: the URL of the redirect is invalid") from None


def origin_of(url: str) -> tuple[str | None, str | None, int | None]:
    """The scheme, host and port of a URL."""
    parts = parsed(url)
    return parts.scheme, parts.host, parts.port or {"http": 80, "https": 443}.get(parts.scheme or "")


def shown(url: str) -> str:
    """A URL for messages: without user, password, query and fragment, which can be credentials."""
    return parsed(url)._replace(auth=None, query=None, fragment=None).url


def _reason(error: Exception) -> str:
    """The kind of an error: messages of the libraries can contain URLs with credentials."""
    cause = error.__cause__ or error.__context__ or error
    return getattr(cause, "strerror", None) or type(cause).__name__
