"""Sources of downloads that requests name: the hosts, folders and credentials that they may have."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from penstock._hub_ids import parse_hub_id
from penstock.runtime.downloader import (
    AccessDeniedError,
    DownloadError,
    ForeignFileError,
    InsufficientSpaceError,
    InvalidArgumentError,
    ModelNotFoundError,
    Options,
    TooLargeError,
    UnsafeNameError,
)
from penstock.runtime.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.runtime.bodies import DelegatedLoad
    from penstock.runtime.settings import RuntimeSettings

__all__ = [
    "credentials_of",
    "download_error",
    "engine_key_of",
    "folder_name",
    "names_hub_model",
    "options_for",
    "request_options",
    "scheme_of",
    "secrets_of",
]

#: Hosts of the hub, of the stores to which it redirects, of Amazon S3 and of TOS; with https only.
_HOSTS = (
    *("huggingface.co", "*.huggingface.co", "*.hf.co"),
    *("s3.amazonaws.com", "*.s3.amazonaws.com", "s3.*.amazonaws.com", "*.s3.*.amazonaws.com"),
    *("s3.*.amazonaws.com.cn", "*.s3.*.amazonaws.com.cn"),
    *("tos-*.volces.com", "*.tos-*.volces.com", "tos-*.ivolces.com", "*.tos-*.ivolces.com"),
)
#: Names of credentials in requests and secrets, and the options of the downloader.
_CREDENTIALS = {
    "TOS_ACCESS_KEY": "ak",
    "TOS_ENDPOINT": "endpoint",
    "TOS_REGION": "region",
    "TOS_SECRET_KEY": "sk",
    "TOS_SESSION_KEY": "session_token",
    "aws_access_key_id": "ak",
    "aws_endpoint_url": "endpoint",
    "aws_region": "region",
    "aws_secret_access_key": "sk",
    "aws_session_token": "session_token",
    "huggingface_token": "hf_token",
}
#: Fields of `additional_config` that are options of the downloader.
_ENDPOINTS = frozenset({"endpoint", "hf_endpoint"})
_CONFIG = _ENDPOINTS | {"region", "hf_revision"}
_WEB = ("http", "https")
_SECRET_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]{1,256}", re.ASCII)
#: Headers that the client of HTTP sets.
_OWN_HEADERS = frozenset({"connection", "content-length", "host", "range", "transfer-encoding"})
_MAX_SECRETS = 64
_MAX_SECRET = 64 << 10
_ERRORS: tuple[tuple[type[DownloadError], int, str], ...] = (
    (InvalidArgumentError, 422, "InvalidArgumentError"),
    (ModelNotFoundError, 404, "ModelNotFoundError"),
    (AccessDeniedError, 403, "AccessDeniedError"),
    (UnsafeNameError, 422, "UnsafeNameError"),
    (ForeignFileError, 403, "ForeignFileError"),
    (TooLargeError, 422, "TooLargeError"),
    (InsufficientSpaceError, 507, "InsufficientSpaceError"),
)


def download_error(error: DownloadError) -> ApiError:
    """The response for an error of the downloader."""
    param = error.field if isinstance(error, InvalidArgumentError) else None
    for kind, status, name in _ERRORS:
        if isinstance(error, kind):
            return ApiError(status, name, str(error), param=param)
    return ApiError(502, type(error).__name__, str(error))


def scheme_of(uri: str) -> str:
    """The scheme of a URI; empty for a path or a hub id."""
    scheme, separator, _ = uri.strip().partition("://")
    return scheme.lower() if separator else ""


def names_hub_model(text: str) -> bool:
    """Whether an engine reads this as `org/name` of the hub: a file or folder with this path comes first."""
    hub_id = parse_hub_id(text)
    if hub_id is None or hub_id.revision is not None:
        return False
    try:
        return not Path(text).exists()
    except OSError:
        return False


def options_for(uri: str, extra: Mapping[str, Any], settings: RuntimeSettings) -> Options:
    """The options of a download that a request asks for, with the limits of the operator."""
    own = Options.load(uri)  # those of the environment
    options = _with_credentials(uri, extra, own)
    if not all(_is_header(name, value) for name, value in options.headers.items()):
        message = "headers: names and values of HTTP headers are expected, except of the message itself"
        raise InvalidArgumentError(message, "headers")
    hosts = own.allowed_hosts
    if hosts is None:
        names = [urlsplit(url).hostname for url in (own.endpoint, own.hf_endpoint) if url]
        found = [pattern for name in names if name for pattern in (name, f"*.{name}")]
        named = (uri, str(extra.get("endpoint")), str(extra.get("hf_endpoint")))
        is_plain = any(scheme_of(url) == "http" for url in named)
        hosts = () if is_plain else _HOSTS
        hosts = (*hosts, *(pattern for pattern in found if not is_plain or pattern not in _HOSTS))
    hosts = (*hosts, *settings.artifact_hosts)
    roots = own.allowed_roots if own.allowed_roots is not None else tuple(map(str, settings.roots))
    return msgspec.structs.replace(
        options, allowed_hosts=None if "*" in hosts else hosts, allowed_roots=roots
    )


def folder_name(uri: str, options: Options) -> str:
    """The name of the folder of a download, which other files of the same URI do not share."""
    return sha256(msgspec.json.encode(options.origin(uri))).hexdigest()[:12]


def _with_credentials(uri: str, extra: Mapping[str, Any], own: Options) -> Options:
    """The options of a request. The operator's credentials are for the operator's endpoints only."""
    options = Options.load(uri, extra)
    if scheme_of(uri) in ("s3", "tos") and options.endpoint != own.endpoint and not extra.get("ak"):
        message = "ak: a request that names an endpoint needs its credentials, ak and sk"
        raise InvalidArgumentError(message, "ak")
    if options.hf_endpoint != own.hf_endpoint and not extra.get("hf_token"):
        from penstock.runtime.downloader.hub import stored_token

        if stored_token() is not None:  # it would be sent
            message = "hf_token: a request that names an endpoint needs its token"
            raise InvalidArgumentError(message, "hf_token")
        return msgspec.structs.replace(options, hf_token=None)
    return options


def _is_header(name: str, value: str) -> bool:
    is_own = name.lower() in _OWN_HEADERS
    return bool(_HEADER_NAME.fullmatch(name)) and not is_own and value.isascii() and value.isprintable()


def request_options(uri: str, credentials: Mapping[str, str], config: Mapping[str, str]) -> dict[str, Any]:
    """The options in the credentials and the configuration of a request for an adapter."""
    if scheme_of(uri) in _WEB:
        return {"headers": dict(credentials)} if credentials else {}
    found: dict[str, Any] = {name: value for name, value in config.items() if name in _CONFIG}
    for name, value in credentials.items():
        if name in _CREDENTIALS:
            found[_CREDENTIALS[name]] = value
    return found


def engine_key_of(body: DelegatedLoad) -> str | None:
    """The key for the engine in a request for an adapter. AIBrix's controller sends it as the token, too."""
    key = (body.additional_config or {}).get("api-key") or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ApiError(400, "ValidationError", "api-key is no key", param="additional_config.api-key")
    return key


