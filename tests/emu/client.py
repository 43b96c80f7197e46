"""A client of the CUDA driver through ctypes, for scenarios in processes of their own."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Codes of the driver.
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 1, 2, 3
INVALID_IMAGE, INVALID_CONTEXT, INVALID_HANDLE = 200, 201, 400
#: Modes of captures, and of threads.
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NOT_FOUND, NOT_READY, ILLEGAL_ADDRESS, LAUNCH_FAILED, NOT_PERMITTED = 500, 600, 700, 719, 800
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_ISOLATION = 900, 901, 904, 905
CAPTURED_EVENT = 907

#: The attribute of programmatic dependent launch.
DEPENDENT = 6


class DriverError(Exception):
    """A call of the driver has returned an error."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} returned {code}")
        self.call = call
        self.code = code


class Pointer(int):
    """An address, which is passed to kernels as 64 bits."""


class Pinned:
    """Pinned memory of 32-bit numbers."""

    def __init__(self, device: Device, kind: Any, length: int) -> None:
        self.device = device
        self.size = 4 * length
        self.address = Pointer(device.output(ctypes.c_void_p, "cuMemHostAlloc", self.size, 0))
        self.values: Any = (kind * length).from_address(self.address)

    def fill(self, values: list[Any]) -> Pinned:
        """Set the first values."""
        self.values[: len(values)] = values
        return self

    def free(self) -> None:
        """Give the memory back."""
        self.device.call("cuMemFreeHost", self.address)


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


def argument(value: Any) -> Any:
    """An argument of a kernel: a pointer, a structure, 32-bit integers and floats."""
    if isinstance(value, Pointer):
        return ctypes.c_uint64(value)
    if isinstance(value, int):
        return ctypes.c_int(value)
    return ctypes.c_float(value) if isinstance(value, float) else value


