"""Run C of the measuring plan: steps of engines, with statistics that are read once in a window."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine import HOST_LOAD, INTERVAL, TINY_LOAD, VARIANTS, Load, Measured, Variant

if TYPE_CHECKING:
    from pathlib import Path

    from plan_rows import Figures
    from shapes import Shape

#: The batches, those that decide first. The time of prompts of 256 sequences is much of a section's.
BATCHES = {"bf16": (1, 256, 64, 8), "int8-kv": (256, 1, 64, 8), "int4": (1, 8, 64, 256)}
#: Batches that are measured again with statistics that are read every 5 ms.
POLLED = {"bf16": (1, 64)}
#: Tokens of a sequence, where they are not the usual number: steps of large batches are long.
DECODED = {1: 512, 256: 128}
#: Seconds of a window of small batches, and of others.
FEW, SHORT, LONG = 8, 0.1, 0.25


def steps(figures: Figures, name: str, shape: Shape, model: Path, *, tiny: bool) -> None:
    """Measure the start, the steps of batches and the prompt of an engine."""
    load = TINY_LOAD if tiny else Load(BATCHES[name], prompts=5, requests=0, seconds=45)
    measured = Measured(shape, model, VARIANTS[name], load, figures)
    with measured.engine:
        first, *others = load.batches
        window(measured, first, tiny=tiny)
        measured.prefill()
        for batch in others:
            window(measured, batch, tiny=tiny)
        for batch in POLLED.get(name, ())[: 1 if tiny else None]:
            row = f"decode, batch {batch}, polled"
            window(measured, batch, row, tiny=tiny)
            plain = figures.medians.get(f"decode, batch {batch}, context {load.context}")
            if plain and row in figures.medians:
                cost = plain / figures.medians[row]
                figures.figure(f"decode, batch {batch}, cost of the poll", [cost], "x")


def window(measured: Measured, batch: int, row: str = "", *, tiny: bool) -> None:
    """Measure the steps of a batch. Statistics are read once in a window; with a name, every 5 ms."""
    measured.interval = INTERVAL if tiny or row else SHORT if batch <= FEW else LONG
    usual = measured.load
    if not tiny:
        measured.load = replace(usual, decoded=DECODED.get(batch, usual.decoded))
    measured.decode(batch, row)
    measured.load = usual


def host(figures: Figures, shape: Shape, model: Path, *, tiny: bool) -> None:
    """Measure a step of a model of one small layer, with and without frequent looks at the statistics."""
    load = TINY_LOAD if tiny else replace(HOST_LOAD, decoded=1024)
    measured = Measured(shape, model, Variant("one small layer", {}, {}), load, figures)
    batch = max(load.batches)
    with measured.engine:
        for interval, text in ((INTERVAL if tiny else 0.05, ""), (INTERVAL, ", polled")):
            measured.interval = interval
            times, _ = measured.steps(batch)
            if times:
                measured.add(f"step of batch {batch}{text}", times)
