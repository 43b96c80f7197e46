"""Run E of the measuring plan: bits of the kernels that are new, and races under compute-sanitizer."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import test_kernels_cuda_attention as attention
import test_kernels_cuda_gemm_quantised as quantised
from plan_rows import IS_EMULATED

from support.kernels import cuda
from support.kernels.quantised_matrix import Format

if TYPE_CHECKING:
    from plan_rows import Figures

#: Formats of quantised weights, the type of the rows, and the kernels that are new.
FORMATS = [
    (Format("code4", 32, "bf16", "stored"), "bf16"),
    (Format("code4", 32, "bf16", "stored"), "int8"),
    (Format("code8", 128, "bf16"), "int8"),
]
OLD = "gemm_middle"
#: Rows, outputs and columns.
SIZES = [(1, 512, 4096), (5, 272, 1096), (8, 64, 14336)]
TINY_SIZES = [(1, 32, 192), (3, 19, 136)]
WIDE_SIZE, TINY_WIDE_SIZE = (140, 150, 2048), (20, 40, 128)
#: Types of caches, and the lengths of sequences. Heads have 128 dimensions.
CACHES = ("bf16", "int8", "uint4")
LENGTHS = [(1030, 300), (129,), (64, 5)]
TINY_LENGTHS = [(40,)]
#: Sections that run under racecheck with tiny sizes, and the most seconds of each.
RACES, RACE_SECONDS = ("checks", "memory"), 40


def checks(figures: Figures, *, tiny: bool) -> None:
    """Compare new kernels with older ones, as in the tests."""
    kernels = cuda.host_kernels()
    for case in quantised_cases(tiny=tiny):
        check_quantised(figures, kernels, *case)
    for lengths in TINY_LENGTHS if tiny else LENGTHS:
        for kv in CACHES:
            check_attention(figures, kernels, kv, lengths)


def quantised_cases(*, tiny: bool) -> list[tuple[Format, str, tuple[int, int, int]]]:
    """The formats with each size."""
    sizes = [*(TINY_SIZES if tiny else SIZES), TINY_WIDE_SIZE if tiny else WIDE_SIZE]
    return [(format_, dtype, size) for size in sizes for format_, dtype in FORMATS]


def check_quantised(
    figures: Figures, kernels: cuda.HostKernels, format_: Format, dtype: str, size: tuple[int, int, int]
) -> None:
    """Compare the products by the kernels for a number of rows with an older one."""
    operands = quantised.random_operands(format_, *size, dtype)
    expected = operands.run(kernels, OLD)
    for kernel in quantised.kernels_of(format_, dtype):
        if kernel == OLD or (kernel in quantised.OF_FEW_ROWS) != (size[0] <= quantised.TILES["gemv"][1]):
            continue
        different = int(np.count_nonzero(operands.run(kernels, kernel) != expected))
        name = f"{format_}, {dtype} rows, {kernel} = {OLD}, {' x '.join(map(str, size))}"
        figures.figure(name, [different], "sums", f"of {expected.size}")


def check_attention(figures: Figures, kernels: cuda.HostKernels, kv: str, lengths: tuple[int, ...]) -> None:
    """Compare attention by each kernel with the older kernel of prompts."""
    case = attention.Case(kv=kv, head_dim=128, kv_heads=2, group=4, lengths=lengths)
    filled = attention.Filled(kernels, case)
    parts = attention.last_rows(case, 70)
    expected = filled.attend(parts, "prefill")
    for kernel in case.kernels:
        if kernel == "prefill":
            continue
        different = int(np.count_nonzero(filled.attend(parts, kernel) != expected))
        name = f"attention, {kv}, {kernel} = prefill, {' + '.join(map(str, lengths))}"
        figures.figure(name, [different], "numbers", f"of {expected.size}")


def racecheck(figures: Figures, *, tiny: bool) -> None:
    """Run sections with tiny sizes under compute-sanitizer; the number of hazards of each."""
    name = "compute-sanitizer"
    program = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if program is None or IS_EMULATED:
        figures.skipped("races", f"{name} is not installed" if program is None else "no device")
        return
    for section in RACES[: 1 if tiny else None]:
        with tempfile.TemporaryDirectory() as folder:
            own = [str(Path(__file__).parent / "plan.py"), "--section", section, "--out", folder, "--tiny"]
            command = [program, "--tool", "racecheck", sys.executable, *own]
            try:
                done = subprocess.run(  # noqa: S603 - this program
                    command, capture_output=True, text=True, timeout=RACE_SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                figures.skipped(section, f"it takes more than {RACE_SECONDS} s")
                continue
        found = re.search(r"RACECHECK SUMMARY: (\d+) hazards?", done.stdout)
        if found is None:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            figures.skipped(section, f"status {done.returncode}: {' '.join(last)}")
        else:
            figures.figure(section, [int(found[1])], "hazards")


def _kernels() -> list[str]:
    """The kernels that are compiled beforehand."""
    found = [f"rope_write_kv_{kv}" for kv in CACHES]
    for format_, dtype in FORMATS:
        found += [f"{kernel}_{format_.kernels(dtype)}" for kernel in quantised.kernels_of(format_, dtype)]
    return found


KERNELS = tuple(_kernels())