def credentials_of(body: DelegatedLoad, settings: RuntimeSettings) -> dict[str, str]:
    """The credentials of a request: its own, those of the secret that it names, or those for all requests.

    The files are not for an endpoint that the request names: a secret must have its endpoint itself.
    """
    if body.credentials is not None:
        return body.credentials
    named = sorted(_ENDPOINTS.intersection(body.additional_config or {}))
    if body.credentials_secret is None:
        return {} if named else secrets_of(settings, None)
    found = secrets_of(settings, body.credentials_secret)
    own = {_CREDENTIALS.get(name) for name in found}
    for name in named:
        if name not in own:
            message = f"{name}: the secret {body.credentials_secret!r} is not for an endpoint of the request"
            raise ApiError(400, "ValidationError", message, param=f"additional_config.{name}")
    return found


def secrets_of(settings: RuntimeSettings, name: str | None) -> dict[str, str]:
    """The files of a mounted secret, by name. Without a name, those of the folder itself if it exists."""
    folder = Path(settings.secret_dir)
    if name is not None:
        if not _SECRET_NAME.fullmatch(name) or ".." in name:
            raise ApiError(
                400, "ValidationError", "credentials_secret is no name", param="credentials_secret"
            )
        folder /= name
        if not folder.is_dir():
            message = f"credentials_secret={name!r} is not mounted"
            raise ApiError(400, "ValidationError", message, param="credentials_secret")
    if not folder.is_dir():
        return {}
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir()):
        # Kubernetes keeps the versions of a secret in `..data`.
        if file.name.startswith("..") or not file.is_file() or len(found) >= _MAX_SECRETS:
            continue
        if file.stat().st_size <= _MAX_SECRET:
            found[file.name] = file.read_text(encoding="utf-8", errors="replace").strip()
    return found
