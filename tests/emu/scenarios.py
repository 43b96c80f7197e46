"""Programs for the emulated driver: sound ones, and programs with one defect each.

`python -m emu.scenarios NAME [ARGUMENT]` runs one and prints its result, its error and the findings.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from emu.client import INVALID_HANDLE, Device, DriverError, Pinned, Pointer

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


def each_call_fails(path: str) -> dict[str, list[Any]]:
    """Let each function of a list fail once, in a fresh context; the error that the program has got."""
    with open(path) as file:  # noqa: PTH123
        names = file.read().split()
    probe = Device()
    outcome: dict[str, list[Any]] = {}
    for name in names:
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


# ---- Programs with a defect in the order of operations.


def missing_wait() -> None:
    """A kernel does not wait for the upload of its input."""
    d = opened()
    compute, copy = d.stream(), d.stream()
    x, y = ready(d, compute)
    d.upload(copy, x, numbers(d))
    saxpy(d, compute, x, y)
    d.call("cuCtxSynchronize")


def reused_buffer() -> None:
    """The next upload does not wait for the kernel that reads the buffer."""
    d = opened()
    compute, copy = d.stream(), d.stream()
    x, y = ready(d, compute)
    d.after(copy, compute)
    saxpy(d, compute, x, y)
    d.upload(copy, x, numbers(d))
    d.call("cuCtxSynchronize")


def graph_without_edge() -> None:
    """Two branches of a graph write the same vector."""
    d = opened()
    compute, copy = d.stream(), d.stream()
    x, y = ready(d, compute)
    d.begin_capture(compute)
    d.after(copy, compute)
    saxpy(d, compute, x, y)
    saxpy(d, copy, x, y)
    d.after(compute, copy)
    d.call("cuGraphLaunch", d.end_capture(compute), compute)
    d.wait(compute)


def early_read_by_dependent_launch() -> None:
    """A kernel reads the output of the previous launch without dependency_wait."""
    d = opened()
    stream = d.stream()
    x, y = ready(d, stream)
    saxpy(d, stream, x, y)
    d.launch(stream, "scale", (BLOCKS, 256), 0.5, y, N, 0, dependent=True)
    d.wait(stream)


# ---- Programs with a defect in the use of memory.


def never_written() -> None:
    """A kernel reads fresh memory."""
    d = opened()
    stream = d.stream()
    x, y = d.alloc(SIZE), d.alloc(SIZE)
    d.call("cuMemsetD8Async", x, 0, SIZE, stream)
    saxpy(d, stream, x, y)
    d.wait(stream)


def small_grid() -> None:
    """The grid lacks a block, so the end of the output is not written."""
    d = opened()
    stream = d.stream()
    x, y = ready(d, stream)
    z, out = d.alloc(SIZE), d.floats(N)
    d.launch(stream, "add_vectors", (BLOCKS - 1, 256), Vectors(x, y, z), N)
    d.download(stream, out, z)
    d.wait(stream)


def out_of_bounds() -> None:
    """A kernel processes an element too many."""
    d = opened()
    stream = d.stream()
    x, y = ready(d, stream)
    saxpy(d, stream, x, y, N + 1)
    d.wait(stream)


def far_out_of_bounds() -> list[int]:
    """A kernel processes far too many elements; the error of the stream, and of all calls that follow."""
    d = opened()
    stream = d.stream()
    x, y = ready(d, stream)
    d.launch(stream, "saxpy", (40, 256), 1.0, x, y, 10 * N)
    code = d.code("cuStreamSynchronize", stream)
    again = d.code("cuMemFree_v2", x)
    release = d.code("cuDevicePrimaryCtxRelease_v2", 0)
    opened().close()
    return [code, again, release]


def bad_pointer() -> int:
    """A copy from an address that is not allocated."""
    d = opened()
    stream = d.stream()
    x, _ = ready(d, stream)
    d.download(stream, d.floats(N), x + (1 << 30))
    return d.code("cuStreamSynchronize", stream)


def host_pointer() -> int:
    """A kernel reads host memory."""
    d = opened()
    stream = d.stream()
    _, y = ready(d, stream)
    saxpy(d, stream, numbers(d).address, y)
    return d.code("cuStreamSynchronize", stream)


def use_after_free() -> int:
    """A kernel reads freed memory."""
    d = opened()
    stream = d.stream()
    x, y = ready(d, stream)
    d.call("cuMemFree_v2", d.disown(x))
    saxpy(d, stream, x, y)
    return d.code("cuStreamSynchronize", stream)


def early_free() -> None:
    """Memory is freed before the host has waited for the kernel."""
    d = opened()
    stream = d.stream()
    x, y = ready(d, stream)
    saxpy(d, stream, x, y)
    d.call("cuMemFree_v2", d.disown(x))


def double_free() -> list[int]:
    """Memory is freed twice, and an address that was never allocated."""
    d = opened()
    x = d.disown(d.alloc(SIZE))
    d.call("cuMemFree_v2", x)
    return [d.code("cuMemFree_v2", x), d.code("cuMemFree_v2", 4096)]


def region_released() -> None:
    """A range of the engine's arena is read after its release."""
    d = opened()
    stream = d.stream()
    x, y = ready(d, stream)
    d.region(x, 256, 0, stream)
    saxpy(d, stream, x, y)
    d.wait(stream)


