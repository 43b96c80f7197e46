"""Programs for the emulated driver; those with a defect are in `defects.py`.

`python -m emu.scenarios NAME [ARGUMENT]` runs one and prints its result, its error and the findings.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from emu.client import GLOBAL, RELAXED, Device, DriverError, Pinned, Pointer

if TYPE_CHECKING:
    from collections.abc import Callable

KERNELS = ("saxpy", "scale", "add_vectors")
#: Elements of the vectors, and the blocks of 256 threads that process them. The last block is not full.
N = 1000
BLOCKS = 4
SIZE = 4 * N


#: A stream may call a host function after the end of the Python function that has defined it.
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
host_functions: list[Any] = []


def call_on_host(d: Device, stream: int, function: Callable[[], object]) -> None:
    """Let a stream call a function."""
    host_functions.append(HostFunction(lambda _: function()))
    d.call("cuLaunchHostFunc", stream, host_functions[-1], None)


class Vectors(ctypes.Structure):
    """The argument of add_vectors."""

    _fields_ = (("x", ctypes.c_uint64), ("y", ctypes.c_uint64), ("sum", ctypes.c_uint64))


def image(*names: str) -> bytes:
    """A module for the emulator."""
    return b"EMU!" + b"".join(name.encode() + b"\0" for name in names) + b"\0"


def opened(*names: str) -> Device:
    """The device with the kernels of scenarios; EMU_CUBIN has a file to load instead."""
    path = os.environ.get("EMU_CUBIN")
    if path is None:
        return Device().open(image(*KERNELS, *names))
    with open(path, "rb") as file:  # noqa: PTH123  (pathlib takes 10 ms to import, in each process)
        return Device().open(file.read())


def numbers(d: Device) -> Pinned:
    """Pinned memory with 0, 1, 2, ..."""
    return d.floats(N).fill([float(i) for i in range(N)])


def ready(d: Device, stream: int) -> tuple[Pointer, Pointer]:
    """Two vectors on the device that hold 0, 1, 2, ... and zeros; the host has waited for them."""
    x, y = d.alloc(SIZE), d.alloc(SIZE)
    d.upload(stream, x, numbers(d))
    d.call("cuMemsetD8Async", y, 0, SIZE, stream)
    d.wait(stream)
    return x, y


def saxpy(d: Device, stream: int, x: Pointer, y: Pointer, n: int = N) -> None:
    """Add x to y."""
    d.launch(stream, "saxpy", (BLOCKS, 256), 1.0, x, y, n)


# ---- Sound programs.


def vectors() -> list[float]:
    """Upload on one stream, compute on another one, download."""
    d = opened()
    compute, copy = d.stream(), d.stream()
    x, y, out = d.alloc(SIZE), d.alloc(SIZE), d.floats(N)
    d.upload(copy, x, numbers(d))
    d.call("cuMemsetD32Async", y, 0x3F800000, N, compute)
    d.after(compute, copy)
    with d.step():
        d.launch(compute, "saxpy", (BLOCKS, 256), 2.0, x, y, N)
        d.launch(compute, "add_vectors", (BLOCKS, 256), Vectors(x, y, x), N)
        d.launch(compute, "scale", (BLOCKS, 256), 0.5, x, N, 1, dependent=True)
        d.after(copy, compute)
        d.download(copy, out, x)
    d.wait(copy)
    result = list(out.values[:4])
    d.close()
    return result


def graph() -> list[float]:
    """A graph of two branches, replayed three times with other input."""
    d = opened()
    compute, copy = d.stream(), d.stream()
    x, y = ready(d, compute)
    z, out, source = d.alloc(SIZE), d.floats(N), numbers(d)
    d.call("cuMemsetD8Async", z, 0, SIZE, compute)
    d.begin_capture(compute)
    d.upload(compute, x, source)
    d.after(copy, compute)
    saxpy(d, compute, x, y)
    saxpy(d, copy, x, z)
    d.after(compute, copy)
    saxpy(d, compute, z, y)
    d.download(compute, out, y)
    executable = d.end_capture(compute)
    results = []
    for _ in range(3):
        d.call("cuGraphLaunch", executable, compute)
        d.wait(compute)
        results.append(out.values[3])
        source.values[3] *= 10
    d.close()
    return results


def regions() -> None:
    """The engine's allocator gives a range out again, in the order of a stream."""
    d = opened()
    stream, other = d.stream(), d.stream()
    x, y = ready(d, stream)
    saxpy(d, stream, x, y)
    d.region(y, SIZE, 0, stream)
    d.region(y, SIZE, 1, stream)
    d.after(other, stream)
    d.call("cuMemcpyDtoDAsync_v2", y, x, SIZE, other)
    d.after(stream, other)
    saxpy(d, stream, x, y)
    d.wait(stream)
    d.region(y, SIZE, 0, 0)
    d.region(y, SIZE, 1, 0)
    d.upload(stream, y, numbers(d))
    saxpy(d, stream, x, y)
    d.wait(stream)
    d.close()


