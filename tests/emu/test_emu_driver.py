"""The emulated CUDA driver executes sound programs, and reports errors as the driver does."""

from __future__ import annotations

import re
import signal
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from emu import build
from emu.client import (
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_UNJOINED,
    CAPTURE_UNSUPPORTED,
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_IMAGE,
    INVALID_VALUE,
    NOT_FOUND,
    NOT_INITIALIZED,
    NOT_PERMITTED,
    OUT_OF_MEMORY,
)
from support.kernels import cuda
from support.kernels.emulator import PLANTS, run, run_program, start
from support.marks import rare_except

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator

CALLS = (build.HERE / "calls.txt").read_text().split()
NO_DEVICE = 100

KINDS = pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])


@KINDS
@pytest.mark.parametrize(
    ("scenario", "result"),
    [
        ("vectors", [0.5, 2.0, 3.5, 5.0]),
        ("graph", [6.0, 69.0, 702.0]),
        ("regions", None),
        ("loading_beside_a_step", None),
        ("every_call", None),
    ],
)
def test_sound_program_has_its_result_and_no_findings(
    scenario: str, result: object, *, checked: bool
) -> None:
    outcome = run(scenario, checked=checked)
    assert (outcome.result, outcome.error, outcome.findings) == (result, None, [])


@pytest.mark.parametrize("delay", ["50", "500"])
@pytest.mark.parametrize("scenario", ["vectors", "graph"])
def test_sound_program_is_right_with_random_delays(scenario: str, delay: str) -> None:
    outcome = run(scenario, checked=True, EMU_DELAY_US=delay)
    assert outcome.result == run(scenario).result
    assert outcome.findings == []


@KINDS
def test_objects_and_addresses_are_used_again(*, checked: bool) -> None:
    outcome = run("many_objects", checked=checked, EMU_MEMORY=str(4 << 20))
    assert (outcome.error, outcome.findings) == (None, [])


def test_every_function_is_defined_and_called_by_a_scenario() -> None:
    assert run("missing_functions", str(build.HERE / "calls.txt")).result == []
    source = "".join((build.HERE / f"{name}.py").read_text() for name in ("client", "scenarios"))
    assert [name for name in CALLS if f'"{name}"' not in source] == []


def test_each_call_that_fails_ends_the_program_with_its_error() -> None:
    outcome = run("each_call_fails", str(build.HERE / "calls.txt"))
    cannot_fail = ["cuGetErrorName", "cuGetErrorString"]
    expected = {name: [name, OUT_OF_MEMORY] for name in CALLS if name not in cannot_fail}
    # These functions call others of the list.
    expected["cuDeviceGetUuid_v2"][0] = "cuDeviceGetUuid"
    assert outcome.result == expected
    assert outcome.findings == []


def test_codes_of_newer_drivers_are_injected() -> None:
    assert run("unknown_fault_code").result == [True, True, False, False]


def test_bindings_are_those_of_the_lock_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "OUTPUT", tmp_path)
    bindings = build.find_bindings()
    assert "cuInit" in bindings.read_text()
    crate = tomllib.loads((bindings.parents[3] / "Cargo.toml").read_text())["package"]
    packages = tomllib.loads((build.ROOT / "Cargo.lock").read_text())["package"]
    assert [crate["version"]] == [entry["version"] for entry in packages if entry["name"] == "cudarc"]
    assert list(tmp_path.iterdir()) == []  # no lock file of its own


def test_device_exists_only_on_request() -> None:
    outcome = run("vectors", EMU="0")
    assert outcome.error == ["cuInit", NO_DEVICE]


def describe() -> list[Any]:
    """The facts about the device that Penstock reports."""
    (device,) = penstock.cuda_info().devices
    free, total = device.free_memory, device.total_memory
    return [device.name, device.compute_capability, free, total, device.reason]


