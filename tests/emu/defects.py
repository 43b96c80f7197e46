"""Programs for the emulated driver with one defect each."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from emu.client import GLOBAL, INVALID_HANDLE, RELAXED, THREAD_LOCAL, Device, Pointer
from emu.scenarios import BLOCKS, SIZE, N, Vectors, call_on_host, image, numbers, opened, ready, saxpy

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


def early_read_in_a_graph() -> None:
    """The same in a graph."""
    d = opened()
    stream = d.stream()
    x, y = ready(d, stream)
    d.begin_capture(stream)
    saxpy(d, stream, x, y)
    d.launch(stream, "scale", (BLOCKS, 256), 0.5, y, N, 0, dependent=True)
    d.call("cuGraphLaunch", d.end_capture(stream), stream)
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


def far_out_of_bounds_late() -> list[int]:
    """The last block of a large grid leaves the memory; the errors of a few launches."""
    codes = []
    for _ in range(20):
        d = opened()
        stream, size = d.stream(), 4 << 20
        x = d.alloc(size)
        d.call("cuMemsetD8Async", x, 0, size, stream)
        d.launch(stream, "scale", (size // 1024 + 8, 256), 1.0, x, size // 4 + 2048, 1)
        codes.append(d.code("cuStreamSynchronize", stream))
        d.code("cuDevicePrimaryCtxRelease_v2", 0)
    return codes


def bad_pointer() -> int:
    """A copy from an address that is not allocated."""
    d = opened()
    stream = d.stream()
    x, _ = ready(d, stream)
    d.download(stream, d.floats(N), x + (1 << 30))
    return d.code("cuStreamSynchronize", stream)


def host_pointer() -> int:
    """A kernel reads host memory that is not pinned."""
    d = opened()
    stream = d.stream()
    _, y = ready(d, stream)
    pageable = (ctypes.c_float * N)()
    saxpy(d, stream, Pointer(ctypes.addressof(pageable)), y)
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


def region_outside() -> None:
    """A range that is not in the device's memory."""
    d = opened()
    x, _ = ready(d, d.stream())
    d.region(x, 1 << 60, 1, 0)


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


def captures_and_another_thread() -> list[list[int]]:
    """A thread queries an event during captures in another thread; the last call waits for the device.

    Captures and threads of each mode. Found are the results of the call and of the end of the capture.
    """
    d = opened()
    stream, event = d.stream(), d.event()
    context = d.output(ctypes.c_void_p, "cuCtxGetCurrent")
    found = []

    def in_thread(mode: int, name: str, *arguments: Any) -> None:
        d.call("cuCtxSetCurrent", context)
        d.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(mode)))
        found.append([d.code(name, *arguments)])

    query, synchronize = ("cuEventQuery", event), ("cuCtxSynchronize",)
    modes = [(GLOBAL, GLOBAL), (GLOBAL, THREAD_LOCAL), (THREAD_LOCAL, GLOBAL)]
    for capture, thread, call in [*((*pair, query) for pair in modes), (THREAD_LOCAL, RELAXED, synchronize)]:
        d.call("cuStreamBeginCapture_v2", stream, capture)
        other = threading.Thread(target=in_thread, args=(thread, *call))
        other.start()
        other.join()
        graph = ctypes.c_void_p()
        found[-1].append(d.code("cuStreamEndCapture", stream, ctypes.byref(graph)))
        if graph:
            d.call("cuGraphDestroy", graph)
    return found


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
    """Codes that a newer driver may have are injected, others are not."""
    d = Device()
    return [d.fault("cuInit", 1, code) for code in (2, 919, 12345, -1)]
