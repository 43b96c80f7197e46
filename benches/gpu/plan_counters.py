"""Run D of the measuring plan: hardware counters of single launches by Nsight Compute (ncu)."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import test_kernels_cuda_gemm as gemm
from cases import Attention, Product, QuantisedProduct
from plan_bench import PlanBench

from kernels import AttentionOperands, kernels_of, quantised_candidates

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plan_rows import Figures
    from shapes import Shape

    from kernels import Launch

#: The sections that ncu collects: a third of the passes of the whole set, without sources and rooflines.
SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats"),
    *("WarpStateStats", "Occupancy", "LaunchStats"),
)
#: The figures, in per cent of the peak: patterns of the counter, of which the first that exists is taken.
FIGURES = {
    "tensor cores": (
        r"sm__pipe_tensor_cycles_active.*pct_of_peak_sustained_active",
        r"sm__inst_executed_pipe_tensor.*pct_of_peak_sustained_active",
    ),
    "issue slots": (
        r"sm__inst_issued\.avg\.pct_of_peak_sustained_active",
        r"smsp__issue_active\.avg\.pct_of_peak_sustained_active",
        r"smsp__issue_active\.avg\.per_cycle_active",
    ),
    "memory": (
        r"gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed",
        r"dram__throughput\.avg\.pct_of_peak_sustained_elapsed",
    ),
    "second-level cache": (r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",),
    "shared memory and first-level cache": (
        r"l1tex__throughput\.avg\.pct_of_peak_sustained_(active|elapsed)",
    ),
}
STALL = re.compile(r"average_warps?(?:_latency)?_issue_stalled_(\w+?)(?:_per_issue_active)?\.(?:ratio|pct)")
TIME = "gpu__time_duration.sum"
#: Nanoseconds of the units of ncu, in their longer and shorter forms.
NANOSECONDS = {"nsecond": 1, "ns": 1, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9}
#: Reasons of stalls that are printed.
REASONS = 4

Counters = dict[str, float]


def cases(shape: Shape, *, tiny: bool) -> list[Product | Attention]:
    """The launches."""
    products = {name: (outputs, inner) for name, outputs, inner in shape.products}
    heads = shape.heads, shape.kv_heads, shape.head_dim
    wide = products["gate_up"]
    rows, prompt, sequences, context = (9, 72, 2, 300) if tiny else (256, 8192, 256, 1024)
    return [
        Product(f"product, {rows} rows", rows, *wide, 0),
        Product(f"product, {prompt} rows", prompt, *wide, 0),
        Attention("prefill, bfloat16", "bfloat16", 1, prompt, *heads, True, 0),  # noqa: FBT003
        Attention("prefill, int8", "int8", 1, prompt, *heads, True, 0),  # noqa: FBT003
        Attention("decode, int8", "int8", sequences, context, *heads, turn=0),
        QuantisedProduct("gemv, int4", 1, *wide, 0, "w4a16"),
    ]


def launch_of(bench: PlanBench, case: Product | Attention) -> Launch:
    """The launch of a case by the kernel of sm_90a that the engine takes."""
    if isinstance(case, QuantisedProduct):
        return quantised_candidates(bench, case)[0][0][0]
    if isinstance(case, Product):
        bench.reset_output(4 * case.rows * case.outputs)
        name, shape = kernels_of(bench, case)[-1]
        call = gemm.Product(
            x=bench.random(2 * case.rows * case.inner),
            w=bench.random(2 * case.outputs * case.inner),
            out=bench.output_buffer,
            rows=case.rows,
            outputs=case.outputs,
            inner=case.inner,
            pitch=case.outputs,
        )
        return f"{name}_bf16", shape, call
    operands = AttentionOperands(bench, case)
    kernel = operands.kernels[-1 if case.is_prefill else 0]
    return operands.launches(kernel, operands.copies[0])[0]


def launches(shape: Shape, *, tiny: bool) -> None:
    """Launch each case once: what ncu measures."""
    bench = PlanBench()
    for case in cases(shape, tiny=tiny):
        name, grid, call = launch_of(bench, case)
        bench.run(name, grid, call)
        print(f"  {case.name}: {name}", flush=True)
        bench.release()


def read(lines: Iterable[str]) -> list[Counters]:
    """The counters of each launch in ncu's CSV, which has a row for a launch, or for each counter."""
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    heads = [i for i, row in enumerate(rows) if row[:1] == ["ID"]]
    if not heads:
        return []
    head, *rest = rows[heads[0] :]
    found: dict[str, Counters] = {}
    if "Metric Name" in head:
        places = [head.index(name) for name in ("Metric Name", "Metric Unit", "Metric Value")]
        for row in rest:
            name, unit, value = (row[place] for place in places)
            add(found.setdefault(row[0], {}), name, unit, value)
        return list(found.values())
    units, *rest = rest
    for row in rest:
        for name, unit, value in zip(head[1:], units[1:], row[1:], strict=False):
            add(found.setdefault(row[0], {}), name, unit, value)
    return list(found.values())