class Device:
    """The device with its context, a module and the objects of a scenario, which `close` releases."""

    def __init__(self, library: str | None = None) -> None:
        self.library = ctypes.CDLL(library or os.environ["EMU_LIBRARY"])
        self.functions: dict[str, int] = {}
        self.module: int | None = None
        self.owned: list[tuple[str, int]] = []

    # Calls of the driver.

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function; the code that it returns."""
        values = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return int(getattr(self.library, name)(*values))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that must succeed."""
        if code := self.code(name, *arguments):
            raise DriverError(name, code)

    def output(self, kind: Any, name: str, *arguments: Any, position: int = 0) -> Any:
        """Call a function that writes a value to the parameter at a position; the value."""
        value = kind()
        self.call(name, *arguments[:position], ctypes.byref(value), *arguments[position:])
        return value.value

    # Functions for tests.

    def findings(self) -> list[str]:
        """The defects so far."""
        text = ctypes.create_string_buffer(1 << 16)
        self.library.emuFindings(text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()

    def fault(self, call: str, nth: int, code: int) -> bool:
        """Let the n-th call from now on return an error."""
        self.library.emuFault.restype = ctypes.c_bool
        return bool(self.library.emuFault(call.encode(), nth, code))

    def plant(self, call: str, nth: int) -> None:
        """Let the n-th call from now on have the effect of a defect."""
        self.library.emuPlant(call.encode(), nth)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step of the engine, which does not allocate or wait."""
        self.library.emuArm(1)
        try:
            yield
        finally:
            self.library.emuArm(0)

    def region(self, address: int, size: int, live: int, stream: int) -> None:
        """The engine's allocator gives a range out, or takes it back."""
        self.library.emuRegion(*map(ctypes.c_uint64, (address, size, live, stream)))

    # Objects.

    def open(self, image: bytes | None = None) -> Device:
        """Initialise the driver, retain the context and load a module of all kernels that scenarios use."""
        self.call("cuInit", 0)
        device = self.output(ctypes.c_int, "cuDeviceGet", 0)
        context = self.output(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", device)
        self.call("cuCtxSetCurrent", context)
        if image is not None:
            self.load(image)
        return self

    def load(self, image: bytes) -> None:
        """Load a module: a cubin, or names of kernels."""
        self.module = self.output(ctypes.c_void_p, "cuModuleLoadData", image)

    def stream(self) -> int:
        """A new stream, which does not wait for the default stream."""
        return self.own("cuStreamDestroy_v2", self.output(ctypes.c_void_p, "cuStreamCreate", 1))

    def event(self) -> int:
        """A new event without timing."""
        return self.own("cuEventDestroy_v2", self.output(ctypes.c_void_p, "cuEventCreate", 2))

    def alloc(self, size: int) -> Pointer:
        """Device memory."""
        return Pointer(self.own("cuMemFree_v2", self.output(ctypes.c_uint64, "cuMemAlloc_v2", size)))

    def floats(self, length: int) -> Pinned:
        """Pinned memory of floats."""
        return self.pinned(ctypes.c_float, length)

    def words(self, length: int) -> Pinned:
        """Pinned memory of unsigned integers."""
        return self.pinned(ctypes.c_uint, length)

    def pinned(self, kind: Any, length: int) -> Pinned:
        """Pinned memory of 32-bit numbers."""
        pinned = Pinned(self, kind, length)
        self.own("cuMemFreeHost", pinned.address)
        return pinned

    def own(self, destroy: str, handle: int) -> int:
        """Let `close` destroy an object."""
        self.owned.append((destroy, handle))
        return handle

    def disown(self, handle: int) -> int:
        """Let the scenario itself destroy an object."""
        self.owned = [(destroy, other) for destroy, other in self.owned if other != handle]
        return handle

    def close(self) -> None:
        """Wait for the device, destroy all objects and release the context."""
        self.call("cuCtxSynchronize")
        for destroy, handle in reversed(self.owned):
            self.call(destroy, handle)
        if self.module is not None:
            self.call("cuModuleUnload", self.module)
        self.call("cuDevicePrimaryCtxRelease_v2", 0)

    # Operations.

    def function(self, name: str) -> int:
        """A kernel of the module."""
        if name not in self.functions:
            handle = self.output(ctypes.c_void_p, "cuModuleGetFunction", self.module, name.encode())
            self.functions[name] = handle
        return self.functions[name]

    def launch(
        self, stream: int, name: str, shape: tuple[Any, ...], *arguments: Any, dependent: bool = False
    ) -> None:
        """Launch a kernel. The shape is the blocks, the threads per block and the bytes of shared memory."""
        blocks, threads, shared = (*shape, 0)[:3]
        grid = (*([blocks] if isinstance(blocks, int) else blocks), 1, 1)[:3]
        values = [argument(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        function = self.function(name)
        if not dependent:
            self.call("cuLaunchKernel", function, *grid, threads, 1, 1, shared, stream, pointers, None)
            return
        attribute = LaunchAttribute(DEPENDENT, b"", (ctypes.c_int * 16)(1))
        three = ctypes.c_uint * 3
        config = LaunchConfig(
            three(*grid), three(threads, 1, 1), shared, stream, ctypes.pointer(attribute), 1
        )
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def upload(self, stream: int, to: int, source: Pinned) -> None:
        """Copy pinned memory to the device."""
        self.call("cuMemcpyHtoDAsync_v2", to, source.address, source.size, stream)

    def download(self, stream: int, target: Pinned, source: int) -> None:
        """Copy device memory to pinned memory."""
        self.call("cuMemcpyDtoHAsync_v2", target.address, source, target.size, stream)

    def begin_capture(self, stream: int) -> None:
        """Capture the operations of a stream instead of executing them."""
        self.call("cuStreamBeginCapture_v2", stream, RELAXED)

    def end_capture(self, stream: int) -> int:
        """The executable graph of a capture."""
        graph = self.output(ctypes.c_void_p, "cuStreamEndCapture", stream, position=1)
        self.own("cuGraphDestroy", graph)
        executable = self.output(ctypes.c_void_p, "cuGraphInstantiateWithFlags", graph, 0)
        return self.own("cuGraphExecDestroy", executable)

    def wait(self, stream: int) -> None:
        """Wait for a stream."""
        self.call("cuStreamSynchronize", stream)

    def after(self, stream: int, other: int) -> None:
        """Let a stream wait for all that another one has been given so far."""
        event = self.event()
        self.call("cuEventRecord", event, other)
        self.call("cuStreamWaitEvent", stream, event, 0)
