"""Names of models on the Hugging Face hub. Imports nothing of the package, for its servers."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["HubId", "HubModel", "parse_hub_id", "parse_hub_model"]

_NAME = r"(?P<name>\w[\w.-]{0,95}/\w[\w.-]{0,95})"
_REVISION = r"(@(?P<revision>[\w./-]{1,255}))?"
_HUB_ID = re.compile(_NAME + _REVISION, re.ASCII)
_HUB_MODEL = re.compile(
    _NAME + r"(/(?P<file>[\w. /+-]{1,255}\.(?i:gguf)))?" + _REVISION + r"(:(?P<quantization>[\w.-]{1,64}))?",
    re.ASCII,
)


class HubId(NamedTuple):
    """`org/name`, or `org/name@revision`."""

    #: `org/name`.
    name: str
    revision: str | None


class HubModel(NamedTuple):
    """A model of a repository: `org/name`, `org/name:quantization` or `org/name/file.gguf`.

    Each can have a revision: `org/name@revision:quantization`, `org/name/file.gguf@revision`.
    """

    #: `org/name`.
    name: str
    revision: str | None
    #: The end of the name of a GGUF file in any case, such as `Q4_K_M`.
    quantization: str | None
    #: The path of a GGUF file in the repository.
    file: str | None


def parse_hub_id(text: str) -> HubId | None:
    """The parts of an id; None if the text is not one."""
    found = _HUB_ID.fullmatch(text)
    return None if found is None or ".." in text else HubId(found["name"], found["revision"])


def parse_hub_model(text: str) -> HubModel | None:
    """The parts of the name of a model; None if the text is not one."""
    found = _HUB_MODEL.fullmatch(text)
    if found is None or ".." in text or (found["file"] and found["quantization"]):
        return None
    return HubModel(**found.groupdict())
