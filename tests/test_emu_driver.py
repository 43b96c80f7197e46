"""The emulated CUDA driver executes sound programs, and reports errors as the driver does."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

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
from support import cuda
from support.emulator import PLANTS, driver, plants, run, start

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
    library = ctypes.CDLL(str(driver()))
    assert [name for name in CALLS if not hasattr(library, name)] == []
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


def test_codes_that_the_bindings_lack_are_not_injected() -> None:
    assert run("unknown_fault_code").result == [True, False, False]


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


SCRIPT = """
import penstock
(device,) = penstock.cuda_info().devices
print(device.name, device.compute_capability, device.total_memory, device.reason)
"""


def test_penstock_finds_the_emulated_device() -> None:
    settings = {
        "EMU": "1",
        "EMU_KERNELS": str(plants(checked=False)),
        "EMU_ARCH": "80",
        "LD_LIBRARY_PATH": str(driver().parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"Emulated device 8.0 {2 << 30} None\n", done.stderr


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


def test_captured_stream_cannot_wait_for_an_outer_event() -> None:
    assert run("capture_of_outer_event").result == CAPTURE_ISOLATION


def test_error_of_an_operation_lasts_until_the_context_ends() -> None:
    outcome = run("far_out_of_bounds")
    assert outcome.result == [ILLEGAL_ADDRESS, ILLEGAL_ADDRESS, 0]
    text = r"kernel failed: kernel saxpy, block \(4,0,0\).*illegal address: device memory.* at sound\.cu:\d+"
    assert [bool(re.fullmatch(text, finding)) for finding in outcome.findings] == [True]


# ---- Modules from NVRTC.


def write_cubin(source: Path, target: str, folder: Path, *defines: str) -> str:
    """The path of a cubin."""
    path = folder / "kernels.cubin"
    path.write_bytes(cuda.compiled(source, target, *defines)[0])
    return str(path)


@pytest.mark.parametrize("target", cuda.TARGETS)
def test_cubin_of_each_architecture_runs_the_host_kernels(target: str, tmp_path: Path) -> None:
    outcome = run("vectors", EMU_CUBIN=write_cubin(PLANTS / "sound.cu", target, tmp_path))
    assert (outcome.result, outcome.findings) == ([0.5, 2.0, 3.5, 5.0], [])


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


@pytest.mark.parametrize("source", sorted(cuda.SOURCES.glob("*.cu")), ids=lambda path: path.stem)
def test_parameters_of_a_product_kernel_agree_with_its_cubin(source: Path, tmp_path: Path) -> None:
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
