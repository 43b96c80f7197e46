"""A device with the probes of the measuring plan: random data, poisoned results, comparisons of bits."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

from kernels import Bench
from support.kernels import cuda

if TYPE_CHECKING:
    from emu.client import Pointer

PROBES = Path(__file__).parent / "probes"
#: Replays of a graph; the first one is not measured.
REPLAYS = 6
#: A word of a result that nothing has written.
POISON = 0xFFFFFFFF
#: CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT.
MULTIPROCESSORS = 16
BLOCKS, THREADS = 1024, 256


class Fill(ctypes.Structure):
    """`Fill` of `probes/data.cu`."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("seed", ctypes.c_uint32),
        ("spread", ctypes.c_int),
    )


class Compare(ctypes.Structure):
    """`Compare` of `probes/data.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "found")),
        ("count", ctypes.c_uint64),
        ("poison", ctypes.c_uint32),
    )


class PlanBench(Bench):
    """A device that measures kernels and probes."""

    folders = (cuda.SOURCES, PROBES)

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors."""
        return int(self.output(ctypes.c_int, "cuDeviceGetAttribute", MULTIPROCESSORS, 0))

    def run(
        self, name: str, shape: tuple[object, ...], argument: ctypes.Structure, *, dependent: bool = False
    ) -> None:
        """Launch a kernel and wait for it."""
        stream = self.output(ctypes.c_void_p, "cuStreamCreate", 1)
        self.launch(stream, name, shape, argument, dependent=dependent)
        self.wait(stream)
        self.call("cuStreamDestroy_v2", stream)

    def spread_numbers(self, count: int, seed: int, spread: int = 12) -> Pointer:
        """Device memory with random bf16 numbers, of exponents from -spread to spread."""
        buffer = self.alloc(2 * count)
        blocks = min(BLOCKS, -(-count // THREADS))
        self.run("fill_random", (blocks, THREADS), Fill(buffer, count, seed, spread))
        return buffer

    def poisoned(self, size: int) -> Pointer:
        """Device memory of bytes that no result has."""
        buffer = self.alloc(size)
        self.poison(buffer, size)
        return buffer

    def poison(self, buffer: Pointer, size: int) -> None:
        """Set memory to bytes that no result has."""
        self.set_bytes(buffer, 0xFF, size)

    def set_bytes(self, buffer: Pointer, value: int, size: int) -> None:
        """Set all bytes."""
        stream = self.output(ctypes.c_void_p, "cuStreamCreate", 1)
        self.call("cuMemsetD8Async", buffer, value, size, stream)
        self.wait(stream)
        self.call("cuStreamDestroy_v2", stream)

    def differences(self, result: Pointer, expected: Pointer, size: int) -> int:
        """The words in which a result differs. An error, if nothing has written some of it."""
        found = self.alloc(8)
        self.set_bytes(found, 0, 8)
        blocks = min(BLOCKS, -(-size // 4 // THREADS))
        self.run("compare_words", (blocks, THREADS), Compare(result, expected, found, size // 4, POISON))
        counts = (ctypes.c_uint32 * 2)()
        self.call("cuMemcpyDtoH_v2", counts, found, 8)
        if counts[1]:
            raise RuntimeError(f"{counts[1]} words of the result have not been written")
        return int(counts[0])

    def word(self, address: Pointer) -> int:
        """A word of device memory."""
        value = ctypes.c_uint32()
        self.call("cuMemcpyDtoH_v2", ctypes.byref(value), address, 4)
        return value.value
