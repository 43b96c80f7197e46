"""Programs with planted defects of an engine on the emulated device, such as a launch with a block less."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import penstock
from support.api.engines import PROMPT
from support.cuda.failures import Failing, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Steps for a prompt and three tokens; no step is the fourth of its shape, which would become a graph.
PARAMS: dict[str, Any] = {
    "max_tokens": 4,
    "temperature": 0.0,
    "logprobs": True,
    "top_logprobs": 2,
    "ignore_eos": True,
}
LAUNCH, COPY, RECORD = "cuLaunchKernelEx", "cuMemcpyHtoDAsync_v2", "cuEventRecord"
REGION = "emuRegion"


class Planted:
    """Engines of a driver with a defect."""

    def __init__(self, folder: str) -> None:
        self.failing = Failing(folder)
        self.expected, self.findings = self.run()

    def run(self, call: str = "", nth: int = 0) -> tuple[list[Any], list[str]]:
        """The output with its log probabilities, or the error; and the findings.

        The plant is the nth call of a request, or of the start for a region of the arena.
        """
        driver = self.failing.driver
        self.failing.clear()
        if call == REGION:
            driver.plant(call, nth)
        with self.failing.open() as engine:
            engine.blocking.start()
            if call != REGION:
                self.failing.clear()
                driver.plant(call, nth)
            try:
                result = engine.blocking.generate(PROMPT, **PARAMS)
                output: list[Any] = [result.token_ids, str(result.logprobs)]
            except penstock.PenstockError as error:
                output = describe(error)
            self.counts = {name: driver.library.emuCount(name.encode()) for name in (LAUNCH, COPY, RECORD)}
        return output, self.failing.clear()[:3]

    def plant(self, call: str, calls: Sequence[int]) -> list[Any]:
        """Plants a defect in one call at a time: the findings of each, and whether the output differs."""
        found = []
        for nth in calls:
            output, findings = self.run(call, nth)
            found.append([findings, output != self.expected])
        return found


def launches() -> dict[str, Any]:
    """A block less in each launch of the second step, and half of the first copy."""
    with tempfile.TemporaryDirectory() as folder:
        planted = Planted(folder)
        count = planted.counts[LAUNCH]
        step = count // PARAMS["max_tokens"]
        # The first launch is that of the admission.
        return {
            "clean": planted.findings,
            "launches": planted.plant(LAUNCH, range(step + 2, 2 * step + 2)),
            "copy": planted.plant(COPY, [1]),
        }


def events() -> dict[str, Any]:
    """An event that is not recorded, each in turn."""
    with tempfile.TemporaryDirectory() as folder:
        planted = Planted(folder)
        count = planted.counts[RECORD]
        return {"clean": planted.findings, "events": planted.plant(RECORD, range(1, count + 1))}


def regions() -> dict[str, Any]:
    """A region of the arena that is free while the engine uses it, each in turn."""
    with tempfile.TemporaryDirectory() as folder:
        planted = Planted(folder)
        driver = planted.failing.driver
        planted.failing.clear()
        with planted.failing.open() as engine:
            engine.blocking.start()
            count = driver.library.emuCount(REGION.encode())
        return {"clean": planted.findings, "regions": planted.plant(REGION, range(1, count + 1))}
