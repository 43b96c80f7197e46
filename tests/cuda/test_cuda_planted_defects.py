"""Defects that are planted in an engine on the emulated device have findings or change the output."""

from __future__ import annotations

import pytest

from support.cuda import planted
from support.kernels.emulator import run_program

pytestmark = [pytest.mark.timeout(600), pytest.mark.needs("cuda", "proc")]


@pytest.mark.rare
def test_launch_without_a_block_changes_the_output() -> None:
    ended = run_program(planted.launches, checked=True)
    assert ended.findings == []
    found = ended.result
    assert found["clean"] == []
    assert len(found["launches"]) >= 15
    missed = [
        index for index, (findings, differs) in enumerate(found["launches"]) if not (findings or differs)
    ]
    assert missed == []
    ((findings, differs),) = found["copy"]
    assert findings or differs


@pytest.mark.rare
def test_event_that_is_not_recorded_changes_the_output() -> None:
    ended = run_program(planted.events, checked=True, EMU_DELAY_US="3000")
    found = ended.result
    assert found["clean"] == []
    # A step records two events: the use of its inputs, which waits for results include, and its results.
    differs = [differs for _, differs in found["events"]]
    assert differs == [False, True] * planted.PARAMS["max_tokens"]


@pytest.mark.rare
def test_region_that_is_free_too_early_is_a_finding() -> None:
    found = run_program(planted.regions, checked=True).result
    assert found["clean"] == []
    regions = [findings for findings, _ in found["regions"]]
    assert all("use after free" in finding for findings in regions for finding in findings)
    unused = [index for index, findings in enumerate(regions) if not findings]
    assert len(regions) > 20
    assert len(unused) == 2, (
        "the scratch of attention and of divided products, which a short float32 prompt lacks"
    )
