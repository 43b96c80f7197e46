"""Shares: parts of the rare tests, of which each gate runs one.

A unit of rare tests is a file, a function of a file whose rare tests take long, or a target of the Makefile.
`tests/data/seconds.json` has the seconds of units, as `make gate-record` writes them. Units of known length
are divided so that no share is long; others go to a share by the hash of their name.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache

from support.paths import DATA

NUM_SHARES = 16
#: The limit of a share, in seconds.
SHARE_SECONDS = 7 * 60
RECORD = DATA / "seconds.json"


@cache
def recorded(kind: str) -> dict[str, float]:
    """Recorded seconds: of each gate's tests by file (`own`), of rare tests (`rare`), or of `targets`."""
    seconds: dict[str, float] = json.loads(RECORD.read_text())[kind]
    return seconds


def divide(units: dict[str, float]) -> dict[str, int]:
    """The share of each unit: the longest unit goes first, each to the share with the fewest seconds."""
    loads = [0.0] * NUM_SHARES
    shares = {}
    for unit, seconds in sorted(units.items(), key=lambda item: (-item[1], item[0])):
        share = loads.index(min(loads))
        loads[share] += seconds
        shares[unit] = share
    return shares


@cache
def division() -> dict[str, int]:
    """The share of each unit of known length."""
    return divide(recorded("rare") | recorded("targets"))


def targets_of(share: int) -> list[str]:
    """The targets of the Makefile that are units of a share."""
    return [target for target in recorded("targets") if division()[target] == share]


def unit_of(file: str, function: str) -> str:
    """The unit of a rare test, by its file relative to `tests` and the name of its function."""
    unit = f"{file}::{function}"
    return unit if unit in recorded("rare") else file


def share_of(unit: str) -> int:
    """The share of a unit."""
    known = division().get(unit)
    return int(hashlib.sha256(unit.encode()).hexdigest(), 16) % NUM_SHARES if known is None else known
