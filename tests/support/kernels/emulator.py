"""Programs on the emulated CUDA driver, each in a process of its own: scenarios and users of Penstock."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from emu import build
from emu.client import Device, DriverError, Pointer
from emu.scenarios import image
from support.kernels import cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PLANTS = build.HERE / "plants"


@functools.cache
def plants(*, checked: bool) -> Path:
    """The library of the emulator's own kernels."""
    return build.build_library("plants", sorted(PLANTS.glob("*.cu")), instrumented=checked)


@functools.cache
def driver() -> Path:
    """The emulated libcuda.so.1."""
    return build.build_driver()


@dataclass(frozen=True)
class Outcome:
    """The end of a scenario."""

    result: Any
    error: list[Any] | None  # the call of the driver that has failed, and the code
    findings: list[str]


def start(
    scenario: str, *arguments: str, checked: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a scenario to its end, with plain or with checked kernels."""
    command = [sys.executable, "-X", "faulthandler", "-m", "emu.scenarios", scenario, *arguments]
    settings = {
        "EMU": "1",
        "EMU_LIBRARY": str(driver()),
        "EMU_KERNELS": str(plants(checked=checked)),
        "PYTHONPATH": str(build.HERE.parent),
        "PATH": os.environ["PATH"],
    }
    return subprocess.run(
        command, env=settings | environment, capture_output=True, text=True, timeout=60, check=False
    )


def run(scenario: str, *arguments: str, checked: bool = False, **environment: str) -> Outcome:
    """The outcome of a scenario that does not crash."""
    done = start(scenario, *arguments, checked=checked, **environment)
    assert done.returncode == 0, done.stderr
    return Outcome(**json.loads(done.stdout))


#: Compiled kernels of all programs: NVRTC compiles each once per machine.
CACHE = build.OUTPUT / "cache"
#: The code that calls a function of a module.
CALL = "import json, sys; from {0} import {1}; print(json.dumps({1}(*sys.argv[1:])))"
#: The last line of the report of a process.
END = "end of the process"


@dataclass(frozen=True)
class Ended:
    """The end of a program."""

    output: str
    errors: str
    findings: list[str]

    @property
    def result(self) -> Any:
        """The value that the function has returned."""
        return json.loads(self.output.splitlines()[-1])


#: Settings of the emulated device without which a test runs on a GPU.
HARMLESS = {"EMU_MEMORY", "EMU_TRACE"}

#: For tests that count the calls of the emulated driver, or limit its memory.
needs_emulator = pytest.mark.skipif(cuda.ON_GPU, reason="needs the emulated device")

#: For tests of the demo model, which `make gpu-wheel` does not collect.
needs_demo = pytest.mark.skipif(cuda.ON_GPU, reason="needs the demo model")


def emulation(*, checked: bool = False) -> dict[str, str]:
    """The environment of a process that finds the emulated libraries, with plain or with checked kernels."""
    return {
        "EMU": "1",
        "EMU_MEMORY": str(256 << 20),
        "EMU_KERNELS": str(build.build_kernels(instrumented=checked)),
        "LD_LIBRARY_PATH": str(driver().parent),
        "PENSTOCK_CACHE": str(CACHE),
        "PENSTOCK_CUBLAS": str(build.build_cublas()),
    }


def run_program(
    program: str | Callable[..., object], *arguments: object, checked: bool = False, **environment: str
) -> Ended:
    """Run Python code, or a function of a module, with Penstock on an emulated device of 256 MiB.

    The arguments are passed as texts. A function returns a value for JSON. The process uses the device and
    ends with status 0. The findings are those at its end; a context that is still in use is one of them.

    With PENSTOCK_TEST_GPU=1, the program runs on the device of the system's driver, which has no findings.
    Tests of checked kernels and with settings of the emulated device, except `HARMLESS`, are skipped.
    """
    is_emulated = checked or any(name.startswith("EMU_") for name in environment.keys() - HARMLESS)
    if cuda.ON_GPU and is_emulated:
        pytest.skip("needs the emulated device")
    code = program if isinstance(program, str) else CALL.format(program.__module__, program.__name__)
    command = [sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)]
    with tempfile.NamedTemporaryFile("r") as report:
        settings = {
            "EMU_FINDINGS": report.name,
            "PYTHONPATH": os.pathsep.join([str(build.HERE.parent), *sys.path]),
        }
        process = os.environ | settings | ({} if cuda.ON_GPU else emulation(checked=checked)) | environment
        done = subprocess.run(command, env=process, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        lines = report.read().splitlines()
    if cuda.ON_GPU:
        return Ended(done.stdout, done.stderr, [])
    assert lines[-1:] == [END], f"the process has not used the device, or not ended in order\n{done.stderr}"
    return Ended(done.stdout, done.stderr, lines[:-1])


#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
MAX_DYNAMIC_SHARED = 8


class Arrays(ctypes.Structure):
    """`Arrays` of `rewrite.cu`."""

    _fields_ = (("begin", ctypes.c_uint64 * 32), ("bytes", ctypes.c_uint64 * 32))


class CheckedKernels(cuda.HostKernels):
    """Kernels in the emulated driver, which checks every access of memory; a finding is an error.

    An array has a copy on the device for the time of a launch. The launch depends on one that writes all of
    them but the constant ones (`cuda.constant`), so an access before dependency_wait is found.

    The driver stays in the process, where later code finds it under its name: processes with checked kernels
    do nothing else.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        os.environ.update(EMU="1", EMU_KERNELS=str(path))
        self.device = Device(str(driver()))

    def launch(self, name: str, grid: Sequence[int], block: int, *arguments: Any, shared: int = 0) -> None:
        """Run a kernel on copies of the arrays."""
        arrays = cuda.arrays_of(arguments)
        constants = set(cuda.constants)
        cuda.constants.clear()
        d = self.device.open(image(name, "rewrite"))
        stream = d.output(ctypes.c_void_p, "cuStreamCreate", 1)
        failure = ""
        try:
            copies = {address: upload(d, array) for address, array in arrays.items()}
            values = [on_device(argument, copies) for argument in arguments]
            if shared:
                d.call("cuFuncSetAttribute", d.function(name), MAX_DYNAMIC_SHARED, shared)
            rewritten = [
                (copies[address], array.nbytes)
                for address, array in arrays.items()
                if array.nbytes and address not in constants
            ]
            self.rewrite(stream, rewritten)
            d.launch(stream, name, (tuple(grid), block, shared), *values, dependent=True)
            d.wait(stream)
            for address, array in arrays.items():
                if array.flags.writeable and array.nbytes:
                    d.call("cuMemcpyDtoH_v2", ctypes.c_void_p(address), copies[address], array.nbytes)
        except DriverError as error:
            failure = f"{error}\n"
        findings = d.findings()
        d.functions.clear()
        d.library.emuClear()
        # Frees everything that is left.
        d.call("cuDevicePrimaryCtxRelease_v2", 0)
        d.library.emuClear()
        if failure or findings:
            raise RuntimeError(f"{name}: {failure}" + "\n".join(findings))

    def rewrite(self, stream: int, arrays: list[tuple[Pointer, int]]) -> None:
        """Launch a kernel that writes arrays."""
        if not arrays:
            return
        argument = Arrays()
        for i, (begin, size) in enumerate(arrays):
            argument.begin[i], argument.bytes[i] = begin, size
        self.device.launch(stream, "rewrite", (len(arrays), 128), argument)


def upload(d: Device, array: cuda.Array) -> Pointer:
    """A copy of an array on the device."""
    if not array.nbytes:
        return Pointer(0)
    copy = Pointer(d.output(ctypes.c_uint64, "cuMemAlloc_v2", array.nbytes))
    d.call("cuMemcpyHtoD_v2", copy, ctypes.c_void_p(array.ctypes.data), array.nbytes)
    return copy


def on_device(argument: Any, copies: dict[int, Pointer]) -> Any:
    """An argument of a kernel with the addresses of the copies, also in a structure."""
    if argument is None:
        return Pointer(0)
    if isinstance(argument, np.ndarray):
        return copies[argument.ctypes.data]
    if isinstance(argument, ctypes.Structure):
        words = bytearray(bytes(argument))
        for start in range(0, len(words) - 7, 8):
            address = int.from_bytes(words[start : start + 8], "little")
            if address in copies:
                words[start : start + 8] = copies[address].to_bytes(8, "little")
        return type(argument).from_buffer(words)
    return int(argument) if isinstance(argument, np.integer) else argument