def loading_beside_a_step() -> None:
    """A thread loads while another one executes a step."""
    d = opened()
    context = d.output(ctypes.c_void_p, "cuCtxGetCurrent")

    def load() -> None:
        d.call("cuCtxSetCurrent", context)
        ready(d, d.stream())

    with d.step():
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    d.close()


def many_objects() -> None:
    """More streams, branches of graphs, contexts and memory in turn than can exist at once."""
    for _ in range(4):
        d = opened()
        for _ in range(40):
            compute, copy = d.stream(), d.stream()
            x, y = ready(d, compute)
            d.begin_capture(compute)
            d.after(copy, compute)
            saxpy(d, copy, x, y)
            d.after(compute, copy)
            d.call("cuGraphLaunch", d.end_capture(compute), compute)
            large = d.alloc(1 << 20)
            d.call("cuMemsetD8Async", large, 0, 1 << 20, copy)
            d.call("cuCtxSynchronize")
            while d.owned:
                d.call(*d.owned.pop())
        d.close()


def every_call() -> None:
    """All functions of the driver, in one program."""
    d = Device()
    for name in ("cuGetErrorName", "cuGetErrorString"):
        assert d.output(ctypes.c_char_p, name, 700, position=1) == b"CUDA_ERROR_ILLEGAL_ADDRESS"
    d.open(image(*KERNELS))
    assert d.output(ctypes.c_int, "cuDriverGetVersion") == 13000
    assert d.output(ctypes.c_int, "cuDeviceGetCount") == 1
    assert d.output(ctypes.c_size_t, "cuDeviceTotalMem_v2", 0) == 2 << 30
    assert d.output(ctypes.c_int, "cuDeviceGetAttribute", 75, 0) == 9
    assert d.output(ctypes.c_void_p, "cuCtxGetCurrent")
    for name in ("cuDeviceGetName", "cuDeviceGetPCIBusId"):
        text = ctypes.create_string_buffer(64)
        d.call(name, text, 64, 0)
        assert text.value
    for name in ("cuDeviceGetUuid", "cuDeviceGetUuid_v2"):
        d.call(name, ctypes.create_string_buffer(16), 0)
    least, greatest = ctypes.c_int(), ctypes.c_int()
    d.call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
    every_call_of_functions(d)
    every_call_of_streams(d)
    every_call_of_memory(d)
    d.close()


def every_call_of_functions(d: Device) -> None:
    """Attributes and parameters of kernels."""
    function = d.function("saxpy")
    d.call("cuFuncSetAttribute", function, 8, 100 << 10)
    assert d.output(ctypes.c_int, "cuFuncGetAttribute", 8, function) == 100 << 10
    assert d.output(ctypes.c_int, "cuFuncGetAttribute", 0, function) == 1024
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    layout = []
    for i in range(4):
        d.call("cuFuncGetParamInfo", function, i, ctypes.byref(offset), ctypes.byref(size))
        layout.append((offset.value, size.value))
    assert layout == [(0, 4), (8, 8), (16, 8), (24, 4)]
    assert d.code("cuFuncGetParamInfo", function, 4, ctypes.byref(offset), ctypes.byref(size))


def every_call_of_streams(d: Device) -> None:
    """Streams, events, host functions and graphs."""
    called: list[int] = []
    stream = d.own("cuStreamDestroy_v2", d.output(ctypes.c_void_p, "cuStreamCreateWithPriority", 1, -5))
    other = d.stream()
    x, y = ready(d, stream)
    begin, end = d.event(), d.event()
    d.call("cuEventQuery", begin)
    d.call("cuEventRecord", begin, stream)
    call_on_host(d, stream, lambda: called.append(1))
    saxpy(d, stream, x, y)
    d.call("cuEventRecord", end, stream)
    d.call("cuEventSynchronize", end)
    d.call("cuEventQuery", end)
    assert called == [1]
    assert d.output(ctypes.c_float, "cuEventElapsedTime", begin, end) >= 0
    d.wait(stream)
    d.call("cuStreamQuery", stream)
    assert d.output(ctypes.c_int, "cuStreamIsCapturing", stream, position=1) == 0
    mode = ctypes.c_int(RELAXED)
    for former in (GLOBAL, RELAXED):
        d.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        assert mode.value == former
    d.begin_capture(stream)
    assert d.output(ctypes.c_int, "cuStreamIsCapturing", stream, position=1) == 1
    d.launch(stream, "scale", (BLOCKS, 256), 0.5, x, N, 1, dependent=True)
    d.after(other, stream)
    saxpy(d, other, x, y)
    d.after(stream, other)
    executable = d.end_capture(stream)
    d.call("cuGraphUpload", executable, stream)
    d.call("cuGraphLaunch", executable, stream)
    d.call("cuCtxSynchronize")


