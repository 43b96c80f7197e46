"""The CUDA kernels access only their own memory, after it is written, and without races between threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from emu import build
from support.emulator import plants

FILES = [
    str(path)
    for path in sorted(Path(__file__).parent.glob("test_kernels_cuda_*.py"))
    if path.stem not in ("test_kernels_cuda_checked", "test_kernels_cuda_compile")
]


@pytest.mark.timeout(600)
def test_tests_of_kernels_pass_with_checked_kernels() -> None:
    build.build_kernels(instrumented=True)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(
        command, env=os.environ | {"PENSTOCK_CHECK_KERNELS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


SCRIPT = """
import sys
import numpy as np
from support.emulator import CheckedKernels
from support.cuda import addresses
from emu.scenarios import Vectors
from pathlib import Path

kernels = CheckedKernels(Path(sys.argv[1]))
x, y, total = np.ones(100, np.float32), np.ones(100, np.float32), np.zeros(100, np.float32)
kernels.launch("add_vectors", [1], 128, Vectors(*addresses(x, y, total)), 100)
assert (total == 2).all()
for name, arguments in {
    "saxpy": (1.0, x, y, 101),
    "sums_without_barrier": (x, y, 50),
    "divergent_barrier": (y,),
}.items():
    try:
        kernels.launch(name, [1], 128, *arguments)
    except RuntimeError as error:
        print(str(error).splitlines()[-1])
kernels.launch("saxpy", [1], 128, 1.0, x, y, 100)
"""


def test_checked_kernels_report_defects() -> None:
    command = [sys.executable, "-c", SCRIPT, str(plants(checked=True))]
    environment = os.environ | {
        "PYTHONPATH": f"{build.HERE.parent}:{build.ROOT / 'python'}",
        "PENSTOCK_CHECK_KERNELS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kinds = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert kinds == ["out of bounds", "race in shared memory", "kernel failed"]