def test_penstock_finds_the_emulated_device() -> None:
    ended = run_program(describe, EMU_ARCH="80", EMU_MEMORY=str(1 << 30))
    assert ended.result == ["Emulated device", "8.0", 1 << 30, 1 << 30, None]
    assert ended.findings == []


def test_memory_of_the_device_has_the_size_of_the_setting() -> None:
    code = """
from emu.client import Device, OUT_OF_MEMORY
d = Device("libcuda.so.1").open()
large = d.alloc(3 << 20)
assert d.code("cuMemAlloc_v2", (ctypes.c_uint64 * 1)(), (1 << 20) + 1) == OUT_OF_MEMORY
d.call("cuMemFree_v2", d.disown(large))
d.alloc((4 << 20) - 4096)
d.alloc(4096)
d.close()
"""
    assert run_program(f"import ctypes\n{code}", EMU_MEMORY=str(4 << 20)).findings == []


@pytest.mark.needs("proc")
@pytest.mark.parametrize("size", [2 << 30, 140 << 30])
def test_large_memory_takes_no_memory_of_the_host(size: int) -> None:
    code = """
import sys
from pathlib import Path
from emu.client import Device, OUT_OF_MEMORY
d = Device("libcuda.so.1").open()
stream, memory = d.stream(), d.alloc(int(sys.argv[1]))
d.call("cuMemsetD8Async", memory + int(sys.argv[1]) - 4096, 0, 4096, stream)
d.close()
status = Path("/proc/self/status").read_text()
(peak,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
assert peak < 200 << 10, peak
"""
    assert run_program(code, size, checked=True, EMU_MEMORY=str(size)).findings == []


LEAK = """
import sys
from emu.client import Device
d = Device("libcuda.so.1").open()
{}
"""


@pytest.mark.parametrize(
    ("end", "findings"),
    [
        ("d.close()", []),
        ("", ["leak at the end of the process: the context"]),
        ("d.event(); d.owned.clear(); d.close()", ["leak at the release of the context: 1 events"]),
    ],
)
def test_findings_of_a_program_include_its_leaks(end: str, findings: list[str]) -> None:
    assert run_program(LEAK.format(end)).findings == findings


@pytest.mark.parametrize("end", ["sys.exit(1)", "import os; os._exit(0)", "os.abort()"])
def test_program_without_an_orderly_end_is_an_error(end: str) -> None:
    with pytest.raises(AssertionError):
        run_program(LEAK.format(end))
    with pytest.raises(AssertionError, match="has not used the device"):
        run_program("print()")


def test_calls_in_the_wrong_order_are_errors() -> None:
    codes = [NOT_INITIALIZED, INVALID_VALUE, 0, INVALID_CONTEXT, NOT_INITIALIZED, NOT_INITIALIZED]
    assert run("order_of_use").result == codes


def test_invalid_objects_and_values_are_errors() -> None:
    outcome = run("misuse")
    assert outcome.result == [
        *(INVALID_HANDLE, INVALID_HANDLE, NOT_FOUND, INVALID_IMAGE),
        *(INVALID_VALUE, INVALID_VALUE, OUT_OF_MEMORY, INVALID_VALUE),
    ]
    assert outcome.findings == [
        "use of the default stream: memset",
        "use of a destroyed event: cuEventSynchronize",
        "asynchronous copy from memory that is not pinned: 4000 bytes",
        "asynchronous copy to memory that is not pinned: 4000 bytes",
        "wait for an event that was never recorded: cuStreamWaitEvent",
        "use of a destroyed stream: cuStreamSynchronize",
        "a kernel is not in the host's library; is its EXPORT missing?: absent",
    ]


def test_host_function_that_calls_the_driver_gets_an_error() -> None:
    outcome = run("call_by_host_function")
    assert outcome.result == NOT_PERMITTED
    assert outcome.findings == ["call of the driver by a host function: cuStreamQuery"]


def test_capture_with_an_unjoined_stream_is_an_error() -> None:
    assert run("capture_unjoined").result == CAPTURE_UNJOINED