def every_call_of_memory(d: Device) -> None:
    """Device memory, registered memory and copies that wait."""
    available, total = ctypes.c_size_t(), ctypes.c_size_t()
    d.call("cuMemGetInfo_v2", ctypes.byref(available), ctypes.byref(total))
    x = d.alloc(SIZE)
    before = available.value
    d.call("cuMemGetInfo_v2", ctypes.byref(available), ctypes.byref(total))
    assert before - available.value == 4096
    values, copied = (ctypes.c_float * N)(*range(N)), (ctypes.c_float * N)()
    d.call("cuMemcpyHtoD_v2", x, values, SIZE)
    d.call("cuMemcpyDtoH_v2", copied, x, SIZE)
    assert list(copied) == list(values)
    stream = d.stream()
    y = d.alloc(SIZE)
    d.call("cuMemHostRegister_v2", copied, SIZE, 0)
    d.call("cuMemcpyDtoDAsync_v2", y, x, SIZE, stream)
    d.call("cuMemsetD32Async", y, 0x40000000, 1, stream)
    d.call("cuMemcpyDtoHAsync_v2", copied, y, SIZE, stream)
    d.wait(stream)
    assert list(copied[:3]) == [2.0, 1.0, 2.0]
    d.call("cuMemHostUnregister", copied)


def names_in(path: str) -> list[str]:
    """The words of a file."""
    with open(path) as file:  # noqa: PTH123
        return file.read().split()


def missing_functions(path: str) -> list[str]:
    """The functions of a list that the driver does not have."""
    return [name for name in names_in(path) if not hasattr(Device().library, name)]


def each_call_fails(path: str) -> dict[str, list[Any]]:
    """Let each function of a list fail once, in a fresh context; the error that the program has got."""
    probe = Device()
    outcome: dict[str, list[Any]] = {}
    for name in names_in(path):
        assert probe.fault(name, 1, 2)
        try:
            every_call()
        except DriverError as error:
            outcome[name] = [error.call, error.code]
        probe.library.emuClear()
        while probe.code("cuDevicePrimaryCtxRelease_v2", 0) == 0:
            pass
        probe.library.emuClear()
    return outcome


# ---- Kernels.


def load(path: str) -> None:
    """Load a cubin."""
    with open(path, "rb") as file:  # noqa: PTH123
        Device().open(file.read()).close()


def kernel(name: str) -> list[float]:
    """A kernel of plants on 1024 ones: its output, of 1024 floats that were zero."""
    d = opened(name)
    stream = d.stream()
    x, out, result = d.alloc(4096), d.alloc(4096), d.floats(1024)
    d.call("cuMemsetD32Async", x, 0x3F800000, 1024, stream)
    d.call("cuMemsetD8Async", out, 0, 4096, stream)
    shapes: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
        "row_sums": ((2, 128), (x, out, 200)),
        "row_sums_dynamic": ((2, 128, 512), (x, out, 200)),
        "staged_copy": ((1, 32), (x, out, 3)),
        "histogram": ((2, 64), (x, out, 128)),
        "sums_without_barrier": ((2, 128), (x, out, 200)),
        "histogram_without_atomics": ((2, 64), (x, out, 128)),
        "copy_left_pending": ((1, 32), (x,)),
        "product_left_pending": ((1, 128, 9 << 10), ()),
        "product_of_unseen_tile": ((1, 128, 9 << 10), ()),
        "product_of_tile_seen_late": ((1, 128, 9 << 10), ()),
        "product_without_begin": ((1, 128, 9 << 10), ()),
        "product_of_used_tile": ((1, 128, 9 << 10), ()),
        "product_of_used_registers": ((1, 128, 9 << 10), ()),
        "copy_misaligned": ((1, 32), (x,)),
        "shared_out_of_bounds": ((1, 32, 128), (out,)),
        "shared_never_written": ((1, 32, 128), (out,)),
        "divergent_barrier": ((1, 64), (out,)),
        "divergent_shuffle": ((1, 32), (out,)),
        "lane_outside_of_mask": ((1, 32), (out,)),
        "shuffle_from_absent_lane": ((1, 32), (out,)),
        "launch_before_wait": ((1, 32), (out,)),
        "block_without_wait": ((2, 32), (out, 32)),
        "deadlock": ((1, 32), (out,)),
        "deep_recursion": ((1, 1), (out, 1000)),
    }
    shape, arguments = shapes.get(name, ((1, 32), (x, out)))
    d.launch(stream, name, shape, *arguments, dependent=name == "block_without_wait")
    d.download(stream, result, out)
    d.wait(stream)
    values = list(result.values)
    d.close()
    return values


def find(name: str) -> Callable[..., Any]:
    """The function of a scenario."""
    from emu import defects

    function: Callable[..., Any] = globals().get(name) or getattr(defects, name)
    return function


def main() -> None:
    """Run a scenario and print its outcome."""
    name, *arguments = sys.argv[1:]
    outcome: dict[str, Any] = {"result": None, "error": None}
    try:
        outcome["result"] = find(name)(*arguments)
    except DriverError as error:
        outcome["error"] = [error.call, error.code]
    outcome["findings"] = Device().findings()
    print(json.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)  # objects that a scenario has left are not of interest


if __name__ == "__main__":
    main()