def add(counters: Counters, name: str, unit: str, value: str) -> None:
    """Keep a counter that is a number; times in nanoseconds."""
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        return
    counters[name] = number * NANOSECONDS.get(unit, 1) if name == TIME else number


def figures_of(counters: Counters) -> Counters:
    """The figures of a launch, in per cent."""
    found = {}
    for name, patterns in FIGURES.items():
        for pattern in patterns:
            values = [value for counter, value in counters.items() if re.fullmatch(pattern, counter)]
            if values:
                found[name] = max(values) * (100 if pattern.endswith("per_cycle_active") else 1)
                break
    return found


def stalls_of(counters: Counters) -> str:
    """The most frequent reasons of stalls, as cycles of a warp between two instructions."""
    found: Counters = {}
    for name, value in counters.items():
        match = STALL.search(name)
        if match and "not_issued" not in name:
            found[match[1]] = max(found.get(match[1], 0), value)
    reasons = sorted(found, key=lambda reason: -found[reason])[:REASONS]
    return ", ".join(f"{reason} {found[reason]:.2f}" for reason in reasons)


def counters(figures: Figures, shape: Shape, folder: Path, *, tiny: bool) -> None:
    """Run ncu, and append the figures of each launch with its reasons of stalls."""
    program = shutil.which("ncu") or shutil.which(
        "ncu", path="/usr/local/cuda/bin:/opt/nvidia/nsight-compute"
    )
    if program is None:
        figures.skipped("all launches", "ncu is not installed")
        return
    table = folder / "counters.csv"
    own = [sys.executable, str(Path(__file__).parent / "plan.py"), "--section", "launches"]
    command = [
        *(program, "--clock-control", "none", "--csv", "--page", "raw", "--log-file", str(table)),
        *(word for section in SECTIONS for word in ("--section", section)),
        *("--kernel-name", "regex:^(gemm|gemv|attention)_", "--target-processes", "all"),
        *(*own, "--out", str(folder), *["--tiny"] * tiny),
    ]
    status = subprocess.run(command, check=False).returncode  # noqa: S603 - this program under ncu
    lines = table.read_text(errors="replace").splitlines() if table.exists() else []
    found = read(lines)
    if not found:
        reason = next((line for line in lines if "ERROR" in line), "the log has no launches")
        figures.skipped("all launches", f"ncu ended with status {status}: {reason}")
        return
    for case, values in zip(cases(shape, tiny=tiny), found, strict=False):
        append(figures, case.name, values)


def append(figures: Figures, name: str, values: Counters) -> None:
    """Append the figures of a launch."""
    note = f"stalls: {stalls_of(values)}"
    if TIME in values:
        figures.figure(f"{name}: time", [values[TIME] / 1e3], "us", note)
    for figure, value in figures_of(values).items():
        figures.figure(f"{name}: {figure}", [value], "%", details=values if figure == "issue slots" else None)


#: The kernels that are compiled beforehand, besides those of `plan_attention` and `plan_quantised`.
KERNELS = tuple(f"{name}_bf16" for name in gemm.STAGES)
