"""The CUDA kernels access only their own memory, after it is written, and without races between threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from emu import build
from support.kernels.cuda import CHECKED_FILES, SLOWLY_CHECKED_FILES
from support.kernels.emulator import plants
from support.marks import rare_except
from support.paths import TESTS

pytestmark = pytest.mark.timeout(900)  # the first test builds the kernels

#: pytest, which the kernel ends together with its parent.
PYTEST = """
import ctypes, signal, sys
import pytest

assert ctypes.CDLL(None).prctl(1, signal.SIGKILL) == 0
sys.exit(pytest.main(sys.argv[1:]))
"""


def run_tests(*files: str) -> None:
    """Run tests with checked kernels in a process of their own."""
    command = [sys.executable, "-c", PYTEST, "-q", "-x", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"PENSTOCK_CHECK_KERNELS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.needs("proc", "signals")
@pytest.mark.parametrize(
    "name", rare_except(CHECKED_FILES, *(set(CHECKED_FILES) - set(SLOWLY_CHECKED_FILES)))
)
def test_tests_of_kernels_pass_with_checked_kernels(name: str) -> None:
    build.build_kernels(instrumented=True)
    run_tests(str(TESTS / "kernels" / f"{name}.py"))


HANGING = """
import os, signal
from pathlib import Path

def test_that_hangs():
    pipe = os.open(Path(__file__).with_name("pipe"), os.O_WRONLY)
    os.write(pipe, b"1")
    signal.pause()
"""


@pytest.mark.needs("named_pipes")
@pytest.mark.timeout(120)
def test_run_of_tests_ends_with_its_parent(tmp_path: Path) -> None:
    hanging = tmp_path / "test_hanging.py"
    hanging.write_text(HANGING)
    os.mkfifo(tmp_path / "pipe")
    code = "import sys, test_kernels_cuda_checked as tests; tests.run_tests(sys.argv[1])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        subprocess.Popen([sys.executable, "-c", code, str(hanging)], env=environment) as parent,
        (tmp_path / "pipe").open("rb", buffering=0) as pipe,
    ):
        assert pipe.read(1) == b"1"
        parent.kill()
        assert pipe.read(1) == b""  # the only writer has ended


def test_files_that_build_kernels_have_a_longer_limit() -> None:
    imports = re.compile(
        r"^from (emu\b|support\.kernels(\.(cuda|emulator)\b| import .*\b(cuda|emulator)\b))", re.MULTILINE
    )
    limit = re.compile(r"^pytestmark = \[?pytest\.mark\.timeout\((\d+)\)", re.MULTILINE)
    texts = {path.name: path.read_text() for path in TESTS.glob("*/test_*.py")}
    limits = {name: limit.findall(text) for name, text in texts.items() if imports.search(text)}
    assert Path(__file__).name in limits
    assert {name for name, found in limits.items() if [int(value) for value in found] < [600]} == set()


SCRIPT = """
import sys
import numpy as np
from support.kernels.emulator import CheckedKernels
from support.kernels.cuda import addresses
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
