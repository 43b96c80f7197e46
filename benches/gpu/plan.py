"""Measures what the next steps of the CUDA backend depend on, within the minutes that a GPU is at hand.

    python benches/gpu/plan.py [--plan A,B2,C,D,E] [--minutes 8] [--tiny] [--emulated] [--out DIR]
    python benches/gpu/plan.py --prepare

Each run has sections, in processes of their own with limits of time:

- A: `bits`, whether tensor cores compute one chain for all tiles; `cublas`, whether cuBLASLt does; `memory`,
  rates of reads, latencies of products and costs of boundaries between kernels;
- B2: `attention`, every kernel with every type of cache, and its bits; `quantised`, products of 4-bit
  weights; `torch`, torch's attention;
- C: `bf16`, `int8-kv`, `int4`, steps of engines; `host`, a step that is hardly more than the host's work;
- D: `counters`, stall reasons and utilisation of single launches by ncu;
- E: `checks`, bits of the new kernels; `racecheck`, races under compute-sanitizer.

`plan.jsonl` in the folder `--out`, or `$OUT`, has a line for each figure, written at once. The last output is
a summary, also in `plan.txt`: what the figures decide, beside the predictions of `predictions.toml`.

`--prepare` compiles all kernels for sm_90a into `target/gpu/kernels`, for a machine with a GPU, which then
needs no compiler. `--tiny` has small shapes; `--emulated` runs on the device of the tests, where times mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import plan_kernels
from engine import VARIANTS
from plan_rows import IS_EMULATED, Figures, read
from plan_summary import summary
from sections import Section, emulate, fast_folder, run_sections, write_models
from shapes import EIGHT_BILLION, REPOSITORY, SMALL_LAYER, TINY

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The sections of each run, in the order of what they decide, and the most seconds of each.
RUNS = {
    "A": {"bits": 20, "cublas": 45, "memory": 45},
    "B2": {"attention": 60, "quantised": 20, "torch": 45},
    "C": {"bf16": 70, "int8-kv": 70, "int4": 100, "host": 20},
    "D": {"counters": 90},
    "E": {"checks": 40, "racecheck": 80},
}
#: The emulated device is slow.
EMULATED = 5
#: Sections that need a checkpoint, and the most seconds to wait for the process that writes them.
WITH_MODELS, MODEL_SECONDS = ("bf16", "int8-kv", "int4", "host"), 90
#: The shapes of dry runs have heads of 128 dimensions, as those of the measurements, for the same kernels.
TINY_SHAPE, TINY_LAYER = replace(TINY, head_dim=128), replace(TINY, head_dim=128, layers=1)


def run_section(name: str, out: Path, models: Path, device: str, *, tiny: bool) -> None:
    """Run a section in this process."""
    figures = Figures(out / "plan.jsonl", name, device)
    shape = TINY_SHAPE if tiny else EIGHT_BILLION
    if name == "models":
        write_models(models, {"model": shape, "layer": TINY_LAYER if tiny else SMALL_LAYER})
    elif name in {"bits", "memory"}:
        import plan_facts

        (plan_facts.bits if name == "bits" else plan_facts.memory)(figures, tiny=tiny)
    elif name == "cublas":
        import plan_cublas

        plan_cublas.cublas(figures, shape, tiny=tiny)
    elif name in {"attention", "torch"}:
        import plan_attention

        (plan_attention.attention if name == "attention" else plan_attention.torch)(figures, shape, tiny=tiny)
    elif name == "quantised":
        import plan_quantised

        plan_quantised.products(figures, shape, tiny=tiny)
    elif name in VARIANTS:
        import plan_steps

        plan_steps.steps(figures, name, shape, models / "model", tiny=tiny)
    elif name == "host":
        import plan_steps

        plan_steps.host(figures, TINY_LAYER if tiny else SMALL_LAYER, models / "layer", tiny=tiny)
    elif name in {"counters", "launches"}:
        import plan_counters

        if name == "counters":
            plan_counters.counters(figures, shape, out, tiny=tiny)
        else:
            plan_counters.launches(shape, tiny=tiny)
    else:
        os.environ["PENSTOCK_TEST_GPU"] = "1"  # the device of the driver, and not the host
        import plan_checks

        (plan_checks.checks if name == "checks" else plan_checks.racecheck)(figures, tiny=tiny)


def sections_of(command: list[str], plan: list[str], limits: dict[str, float]) -> Iterator[Section]:
    """The sections of runs. The models are written beside the first ones, which do not need them."""
    factor = EMULATED if IS_EMULATED else 1
    names = {name: factor * seconds for run in plan for name, seconds in RUNS[run].items()}
    names |= {name: seconds for name, seconds in limits.items() if name in names}
    writer = None
    if any(name in WITH_MODELS for name in names):
        writer = subprocess.Popen([*command, "models"])  # noqa: S603 - this program
    for name, seconds in names.items():
        if writer is not None and name in WITH_MODELS:
            try:
                writer.wait(MODEL_SECONDS)
            except subprocess.TimeoutExpired:
                writer.kill()
            writer = None
        yield Section(name, [*command, name], seconds)


def device_name() -> str:
    """The name of the first device, which has the instructions of the kernels and the probes."""
    info = penstock.cuda_info()
    if not info.devices:
        sys.exit(f"no device: {info.reason}")
    name, capability = info.devices[0].name, info.devices[0].compute_capability
    if capability != "9.0":
        sys.exit(f"{name}: compute capability {capability}; the plan is for 9.0, such as H100 and H200")
    return name


def head_of(device: str, new: int, seconds: float) -> list[str]:
    """The first lines of the summary."""
    about = plan_kernels.PREPARED / "about.json"
    made = f"NVRTC {json.loads(about.read_text())['nvrtc']}" if about.exists() else "not prepared"
    date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return [
        f"{date} UTC, {device}, Penstock {penstock.__version__}, `{shlex.join(['python', *sys.argv])}`",
        f"{seconds:.0f} s; kernels: {made}, {new} files compiled during the run",
    ]


def cubins() -> int:
    """The number of prepared files."""
    return len(list((plan_kernels.PREPARED / "cubins").glob("*.cubin")))


def main() -> None:
    """Run the sections, and print the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plan", default=",".join(RUNS), help="runs, separated by commas")
    parser.add_argument("--minutes", type=float, default=8, help="the limit of time")
    parser.add_argument("--limits", default="", help="seconds of sections: memory=20,int4=60")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--emulated", action="store_true", help="run on the emulated device of the tests")
    parser.add_argument("--prepare", action="store_true", help="compile the kernels, and measure nothing")
    parser.add_argument("--out", type=Path, help="the folder of the figures and the summary")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, default=Path(), help=argparse.SUPPRESS)
    parser.add_argument("--device", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.emulated:
        emulate(EMU_MEMORY=str(1 << 30))
    if options.prepare:
        plan_kernels.prepare(plan_kernels.PREPARED)
        return
    out = options.out or Path(os.environ.get("OUT") or REPOSITORY / "target" / "gpu" / "plan")
    if options.section:
        run_section(options.section, out, options.models, options.device, tiny=options.tiny)
        return
    plan = options.plan.split(",")
    if unknown := [run for run in plan if run not in RUNS]:
        parser.error(f"no run {', '.join(unknown)}; there are {', '.join(RUNS)}")
    pairs = (pair.partition("=") for pair in options.limits.split(",") if pair)
    limits = {name: float(seconds) for name, _, seconds in pairs}
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.jsonl").unlink(missing_ok=True)
    os.environ |= plan_kernels.environment(plan_kernels.PREPARED)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the section ends, too
    started, before, device = time.monotonic(), cubins(), device_name()
    with fast_folder() as models:
        command = [
            *(sys.executable, str(Path(__file__).absolute()), "--out", str(out), "--models", str(models)),
            *("--device", device, *["--tiny"] * options.tiny, "--section"),
        ]
        outcomes = run_sections(sections_of(command, plan, limits), options.minutes)
    head = head_of(device, cubins() - before, time.monotonic() - started)
    text = summary(head, outcomes, read(out / "plan.jsonl"))
    (out / "plan.txt").write_text(text + "\n")
    print("\n" + text)
    if any(outcome != "complete" for outcome in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