def region_unwritten() -> None:
    """A range of the engine's arena is given out again and read before it is written."""
    d = opened()
    stream = d.stream()
    x, y = ready(d, stream)
    d.region(x, 256, 1, stream)
    saxpy(d, stream, x, y)
    d.wait(stream)


# ---- Programs with a defect on the host.


def changed_source() -> None:
    """Pinned memory changes before its upload is complete."""
    d = opened()
    stream = d.stream()
    x, source = d.alloc(SIZE), numbers(d)
    d.upload(stream, x, source)
    source.values[7] = -1.0
    d.wait(stream)


def early_read() -> list[str]:
    """The host reads a result before it waits, and after."""
    d = opened()
    stream = d.stream()
    x, _ = ready(d, stream)
    out = d.floats(N)
    ctypes.memset(out.address, 0, out.size)
    is_read = threading.Event()
    call_on_host(d, stream, lambda: is_read.wait(60))
    d.download(stream, out, x)
    early = ctypes.string_at(out.address + 4, 4).hex()
    is_read.set()
    d.wait(stream)
    return [early, ctypes.string_at(out.address + 4, 4).hex()]


def work_in_step() -> None:
    """Allocation, free and synchronisation while the engine executes a step."""
    d = opened()
    stream = d.stream()
    with d.step():
        d.wait(stream)
        d.call("cuMemFree_v2", d.disown(d.alloc(SIZE)))


def host_access() -> float:
    """The host dereferences a device pointer."""
    d = opened()
    x, _ = ready(d, d.stream())
    return ctypes.c_float.from_address(x).value


def foreign_fault() -> None:
    """Code that has nothing to do with the device reads an invalid address."""
    opened()
    ctypes.c_float.from_address(64).value  # noqa: B018


def leaks() -> None:
    """Nothing is released but the context."""
    d = opened()
    stream = d.stream()
    ready(d, stream)
    d.event()
    d.begin_capture(stream)
    d.end_capture(stream)
    d.call("cuDevicePrimaryCtxRelease_v2", 0)


def capture_unjoined() -> int:
    """A capture ends while a stream has not been joined."""
    d = opened()
    compute, copy = d.stream(), d.stream()
    x, y = ready(d, compute)
    d.begin_capture(compute)
    d.after(copy, compute)
    saxpy(d, copy, x, y)
    return d.code("cuStreamEndCapture", compute, ctypes.byref(ctypes.c_void_p()))


