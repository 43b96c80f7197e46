"""Objects of S3, and of TOS through its S3 interface. Requests are signed with botocore."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote, unquote_plus
from xml.etree import ElementTree as ET

from penstock.runtime.downloader.checksums import Checksum, of_base64, start_hasher
from penstock.runtime.downloader.errors import (
    AccessDeniedError,
    DownloadError,
    InvalidArgumentError,
    ModelNotFoundError,
    TooLargeError,
    TransferError,
)
from penstock.runtime.downloader.files import RemoteFile
from penstock.runtime.downloader.options import REGION, variable_of
from penstock.runtime.downloader.retries import FileChangedError
from penstock.runtime.downloader.transport import parsed, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.runtime.downloader.options import Options
    from penstock.runtime.downloader.transport import Body, Reply, Session

__all__ = ["S3Source"]

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
#: Hosts of which the name of the bucket is a part.
_VIRTUAL_HOSTS = re.compile(r".*\.(amazonaws\.com(\.cn)?|volces\.com|ivolces\.com|bytepluses\.com)")
_TOS_HOST = re.compile(r"tos-(?!s3-)(?P<region>[a-z0-9-]+?)\.(?P<domain>i?volces\.com|bytepluses\.com)")
_EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
_CHECKSUMS = ("sha256", "sha1", "crc64nvme", "crc32c", "crc32")
_DENIED = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}


class S3Source:
    """The objects with keys that begin with a prefix, or a single object."""

    def __init__(self, kind: str, location: str, options: Options) -> None:
        bucket, _, key = location.partition("/")
        if not _BUCKET.fullmatch(bucket) or not key.strip("/"):
            message = f"model_uri={kind}://{location!s:.200}: expected {kind}://BUCKET/PATH"
            raise InvalidArgumentError(message, "model_uri")
        if (options.ak is None) != (options.sk is None):
            _missing(kind, "ak" if options.ak is None else "sk", "ak and sk belong together")
        if kind == "tos":
            for name in ("ak", "endpoint"):
                if getattr(options, name) is None:
                    _missing(kind, name, "TOS needs ak, sk and endpoint")
        self.kind = kind
        self.uri = f"{kind}://{bucket}/{key}"
        self.model_name = key.strip("/").rpartition("/")[2]
        self.options = options
        self._bucket, self._key = bucket, key
        self._region = options.region or ""
        self._credentials: Any = None
        self._lock = threading.Lock()
        if options.endpoint is not None:
            self._endpoint = _endpoint_of(options.endpoint, kind)
            tos = re.search(r"//tos-(?:s3-)?([a-z0-9-]+?)\.", self._endpoint)
            self._region = self._region or (tos[1] if tos else "")
        else:
            self._endpoint = ""

    # ---- the interface of sources

    def files(self, session: Session) -> Iterator[RemoteFile]:
        """The objects below the path, or the object with this key."""
        folder = self._key if self._key.endswith("/") else self._key + "/"
        has_objects = False
        for file in self._listed(session, folder):
            has_objects = True
            yield file
        if has_objects:
            return
        if self._key.endswith("/"):
            if self.options.allow_empty:
                return
            raise ModelNotFoundError(f"{self.uri}: no object below this path")
        yield self.refresh(session, RemoteFile(self.model_name, None, "", key=self._key))

    def refresh(self, session: Session, file: RemoteFile) -> RemoteFile:
        """The object as it is now, with its checksum."""

        def attempt() -> RemoteFile:
            reply = self._send(session, "HEAD", file.key, {})
            self._check(reply)
            reply.close()
            if (size := reply.length) is None:
                raise TransferError(f"{reply.label}: the server sends no size")
            etag = reply.header("ETag") or ""
            return RemoteFile(file.name, size, etag, _checksum(reply, size), file.key)

        return session.repeat(attempt)

    def open(self, session: Session, file: RemoteFile, start: int, stop: int | None) -> Body:
        """A range of an object, if it is the same version."""
        is_whole = start == 0 and stop == file.size
        headers = {} if is_whole else {"Range": f"bytes={start}-{(stop or 0) - 1}"}
        if file.version:
            headers["If-Match"] = file.version
        reply = self._send(session, "GET", file.key, headers)
        self._check(reply)
        if file.version and reply.header("ETag") not in (None, file.version):
            reply.close()
            raise FileChangedError(f"{reply.label}: the object changed")
        checksum = _checksum(reply, file.size) if is_whole and file.size is not None else None
        return reply.body(file, start, stop, checksum)

    # ---- lists of objects

    def _listed(self, session: Session, folder: str) -> Iterator[RemoteFile]:
        token: str | None = None
        for _ in range(self.options.max_pages):
            query = {"encoding-type": "url", "list-type": "2", "prefix": folder}
            if token is not None:
                query["continuation-token"] = token
            root = session.repeat(lambda query=query: self._list_page(session, query))  # type: ignore[misc]
            is_encoded = root.findtext("{*}EncodingType") == "url"  # some servers ignore the parameter
            for item in root.iterfind("{*}Contents"):
                key = item.findtext("{*}Key") or ""
                key = unquote_plus(key, errors="surrogateescape") if is_encoded else key
                size = size_of(item.findtext("{*}Size"))
                if not key.startswith(folder) or size is None:
                    raise TransferError(f"{self.uri}: the list of objects is not as expected")
                is_marker = key.endswith("/") and size == 0
                if not is_marker:
                    etag = item.findtext("{*}ETag") or ""
                    yield RemoteFile(key.removeprefix(folder), size, etag, key=key)
            following = root.findtext("{*}NextContinuationToken")
            if root.findtext("{*}IsTruncated") != "true":
                return
            if not following or following == token:
                raise TransferError(f"{self.uri}: the list of objects has no end")
            token = following
        raise TooLargeError(f"{self.uri}: the list of objects has more than {self.options.max_pages} pages")

    def _list_page(self, session: Session, query: Mapping[str, str]) -> ET.Element:
        reply = self._send(session, "GET", "", {}, query)
        self._check(reply)
        return _xml(reply.document(), self.uri)

    # ---- requests

    def _send(
        self,
        session: Session,
        method: str,
        key: str,
        headers: Mapping[str, str],
        query: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a signed request; once more if the bucket is in another region."""
        reply = self._send_once(session, method, key, headers, query)
        region = reply.header("x-amz-bucket-region") or ""
        is_other = region not in ("", self._region) and re.fullmatch(REGION, region) is not None
        if reply.status in (301, 307, 400, 403) and is_other:
            reply.close()
            self._region = region
            reply = self._send_once(session, method, key, headers, query)
        return reply

    def _send_once(
        self,
        session: Session,
        method: str,
        key: str,
        headers: Mapping[str, str],
        query: Mapping[str, str] | None,
    ) -> Reply:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        credentials = self._frozen_credentials()
        arguments = "&".join(
            f"{name}={quote(value, safe='')}" for name, value in sorted((query or {}).items())
        )
        url = self._base() + quote(key, safe="/~") + (f"?{arguments}" if arguments else "")
        session.check_url(url)
        signed: dict[str, str] = {"x-amz-content-sha256": _EMPTY}
        if key:
            signed["x-amz-checksum-mode"] = "ENABLED"
        if credentials is not None:
            request = AWSRequest(method, url, headers=signed)
            S3SigV4Auth(credentials, "s3", self._region or "us-east-1").add_auth(request)
            signed = dict(request.headers)
        return session.send(method, url, {**signed, **headers}, max_redirects=0)

    def _base(self) -> str:
        """The URL of the bucket, with a slash at the end."""
        region = self._region or "us-east-1"
        suffix = ".cn" if region.startswith("cn-") else ""
        endpoint = self._endpoint or f"https://s3.{region}.amazonaws.com{suffix}"
        scheme, _, host = endpoint.partition("://")
        style = self.options.addressing_style
        if style == "auto":
            # A certificate for *.host is not one for names with more dots.
            is_virtual = _VIRTUAL_HOSTS.fullmatch(host) and "." not in self._bucket
            style = "virtual" if is_virtual else "path"
        return f"{scheme}://{self._bucket}.{host}/" if style == "virtual" else f"{endpoint}/{self._bucket}/"

    def _frozen_credentials(self) -> Any:
        """The current credentials; None for requests without a signature."""
        from botocore.credentials import Credentials
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session as BotocoreSession

        options = self.options
        with self._lock:
            if self._credentials is None:
                if options.ak is not None:
                    self._credentials = Credentials(options.ak, options.sk, options.session_token)
                else:
                    try:
                        self._credentials = BotocoreSession().get_credentials() or False
                    except BotoCoreError as error:
                        message = f"{self.uri}: no credentials: {type(error).__name__}"
                        raise AccessDeniedError(message) from None
            if not self._credentials:
                return None
            try:
                return self._credentials.get_frozen_credentials()
            except BotoCoreError as error:
                message = f"{self.uri}: the credentials cannot be refreshed: {type(error).__name__}"
                raise AccessDeniedError(message) from None

    def _check(self, reply: Reply) -> None:
        """Raise the error of a status that is not a success, with the server's code of the error."""
        if 200 <= reply.status < 300:  # noqa: PLR2004 - successes
            return
        code = ""
        if reply.response.headers.get("Content-Length") != "0":
            try:
                found = _xml(reply.document(), self.uri).findtext("{*}Code")
                code = found if found and re.fullmatch(r"\w{1,64}", found) else ""
            except DownloadError:
                code = ""
        if code == "NoSuchBucket":
            raise ModelNotFoundError(f"{self.uri}: no such bucket")
        reason = f" ({code})" if code else ""
        if code in _DENIED:
            raise AccessDeniedError(f"{self.uri}: the server refuses the credentials{reason}")
        try:
            reply.check()
        except AccessDeniedError:
            hint = "" if self._credentials else "; no credentials are configured"
            raise AccessDeniedError(f"{self.uri}: access is denied{reason}{hint}") from None
        except ModelNotFoundError:
            raise ModelNotFoundError(f"{self.uri}: not found{reason}") from None


