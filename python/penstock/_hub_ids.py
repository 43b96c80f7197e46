"""Ids of models on the Hugging Face hub. Imports nothing of the package: its servers use this module too."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["HubId", "parse_hub_id"]

_HUB_ID = re.compile(r"(?P<name>\w[\w.-]{0,95}/\w[\w.-]{0,95})(@(?P<revision>[\w./-]{1,255}))?", re.ASCII)


class HubId(NamedTuple):
    """`org/name`, or `org/name@revision`."""

    #: `org/name`.
    name: str
    revision: str | None


def parse_hub_id(text: str) -> HubId | None:
    """The parts of an id; None if the text is not one."""
    found = _HUB_ID.fullmatch(text)
    return None if found is None or ".." in text else HubId(found["name"], found["revision"])