def capture_with_wait() -> list[int]:
    """The host waits for a stream that is captured."""
    d = opened()
    stream = d.stream()
    d.begin_capture(stream)
    waited = d.code("cuStreamSynchronize", stream)
    return [waited, d.code("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p()))]


def capture_of_outer_event() -> int:
    """A captured stream waits for an event from outside of the capture."""
    d = opened()
    stream, other, event = d.stream(), d.stream(), d.event()
    d.call("cuEventRecord", event, other)
    d.begin_capture(stream)
    return d.code("cuStreamWaitEvent", stream, event, 0)


def misuse() -> list[int]:
    """Objects that do not exist, and memory that is not pinned."""
    d = opened()
    stream, event = d.stream(), d.event()
    x, _ = ready(d, stream)
    memory = (ctypes.c_float * N)()
    codes = [
        d.code("cuMemsetD8Async", x, 0, SIZE, 0),
        d.code("cuEventSynchronize", 4096),
        d.code("cuModuleGetFunction", ctypes.byref(ctypes.c_void_p()), d.module, b"absent"),
        d.code("cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), b"no image" + bytes(64)),
        d.code("cuLaunchKernel", d.function("saxpy"), 0, 1, 1, 1, 1, 1, 0, stream, None, None),
        d.code("cuLaunchKernel", d.function("saxpy"), 1, 1, 1, 2048, 1, 1, 0, stream, None, None),
        d.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 1 << 40),
        d.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 0),
    ]
    d.call("cuMemcpyHtoDAsync_v2", x, memory, SIZE, stream)
    d.call("cuMemcpyDtoHAsync_v2", memory, x, SIZE, stream)
    d.call("cuStreamWaitEvent", stream, event, 0)
    d.wait(stream)
    d.call("cuStreamDestroy_v2", d.disown(stream))
    assert d.code("cuStreamSynchronize", stream) == INVALID_HANDLE
    d.load(image("saxpy", "absent"))
    return codes


def call_by_host_function() -> int:
    """A host function calls the driver."""
    d = opened()
    stream = d.stream()
    codes: list[int] = []
    call_on_host(d, stream, lambda: codes.append(d.code("cuStreamQuery", stream)))
    d.wait(stream)
    return codes[0]


def order_of_use() -> list[int]:
    """Calls before the initialisation, without a context, and in the child of a fork."""
    d = Device()
    count = ctypes.c_int()
    codes = [d.code("cuDeviceGetCount", ctypes.byref(count)), d.code("cuInit", 1), d.code("cuInit", 0)]
    codes.append(d.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 16))
    read, write = os.pipe()
    if not os.fork():
        os.write(write, bytes([d.code("cuInit", 0), d.code("cuDeviceGetCount", ctypes.byref(count))]))
        os._exit(0)
    codes += os.read(read, 2)
    os.wait()
    return codes


def unknown_fault_code() -> list[bool]:
    """Codes that the bindings lack are not injected."""
    d = Device()
    return [d.fault("cuInit", 1, code) for code in (2, 12345, -1)]


def load(path: str) -> None:
    """Load a cubin."""
    with open(path, "rb") as file:  # noqa: PTH123
        Device().open(file.read()).close()


# ---- Kernels.


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
        "copy_misaligned": ((1, 32), (x,)),
        "shared_out_of_bounds": ((1, 32, 128), (out,)),
        "shared_never_written": ((1, 32, 128), (out,)),
        "divergent_barrier": ((1, 64), (out,)),
        "divergent_shuffle": ((1, 32), (out,)),
        "lane_outside_of_mask": ((1, 32), (out,)),
        "shuffle_from_absent_lane": ((1, 32), (out,)),
        "deadlock": ((1, 32), (out,)),
        "deep_recursion": ((1, 1), (out, 1000)),
    }
    shape, arguments = shapes.get(name, ((1, 32), (x, out)))
    d.launch(stream, name, shape, *arguments)
    d.download(stream, result, out)
    d.wait(stream)
    values = list(result.values)
    d.close()
    return values


def main() -> None:
    """Run a scenario and print its outcome."""
    name, *arguments = sys.argv[1:]
    outcome: dict[str, Any] = {"result": None, "error": None}
    try:
        outcome["result"] = globals()[name](*arguments)
    except DriverError as error:
        outcome["error"] = [error.call, error.code]
    outcome["findings"] = Device().findings()
    print(json.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)  # objects that a scenario has left are not of interest


if __name__ == "__main__":
    main()
