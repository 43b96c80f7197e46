"""Model URIs: `org/name`, `huggingface://`, `s3://`, `tos://`, `http(s)://`, `file://` and local paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.runtime.downloader.options import Options

__all__ = ["Source", "resolve"]


class Source(Protocol):
    """A model at a place from which it can be downloaded."""

    #: `huggingface`, `s3`, `tos`, `http` or `local`.
    kind: str
    #: Without credentials, for messages.
    uri: str
    #: The last part of the URI: the default name of the model's directory.
    model_name: str
    options: Options


def resolve(uri: str, options: Options) -> Source:
    """The source that `uri` names; nothing is sent yet. Raises `InvalidArgumentError`."""
    raise NotImplementedError
