"""Parameters of tests, and which of them are rare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _pytest.mark.structures import ParameterSet

#: The event loop of tests that are not about event loops.
ASYNCIO = ("asyncio", {"use_uvloop": False})


def rare_except(values: Iterable[Any], *kept: object) -> list[ParameterSet]:
    """Parameters of a test, which are rare except the kept ones; each gate runs those."""
    parameters = [pytest.param(value, marks=[] if value in kept else pytest.mark.rare) for value in values]
    assert sum(not parameter.marks for parameter in parameters) == len(kept), "a kept value is missing"
    return parameters
