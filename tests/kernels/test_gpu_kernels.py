"""The tests of kernels through the driver, as on a GPU: here, the driver is the emulated one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from support.kernels import emulator
from support.kernels.gpu import variant_of
from support.paths import ROOT, TESTS
from support.tools import tool

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels


def on_the_driver(tmp_path: Path, *command: str) -> str:
    """The output of Python, which launches kernels on the device of the system's driver."""
    report = tmp_path / "report"
    settings = emulator.emulation() | {
        "EMU_FINDINGS": str(report),
        "PENSTOCK_TEST_GPU": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert emulator.END in report.read_text(), "the driver was not used"
    return done.stdout


@pytest.mark.needs("cuda")
@pytest.mark.rare
def test_tests_of_kernels_run_through_the_driver(tmp_path: Path) -> None:
    tests = [str(TESTS / "kernels" / f"test_kernels_cuda_{name}.py") for name in ("gemm", "kv", "rows")]
    chosen = "bits_do_not_depend_on_the_batch or gather or only_the_bytes"
    output = on_the_driver(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", chosen)
    assert " passed, " in output


#: The address is in the range of the emulated device, 4 GiB behind the array.
FAILING = """
import numpy as np
from support.kernels import cuda

kernels = cuda.host_kernels()
x, out = np.arange(8, dtype=np.uint32), np.zeros(4, np.uint32)
try:
    kernels.launch("gather_rows", [1], 256, x, np.array([1 << 28], np.uint32), out, 4)
except RuntimeError as error:
    assert "gather_rows: cuStreamSynchronize returned 700" in str(error), error
else:
    raise AssertionError("no error")
kernels.launch("gather_rows", [1], 256, x, np.array([1], np.uint32), out, 4)
assert out.tolist() == [4, 5, 6, 7]
assert "gather_rows" in kernels and "gather_columns" not in kernels
"""


@pytest.mark.needs("cuda")
def test_kernels_run_after_an_error_of_the_device(tmp_path: Path) -> None:
    on_the_driver(tmp_path, "-c", FAILING)


def test_variants_of_kernels_by_their_names() -> None:
    def definition(name: str) -> list[str]:
        variant = variant_of(name)
        assert variant is not None
        return [variant[0].name, *variant[1]]

    assert definition("attention_decode_bf16_uint4_64") == ["attention.cu", "VARIANT=bf16,u4,uint4,64"]
    name = "attention_prefill_warpgroup_f16_int8_128"
    assert definition(name) == ["attention_warpgroup.cu", "VARIANT=f16,int8,128"]
    assert definition("gemm_narrow_e4m3_32_scale16_centred_bf16") == [
        "gemm_quantised.cu",
        "VARIANT=e4m3,32,scale16,centred,bf16",
    ]
    assert definition("gemm_warpgroup_wide_code4_32_nested_affine_int8") == [
        "gemm_quantised_warpgroup.cu",
        "VARIANT=code4,32,nested,affine,int8",
    ]
    assert definition("embed_code4_32_nested_affine_int8") == [
        "gemm_quantised.cu",
        "VARIANT=code4,32,nested,affine,int8",
    ]
    assert variant_of("attention_decode_f32_bf16") is None
    assert variant_of("gemv_bf16") is None


def test_parts_of_the_gpu_test_run(tmp_path: Path) -> None:
    program = str(ROOT / "tools" / "gpu_test.py")
    command = [sys.executable, program, "--emulated", "--only", "info,kernels rows", "-k", "gather"]
    done = subprocess.run(
        command, env=os.environ | {"OUT": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels rows" in done.stdout
    assert " passed, " in done.stdout
    assert "Emulated" in (tmp_path / "gpu-test.txt").read_text()


@pytest.mark.parametrize(
    ("line", "outcomes"),
    [("1 passed, 2 skipped", ["passed"] * 2), ("3 skipped", ["no tests", "failed"])],
)
def test_part_of_the_gpu_test_that_skips_all_is_no_success(
    tmp_path: Path, line: str, outcomes: list[str]
) -> None:
    gpu_test = tool("gpu_test")
    command = [sys.executable, "-c", f"print('{line} in 0.1s')"]
    parts = [gpu_test.Part("part", command, 60, needs_tests) for needs_tests in (False, True)]
    assert [gpu_test.run(part, time.monotonic() + 60, tmp_path).outcome for part in parts] == outcomes


def benchmark(tmp_path: Path, sections: str) -> dict[str, list[str]]:
    """The names of the rows of a benchmark with small shapes on the emulated device."""
    program = str(ROOT / "benches" / "gpu")
    command = [sys.executable, program, "--emulated", "--tiny", "--only", sections, "--record"]
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = tmp_path.glob("gpu-*.json")
    rows = json.loads(record.read_text())["rows"]
    assert all(second > 0 for found in rows.values() for row in found for second in row["seconds"])
    return {name: [row["name"] for row in found] for name, found in rows.items()}


@pytest.mark.rare
def test_benchmark_of_kernels_runs(tmp_path: Path) -> None:
    names = benchmark(tmp_path, "kernels")["kernels"]
    assert "qkv, 9 rows" in names
    assert "int4 gate_up, 9 rows" in names
    assert "fp8 down, 72 rows" in names
    assert "decode attention, uint4, 9 x 40" in names


@pytest.mark.rare
def test_benchmark_of_engines_runs(tmp_path: Path) -> None:
    names = benchmark(tmp_path, "bf16,varying,int8-kv,host")
    assert names["varying"][2] == "bf16, deterministic=False: decode, batch 2, context 20"
    assert (
        "- deterministic=True, decode, batch 2, context 20: " in next(tmp_path.glob("gpu-*.md")).read_text()
    )
    assert names["int8-kv"] == [
        "int8 KV: start-up to the first token",
        "int8 KV: decode, batch 1, context 20",
        "int8 KV: decode, batch 2, context 20",
        "int8 KV: prefill of 40",
        "int8 KV: throughput 20/20",
        "int8 KV: second start-up to the first token",
    ]
    assert names["host"][-1] == "one small layer: step of batch 2"
