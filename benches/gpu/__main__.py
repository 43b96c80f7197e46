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
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import cases_of
from engine import Load, Variant, measure_host
from engine import measure as measure_engine
from rows import Rows, costs, table
from shapes import EIGHT_BILLION, REPOSITORY, SMALL_LAYER, TINY, TINY_LAYER

import penstock

BF16_GOALS = {
    "second start-up to the first token": "<= 5 s",
    "decode, batch 1, context 1000": ">= 272 tok/s",
    "decode, batch 256, context 1000": ">= 17000 tok/s",
}
VARIANTS = {
    "bf16": Variant("bf16", {}, BF16_GOALS),
    "varying": Variant("bf16, deterministic=False", {"deterministic": False}, {}),
    "int8-kv": Variant("int8 KV", {}, {"decode, batch 256, context 1000": ">= 24000 tok/s"}, kv="int8"),
    "int4": Variant(
        "int4", {"quantization": "w4a16"}, {"decode, batch 1, context 1000": ">= 700 tok/s"}, bits=4.25
    ),
}
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
TINY_LOAD = Load((1, 2), context=20, decoded=12, prompt=40, prompts=2, requests=3, budget=32, seconds=60)
HOST_LOAD = Load((256,), context=16, decoded=512, prompt=16, requests=0)


def write_models(folder: Path, names: list[str], *, tiny: bool) -> None:
    """Write the checkpoints that sections need."""
    start = time.perf_counter()
    if set(names) & set(VARIANTS):
        (TINY if tiny else EIGHT_BILLION).write(folder / "model")
    if "host" in names:
        (TINY_LAYER if tiny else SMALL_LAYER).write(folder / "layer")
    print(f"wrote the models in {time.perf_counter() - start:.0f} s", flush=True)


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


def run_sections(names: list[str], folder: Path, minutes: float, *, tiny: bool) -> dict[str, str]:
    """Run sections as processes; the outcome of each."""
    deadline = time.monotonic() + 60 * minutes
    outcomes = {}
    for name in names:
        seconds = min(SECTIONS[name], deadline - time.monotonic())
        if seconds <= 0:
            outcomes[name] = "not started: no time was left"
            continue
        print(f"{name}:", flush=True)
        command = [sys.executable, __file__, "--section", name, "--folder", str(folder), *(["--tiny"] * tiny)]
        start = time.monotonic()
        try:
            done = subprocess.run(command, timeout=seconds, check=False)  # noqa: S603 - this program
            outcomes[name] = "complete" if done.returncode == 0 else f"failed with status {done.returncode}"
        except subprocess.TimeoutExpired:
            outcomes[name] = f"stopped after {seconds:.0f} s"
        print(f"  {outcomes[name]}, {time.monotonic() - start:.0f} s", flush=True)
    return outcomes


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


def emulate() -> None:
    """Start this program again with the emulated driver."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from support.kernels import emulator

    arguments = [argument for argument in sys.argv if argument != "--emulated"]
    os.execve(sys.executable, [sys.executable, *arguments], os.environ | emulator.emulation())  # noqa: S606


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
    fast = Path("/dev/shm")  # noqa: S108 - if there is room for the model
    room = fast.is_dir() and shutil.disk_usage(fast).free > 40 << 30
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=fast if room else None) as name:
        folder = Path(name)
        write_models(folder, names, tiny=options.tiny)
        minutes = options.minutes - (time.monotonic() - started) / 60
        outcomes = run_sections(names, folder, minutes, tiny=options.tiny)
        print("\n" + record(folder, target, outcomes))
    if any(outcome != "complete" for outcome in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
