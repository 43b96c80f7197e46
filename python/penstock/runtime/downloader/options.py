"""The options of a download: environment variables, and `download_extra_config`, which overrides them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from penstock.runtime.downloader.errors import InvalidArgumentError
from penstock.runtime.downloader.ownership import private_folder
from penstock.runtime.truth import truth_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["REGION", "SECRETS", "Options", "default_local_dir", "variable_of"]

#: The operator's choices, which `download_extra_config` cannot change.
LIMITS = {"allow_empty", "max_files", "max_bytes", "allowed_hosts", "allowed_roots"}
#: Of a number in a text.
_MAX_DIGITS = 18
#: The name of a region is a part of the host; S3-compatible stores have names with capital letters.
REGION = r"[A-Za-z0-9_-]{0,64}"
#: The options that select the files of a model. The limits of the operator and credentials do not.
_SELECTION = (
    *("endpoint", "region", "hf_endpoint", "hf_revision"),
    *("allow_file_suffix", "allow_patterns", "ignore_patterns", "prefer_safetensors"),
)
SECRETS = {"ak", "sk", "session_token", "hf_token", "headers"}

_GENERAL = {
    "num_threads": "DOWNLOADER_NUM_THREADS",
    "part_threshold": "DOWNLOADER_PART_THRESHOLD",
    "part_chunksize": "DOWNLOADER_PART_CHUNKSIZE",
    "max_io_queue": "DOWNLOADER_S3_MAX_IO_QUEUE",
    "io_chunksize": "DOWNLOADER_S3_IO_CHUNKSIZE",
    "allow_file_suffix": "DOWNLOADER_ALLOW_FILE_SUFFIX",
    "allow_patterns": "DOWNLOADER_ALLOW_PATTERNS",
    "ignore_patterns": "DOWNLOADER_IGNORE_PATTERNS",
    "prefer_safetensors": "DOWNLOADER_PREFER_SAFETENSORS",
    "force_download": "DOWNLOADER_FORCE_DOWNLOAD",
    "check_file_exist": "DOWNLOADER_CHECK_FILE_EXIST",
    "allow_empty": "DOWNLOADER_ALLOW_EMPTY",
    "max_files": "DOWNLOADER_MAX_FILES",
    "max_bytes": "DOWNLOADER_MAX_BYTES",
    "allowed_hosts": "DOWNLOADER_ALLOWED_HOSTS",
    "allowed_roots": "DOWNLOADER_ALLOWED_ROOTS",
}
_OF_SCHEME = {
    "huggingface": {"hf_endpoint": "HF_ENDPOINT", "hf_token": "HF_TOKEN", "hf_revision": "HF_REVISION"},
    "s3": {
        "ak": "AWS_ACCESS_KEY_ID",
        "sk": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
        "endpoint": "AWS_ENDPOINT_URL",
        "region": "AWS_REGION",
        "addressing_style": "DOWNLOADER_S3_ADDRESSING_STYLE",
    },
    "tos": {
        "ak": "TOS_ACCESS_KEY",
        "sk": "TOS_SECRET_KEY",
        "session_token": "TOS_SESSION_KEY",
        "endpoint": "TOS_ENDPOINT",
        "region": "TOS_REGION",
        "addressing_style": "DOWNLOADER_S3_ADDRESSING_STYLE",
    },
}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a download."""

    # S3 and TOS. Without `ak` and `sk`, S3 uses the credentials that botocore finds.
    ak: str | None = None
    sk: str | None = None
    session_token: str | None = None
    endpoint: str | None = None
    region: Annotated[str, msgspec.Meta(pattern=rf"\A{REGION}\Z")] | None = None
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    # Hugging Face.
    hf_endpoint: str = "https://huggingface.co"
    hf_token: str | None = None
    hf_revision: str | None = None
    # http and https: request headers, which may be credentials.
    headers: dict[str, str] = {}
    # Transfer. The buffers have at most max_io_queue * io_chunksize bytes.
    num_threads: Annotated[int, msgspec.Meta(ge=1, le=256)] = 32
    part_threshold: Annotated[int, msgspec.Meta(ge=1 << 16)] = 64 << 20
    part_chunksize: Annotated[int, msgspec.Meta(ge=1 << 16)] = 64 << 20
    max_io_queue: Annotated[int, msgspec.Meta(ge=1)] = 100
    io_chunksize: Annotated[int, msgspec.Meta(ge=1 << 14)] = 16 << 20
    # Files of the model.
    allow_file_suffix: tuple[str, ...] = ()
    allow_patterns: tuple[str, ...] = ()
    ignore_patterns: tuple[str, ...] = ()
    prefer_safetensors: bool = True
    #: A path or a directory without files is no error, as in AIBrix.
    allow_empty: bool = False
    # Existing files.
    force_download: bool = False
    check_file_exist: bool = True
    # Limits.
    max_files: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    max_bytes: Annotated[int, msgspec.Meta(ge=1)] = 8 << 40
    #: Patterns of host names, such as `*.huggingface.co`; None allows all hosts.
    allowed_hosts: tuple[str, ...] | None = None
    #: Directories of local models; None allows all.
    allowed_roots: tuple[str, ...] | None = None

    def origin(self, uri: str) -> tuple[object, ...]:
        """The URI, and the options on which the files of a model depend."""
        return (uri.strip(), *(getattr(self, name) for name in _SELECTION))

    @property
    def max_pages(self) -> int:
        """The limit of pages of a list of files; pages can be empty."""
        return self.max_files // 100 + 100

    @classmethod
    def load(
        cls,
        uri: str,
        extra: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> Options:
        """The options for `uri`: those of the environment, and `extra`, which overrides them.

        Raises `InvalidArgumentError`, which names the key or the environment variable.
        """
        scheme = uri.strip().partition("://")[0].lower() if "://" in uri else "huggingface"
        scheme = "huggingface" if scheme == "hf" else scheme
        names = {**_GENERAL, **_OF_SCHEME.get(scheme, {})}
        values: dict[str, Any] = {
            field: _of_text(field, name, environment[name].strip())
            for field, name in names.items()
            if environment.get(name, "").strip()
        }
        if extra and not {"ak", "sk"}.isdisjoint(extra):  # not mixed with those of the environment
            for name in ("ak", "sk", "session_token"):
                values.pop(name, None)
        for name, value in (extra or {}).items():
            if name not in _TYPES or name in LIMITS:
                known = ", ".join(name for name in _TYPES if name not in LIMITS)
                message = f"{name}: unknown key; known keys are {known}"
                raise InvalidArgumentError(message, name)
            if value is not None:
                values[name] = _converted(name, name, value)
        return cls(**values)

    def __repr__(self) -> str:
        shown = {
            name: "***" if name in SECRETS and value else value
            for name, value in msgspec.structs.asdict(self).items()
        }
        return f"Options({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


_TYPES = {field.name: field.type for field in msgspec.structs.fields(Options)}


def variable_of(scheme: str, field: str) -> str:
    """The environment variable of an option."""
    return {**_GENERAL, **_OF_SCHEME.get(scheme, {})}[field]


def default_local_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """`DOWNLOADER_LOCAL_DIR`, or a directory of this user among the temporary files."""
    return Path(environment.get("DOWNLOADER_LOCAL_DIR") or private_folder() / "models")


def _of_text(field: str, variable: str, text: str) -> object:
    """The value of an environment variable."""
    if _TYPES[field] is bool:
        found = truth_of(text)
        if found is None:
            message = f"{variable}: expected 1 or 0, not {text!r}"
            raise InvalidArgumentError(message, variable)
        return found
    return _converted(field, variable, text)


def _converted(field: str, name: str, value: object) -> object:
    kind = _TYPES[field]
    if "tuple" in str(kind) and isinstance(value, str):
        value = tuple(item.strip() for item in value.split(",") if item.strip())
    if "int" in str(kind) and isinstance(value, str):
        if not value.isdecimal() or len(value) > _MAX_DIGITS:
            raise InvalidArgumentError(f"{name}={value!r:.100}: expected an integer", name)
        value = int(value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        given = "" if field in SECRETS else f"={value!r:.100}"
        message = f"{name}{given}: {str(error)[:1].lower()}{str(error)[1:]}"
        raise InvalidArgumentError(message, name) from None