def test_wait_of_the_host_ends_a_capture() -> None:
    assert run("capture_with_wait").result == [CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED]


def test_calls_of_other_threads_end_captures_by_their_modes() -> None:
    ended, kept = [CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED], [0, 0]
    assert run("captures_and_another_thread").result == [ended, kept, kept, ended]


def test_captured_stream_cannot_wait_for_an_outer_event() -> None:
    assert run("capture_of_outer_event").result == CAPTURE_ISOLATION


def test_error_of_an_operation_lasts_until_the_context_ends() -> None:
    outcome = run("far_out_of_bounds")
    assert outcome.result == [ILLEGAL_ADDRESS, ILLEGAL_ADDRESS, 0]
    text = r"kernel failed: kernel saxpy, block \(4,0,0\).*illegal address: device memory.* at sound\.cu:\d+"
    assert [bool(re.fullmatch(text, finding)) for finding in outcome.findings] == [True]


@pytest.mark.parametrize("workers", ["1", "3"])
def test_each_worker_of_a_launch_reports_an_illegal_address(workers: str) -> None:
    outcome = run("far_out_of_bounds_late", EMU_WORKERS=workers)
    assert outcome.result == [ILLEGAL_ADDRESS] * 20
    assert {finding.partition(", block")[0] for finding in outcome.findings} == {
        "kernel failed: kernel scale"
    }


# ---- Modules from NVRTC.


def write_cubin(source: Path, target: str, folder: Path, *defines: str) -> str:
    """The path of a cubin."""
    path = folder / "kernels.cubin"
    path.write_bytes(cuda.compiled(source, target, *defines)[0])
    return str(path)


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("target", cuda.TARGETS)
def test_cubin_of_each_architecture_runs_the_host_kernels(target: str, tmp_path: Path) -> None:
    outcome = run("vectors", EMU_CUBIN=write_cubin(PLANTS / "sound.cu", target, tmp_path))
    assert (outcome.result, outcome.findings) == ([0.5, 2.0, 3.5, 5.0], [])


@pytest.mark.needs("hooks")
def test_cubin_with_other_parameters_is_reported(tmp_path: Path) -> None:
    text = (PLANTS / "sound.cu").read_text()
    for old, new in {
        "float* y, int n) {": "float* y, long long n) {",
        ", int n, int waits": ", int n",
        "if (waits) ": "",
    }.items():
        assert old in text
        text = text.replace(old, new)
    source = tmp_path / "other_parameters.cu"
    source.write_text(text)
    outcome = run("regions", EMU_CUBIN=write_cubin(source, "sm_90a", tmp_path))
    assert sorted(outcome.findings) == [
        "cubin and host disagree on a parameter: saxpy 3",
        "cubin and host disagree on the number of parameters: scale",
    ]


@pytest.mark.needs("hooks")
@pytest.mark.parametrize(
    "name", rare_except(sorted(path.stem for path in cuda.SOURCES.glob("*.cu")), "gemm", "rms_norm")
)
def test_parameters_of_a_product_kernel_agree_with_its_cubin(name: str, tmp_path: Path) -> None:
    source = cuda.SOURCES / f"{name}.cu"
    cubin = write_cubin(source, "sm_90a", tmp_path, *cuda.variants(source)[0])
    outcome = run("load", cubin, EMU_KERNELS=str(build.build_kernels()))
    assert (outcome.error, outcome.findings) == (None, [])


# ---- The signal handler.


@KINDS
def test_access_of_device_memory_by_the_host_ends_the_process(*, checked: bool) -> None:
    done = start("host_access", checked=checked)
    assert done.returncode == -signal.SIGSEGV
    assert "emu: host code accesses device memory" in done.stderr
    assert "host_access" in done.stderr  # Python's handler has run, too


def test_fault_of_other_code_is_left_to_the_earlier_handler() -> None:
    done = start("foreign_fault")
    assert done.returncode == -signal.SIGSEGV
    assert "device memory" not in done.stderr
    assert "foreign_fault" in done.stderr
