"""Contexts, memory, streams, events, modules and launches, through cudarc on the emulated driver."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from emu import build
from support.cuda import fake_driver
from support.kernels.emulator import Ended, driver, run_program

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(600), pytest.mark.needs("cuda", "hooks")]

ROWS, WIDTH = 5, 300
PROGRAM = """
import json, sys
import numpy as np
import penstock
from emu.client import Device
from support import hooks

emulator = Device("libcuda.so.1")
code, rows, width = map(int, sys.argv[1:4])
x = np.random.default_rng(1).standard_normal((rows, width), np.float32)
weight = np.random.default_rng(2).standard_normal(width, np.float32)


def run():
    try:
        return hooks.cuda_rms_norm(x.ravel().tolist(), weight.tolist())
    except penstock.GenerationError as error:
        return str(error)


def outcome(call=None):
    emulator.library.emuClear()
    if call is not None:
        assert emulator.fault(call, 1, code)
    return {"result": run(), "findings": emulator.findings()}


calls = sys.argv[4:]
print(json.dumps({call: outcome(call) for call in calls} | {"": outcome()}))
"""
#: The functions that the program calls besides those that free, in the order of the calls.
CALLS = (
    *("cuDriverGetVersion", "cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceTotalMem_v2"),
    *("cuDeviceGetName", "cuDeviceGetAttribute", "cuDeviceGetUuid_v2", "cuDeviceGetPCIBusId"),
    *("cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuModuleLoadData", "cuModuleGetFunction"),
    *("cuFuncGetParamInfo", "cuStreamCreate", "cuEventCreate", "cuMemHostAlloc", "cuMemAlloc_v2"),
    *("cuCtxGetCurrent", "cuMemGetInfo_v2", "cuFuncSetAttribute", "cuStreamBeginCapture_v2"),
    *("cuMemsetD8Async", "cuLaunchKernelEx", "cuGraphInstantiateWithFlags", "cuMemcpyHtoDAsync_v2"),
    *("cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuEventQuery", "cuEventSynchronize"),
    "cuStreamSynchronize",
)
FREES = (
    *("cuMemFree_v2", "cuMemFreeHost", "cuEventDestroy_v2", "cuStreamDestroy_v2", "cuModuleUnload"),
    *("cuGraphDestroy", "cuGraphExecDestroy", "cuDevicePrimaryCtxRelease_v2"),
)


def run(*calls: str, code: int = 2, checked: bool = False, **variables: str) -> dict[str, Any]:
    """The outcomes of the program: one in which each call fails once, and one without a failure."""
    ended = run_program(PROGRAM, code, ROWS, WIDTH, *calls, checked=checked, **variables)
    outcomes: dict[str, Any] = ended.result
    return outcomes


def run_own(program: str, *, checked: bool = False, **variables: str) -> Ended:
    """The end of a program of the crate."""
    code = f"from support import hooks; hooks.cuda_program({program!r})"
    return run_program(code, checked=checked, **variables)


def expected() -> np.ndarray[Any, np.dtype[np.float64]]:
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH), np.float32).astype(np.float64)
    weight = np.random.default_rng(2).standard_normal(WIDTH, np.float32).astype(np.float64)
    norms: np.ndarray[Any, np.dtype[np.float64]] = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)
    return norms * weight


def check(outcome: dict[str, Any]) -> None:
    """The result is right."""
    assert isinstance(outcome["result"], list), outcome["result"]
    norms = np.array(outcome["result"]).reshape(ROWS, WIDTH)
    assert np.abs(norms - expected()).max() < 1e-5


@pytest.mark.parametrize("variables", [{}, {"checked": True}, {"checked": True, "EMU_DELAY_US": "200"}])
def test_program_is_right(variables: dict[str, Any]) -> None:
    outcome = run(**variables)[""]
    check(outcome)
    assert outcome["findings"] == []


def test_other_library_of_the_driver_is_an_error(tmp_path: Path) -> None:
    folder = fake_driver.build(tmp_path / "lib")
    (folder / "libcuda.so.1").rename(folder / "libcuda.so")
    path = f"{folder}:{driver().parent}"
    result = run(LD_LIBRARY_PATH=path)[""]["result"]
    assert result.startswith("libcuda.so is another library than libcuda.so.1")
    assert "LD_LIBRARY_PATH" in result


def test_driver_without_a_function_is_an_error(tmp_path: Path) -> None:
    code = """
import penstock
from support import hooks

try:
    hooks.cuda_rms_norm([1.0], [1.0])
except penstock.GenerationError as error:
    print(error)
"""
    path = os.pathsep.join([str(build.HERE.parent), *sys.path])
    folder = fake_driver.build(tmp_path / "lib")
    settings = {"PYTHONPATH": path, "LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-c", code]
    environment = os.environ | settings
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=100)
    assert done.stdout == "libcuda.so.1 has no function cuModuleLoadData; update the NVIDIA driver\n"


def test_each_call_that_fails_is_an_error_without_a_leak() -> None:
    outcomes = run(*CALLS)
    for call in CALLS:
        error = outcomes[call]["result"]
        assert isinstance(error, str), call
        assert f"{call.removesuffix('_v2')} failed with CUDA_ERROR_OUT_OF_MEMORY" in error
        assert outcomes[call]["findings"] == [], call
    check(outcomes[""])


def test_capture_that_does_not_end_is_an_error() -> None:
    outcome = run("cuStreamEndCapture")["cuStreamEndCapture"]
    assert outcome["result"].startswith("cuStreamEndCapture failed with CUDA_ERROR_OUT_OF_MEMORY")
    # The driver does not destroy a stream that is captured.
    assert outcome["findings"] == ["leak at the release of the context: 1 streams"]


def test_code_of_a_newer_driver_is_an_error() -> None:
    result = run("cuMemAlloc_v2", code=919)["cuMemAlloc_v2"]["result"]
    assert result == "cuMemAlloc failed with CUDA error 919"


def test_defects_inside_steps_and_arenas_are_found() -> None:
    allocation, access = run_own("defects", checked=True).findings
    assert allocation == "call inside a step: cuMemAlloc_v2"
    assert access.startswith("use after free: memset, write of 64 bytes")


def test_constructors_bind_and_drops_restore_the_context() -> None:
    assert run_own("threads").findings == []


def test_lost_device_is_used_again_in_a_new_context() -> None:
    (finding,) = run_own("lost").findings
    assert finding.startswith("kernel failed: kernel rms_norm_f32")


def test_child_of_a_fork_frees_nothing() -> None:
    lines = run_own("fork", EMU_TRACE="1").errors.splitlines()
    begin = lines.index("child begins")
    assert lines[begin + 1] == "child ends"
    assert "cuDevicePrimaryCtxRelease_v2" in lines[begin:]


def test_call_that_frees_may_fail() -> None:
    outcomes = run(*FREES)
    for call in FREES:
        check(outcomes[call])
        leaks = [] if call == "cuDevicePrimaryCtxRelease_v2" else ["leak at the release of the context: 1"]
        findings = outcomes[call]["findings"]
        assert [finding[: len(leak)] for finding, leak in zip(findings, leaks, strict=True)] == leaks
    check(outcomes[""])
