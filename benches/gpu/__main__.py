"""Measures Penstock on a GPU beside the limits of the device and torch: `make gpu-bench`.

    python benches/gpu [--minutes 9] [--only SECTION,..] [--tiny] [--emulated] [--record DIR]

The sections, each in a process of its own with a limit of time:

- `torch`: copies and products for the limits, and the operations of a step by torch;
- `kernels`: the kernels of products and attention, one by one;
- `bf16`, `varying`, `int8-kv`, `int4`: an engine with random weights of the shape of Llama 3 8B: start-up,
  decode of batches, prefill, throughput; `varying` has deterministic=False;
- `host`: the step of a model of one small layer, hardly more than the work of the host.

Writes `gpu-DATE.json` and `gpu-DATE.md` to `benches/record`, or to `$OUT`. `--tiny` has small shapes;
`--emulated` runs on the device of the tests, where the times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import cases_of
from engine import HOST_LOAD, TINY_LOAD, VARIANTS, Load, measure_host
from engine import measure as measure_engine
from rows import Rows, costs, table
from sections import Section, emulate, fast_folder, run_sections, write_models
from shapes import EIGHT_BILLION, REPOSITORY, SMALL_LAYER, TINY, TINY_LAYER, Shape

import penstock

#: The sections, and the most seconds of each.
SECTIONS = {
    "torch": 75,
    "kernels": 90,
    "bf16": 180,
    "varying": 80,
    "int8-kv": 120,
    "int4": 120,
    "host": 40,
}
#: Loads that are not the default. Products of few rows are the same with deterministic=False.
LOADS = {"varying": Load((64, 256), requests=0, starts=1), "int4": Load(requests=0)}


def models_of(names: list[str], *, tiny: bool) -> dict[str, Shape]:
    """The models that sections need."""
    found = {}
    if set(names) & set(VARIANTS):
        found["model"] = TINY if tiny else EIGHT_BILLION
    if "host" in names:
        found["layer"] = TINY_LAYER if tiny else SMALL_LAYER
    return found


def run_section(name: str, folder: Path, *, tiny: bool) -> None:
    """Measure a section in this process."""
    rows = Rows(folder / f"{name}.jsonl")
    shape = TINY if tiny else EIGHT_BILLION
    if name in {"torch", "kernels"}:
        arguments = ([1, 9], [40], 72, 0) if tiny else ([1, 8, 16, 64, 256], [1024, 4096], 8192)
        cases = cases_of(shape, *arguments)
        if name == "torch":
            import torch_limits

            torch_limits.measure(cases, rows, folder / "limits.json")
        else:
            import kernels

            kernels.measure(cases, rows)
    elif name == "host":
        layer, load = (TINY_LAYER, TINY_LOAD) if tiny else (SMALL_LAYER, HOST_LOAD)
        measure_host(layer, folder / "layer", load, rows)
    else:
        variant = VARIANTS[name]
        load = TINY_LOAD if tiny else LOADS.get(name, Load())
        measure_engine(shape, folder / "model", variant, load, rows)


def describe(outcomes: dict[str, str]) -> dict[str, Any]:
    """The time, the command, the machine and the versions."""
    info = penstock.cuda_info()
    version = Path("/proc/driver/nvidia/version")
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "penstock": penstock.__version__,
        "driver": version.read_text().partition("\n")[0] if version.exists() else None,
        "cuda": info.to_dict(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "sections": outcomes,
    }


def record(folder: Path, target: Path, outcomes: dict[str, str]) -> str:
    """Write the record of all sections; its table."""
    path = folder / "limits.json"
    limits = json.loads(path.read_text()) if path.exists() else {}
    found = {name: Rows(folder / f"{name}.jsonl").read() for name in SECTIONS}
    about = describe(outcomes)
    date = about["date"][:10]
    target.mkdir(parents=True, exist_ok=True)
    content = about | {
        "limits": limits,
        "rows": {n: [asdict(r) for r in rows] for n, rows in found.items() if rows},
    }
    (target / f"gpu-{date}.json").write_text(json.dumps(content, indent=1) + "\n")
    torch = {row.name: row for row in found["torch"]}
    text = "\n".join(
        [
            f"{about['date']}, `{about['command']}`, Penstock {about['penstock']}",
            f"Driver: {about['driver']}",
            f"Device: {about['cuda']}",
            f"Limits: {limits or 'not measured'}",
            f"Sections: {outcomes}",
            "",
            table([row for name, rows in found.items() if name != "torch" for row in rows], limits, torch),
            "",
            *costs(found["bf16"], found["varying"]),
            "",
        ]
    )
    (target / f"gpu-{date}.md").write_text(text)
    return text


def main() -> None:
    """Write the models, run the sections, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9, help="the limit of time")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--emulated", action="store_true", help="run on the emulated device of the tests")
    parser.add_argument("--record", type=Path, help="the folder of the record")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.emulated:
        emulate()
    if options.section:
        run_section(options.section, options.folder, tiny=options.tiny)
        return
    names = [name for name in SECTIONS if name in options.only.split(",")]
    target = options.record or Path(os.environ.get("OUT") or REPOSITORY / "benches" / "record")
    started = time.monotonic()
    with fast_folder() as folder:
        write_models(folder, models_of(names, tiny=options.tiny))
        minutes = options.minutes - (time.monotonic() - started) / 60
        command = [sys.executable, __file__, "--folder", str(folder), *["--tiny"] * options.tiny, "--section"]
        sections = [Section(name, [*command, name], SECTIONS[name]) for name in names]
        outcomes = run_sections(sections, minutes)
        print("\n" + record(folder, target, outcomes))
    if any(outcome != "complete" for outcome in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