def _missing(kind: str, name: str, reason: str) -> NoReturn:
    raise InvalidArgumentError(f"{name} ({variable_of(kind, name)}) is missing: {reason}", name)


def _endpoint_of(text: str, kind: str) -> str:
    """The endpoint as scheme and host; of TOS, that of its S3 interface."""
    parts = parsed(text if "://" in text else f"https://{text}")
    if parts.scheme not in ("http", "https") or not parts.host or parts.auth or parts.query:
        raise InvalidArgumentError("endpoint: expected a URL such as https://s3.example.com", "endpoint")
    host = parts.host
    if kind == "tos" and (found := _TOS_HOST.fullmatch(host)):
        host = f"tos-s3-{found['region']}.{found['domain']}"
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{host}{port}"


def _xml(content: bytes, uri: str) -> ET.Element:
    if b"<!" in content:  # entities
        raise TransferError(f"{uri}: the server's XML has declarations")
    if b"\0" in content:  # UTF-16, which the parser detects
        raise TransferError(f"{uri}: the server's response is not XML")
    try:
        return ET.fromstring(content.decode())  # noqa: S314 - without declarations: text has no other encoding
    except (ET.ParseError, UnicodeDecodeError):
        raise TransferError(f"{uri}: the server's response is not XML") from None


def _checksum(reply: Reply, size: int) -> Checksum | None:
    """The first checksum of the whole object that can be computed; an ETag is an MD5 of some objects only."""
    for algorithm in _CHECKSUMS:
        text = reply.header(f"x-amz-checksum-{algorithm}")
        checksum = of_base64(algorithm, text) if text else None
        if checksum is not None and start_hasher(checksum, size) is not None:
            return checksum
    etag = re.fullmatch(r'"([0-9a-f]{32})"', reply.header("ETag") or "")
    encryption = reply.header("x-amz-server-side-encryption")
    own_key = reply.header("x-amz-server-side-encryption-customer-algorithm")
    if etag is None or encryption not in (None, "AES256") or own_key is not None:
        return None
    return Checksum("md5", etag[1])
