"""The CUDA kernels without a GPU: compiled by NVRTC for every target, and run on the host.

The host's library of kernels is the same text, compiled by the system's C++ compiler over the runtime of
``tests/emu``. Compiled files are cached under ``target/emu``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import math
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from emu import build
from support import hooks, needs
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SOURCES = ROOT / "cuda"
CACHE = ROOT / "target" / "emu" / "cubin"

#: The targets of the tests: the oldest supported one, then those with instructions of their own.
TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")

#: PENSTOCK_CHECK_KERNELS=1: the emulated driver runs the kernels and checks every access of memory.
CHECKED = os.environ.get("PENSTOCK_CHECK_KERNELS") == "1"
#: Kernels, too, run on the device of the system's driver.
ON_GPU = needs.ON_GPU
#: PENSTOCK_TEST_CUBINS: a folder of compiled files, maybe of another machine with another compiler. What it
#: lacks is compiled, and added.
CARRIED = os.environ.get("PENSTOCK_TEST_CUBINS")

#: The files of tests of kernels, which run with checked kernels in each gate, and with plain ones in a share.
CHECKED_FILES = [
    f"test_kernels_cuda_{name}"
    for name in ("attention", "gemm", "gemm_quantised", "kv", "lora", "quantise", "rows", "sample")
]

#: Those of which checked runs are rare, because they take minutes.
SLOWLY_CHECKED_FILES = ["test_kernels_cuda_attention"]

#: Variants of a file that is compiled for one of them at a time.
VARIANTS = {
    "attention": [
        *("bf16,bf16,bf16,128", "bf16,int8,int8,128", "bf16,u4,uint4,128"),
        *("f16,f16,f16,64", "f16,int8,int8,64", "f16,u4,uint4,64"),
        *(
            "bf16,u4,uint4,80",
            "f16,u4,uint4,144",
            "bf16,bf16,bf16,256",
            "bf16,int8,int8,256",
            "f16,u4,uint4,256",
        ),
    ],
    "gemm_quantised": [
        *("code4,32,nested,affine,bf16", "code6,16,nested,centred,bf16"),
        *("code8,32,scale16,affine,bf16", "e4m3,64,scale32,centred,bf16"),
        *("code4,32,nested,affine,int8", "code4,64,scale16,affine,int8", "code5,32,nested,affine,int8"),
        *("code6,16,nested,centred,int8", "code8,64,scale32,centred,int8"),
        "e4m3,64,scale32,centred,fp8",
    ],
    "gemm_quantised_warpgroup": ["code4,32,scale16,affine,int8", "code4,64,scale16,affine,bf16"],
}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel, as the assembler reports them."""

    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    files = importlib.metadata.files("nvidia-cuda-nvrtc") or ()
    paths = [Path(str(file.locate())) for file in files]
    # The compiler loads its library of builtins by name. Version 13.0 does not find it beside itself.
    for path in paths:
        if re.fullmatch(r"libnvrtc-builtins\.so\.[\d.]+", path.name):
            ctypes.CDLL(str(path))
    return ctypes.CDLL(next(str(path) for path in paths if re.fullmatch(r"libnvrtc\.so\.\d+", path.name)))


def _compile(
    path: Path, target: str, defines: Sequence[str] = (), output: str = "CUBIN"
) -> tuple[bytes, str]:
    """The cubin, or ``PTX``, of a file and the log of its compilation."""
    lib, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()

    def check(status: int) -> None:
        if status != 0:
            lib.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(
                f"{path.name} for {target}: {lib.nvrtcGetErrorString(status).decode()}\n{log()}"
            )

    def log() -> str:
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, text)
        return text.value.decode()

    # Beside a driver, the compiler has a cache, which keeps no logs.
    options = [f"-arch={target}", *hooks.cuda_compile_options(), "--ptxas-options=-v", "--no-cache"]
    options += [f"-I{folder}" for folder in dict.fromkeys((SOURCES, path.parent))]
    options += [f"-D{define}" for define in defines]
    values = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    source, name = path.read_bytes(), path.name.encode()
    check(lib.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None))
    try:
        check(lib.nvrtcCompileProgram(program, len(options), values))
        check(lib[f"nvrtcGet{output}Size"](program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        check(lib[f"nvrtcGet{output}"](program, code))
        return code.raw, log()
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def compiled(path: Path, target: str, *defines: str) -> tuple[bytes, str]:
    """The cubin of a file and the log of its compilation, from the cache if nothing has changed."""
    name = f"{path.stem}.{target}"
    headers = [header for folder in (SOURCES, path.parent) for header in sorted(folder.glob("*.cuh"))]
    key = f"{target} {hooks.cuda_compile_options()} {defines}".encode() + b"".join(
        file.read_bytes() for file in (*headers, path, Path(__file__))
    )

    def by_this_compiler() -> tuple[bytes, str]:
        return _kept(CACHE, name, key + compiler_version().encode(), lambda: _compile(path, target, defines))

    return _kept(Path(CARRIED), name, key, by_this_compiler) if CARRIED else by_this_compiler()


def _kept(folder: Path, name: str, key: bytes, make: Callable[[], tuple[bytes, str]]) -> tuple[bytes, str]:
    """The cubin and the log for a key, from a folder. If they are missing, they are made."""
    name = f"{name}.{hashlib.sha256(key).hexdigest()[:16]}"
    cubin, log = folder / f"{name}.cubin", folder / f"{name}.log"
    if not log.exists():
        folder.mkdir(parents=True, exist_ok=True)
        code, text = make()
        for file, content in ((cubin, code), (log, text.encode())):  # other processes read complete files
            partial = file.with_name(f"{file.name}.{os.getpid()}")
            partial.write_bytes(content)
            partial.replace(file)
    return cubin.read_bytes(), log.read_text()


def compiler_version() -> str:
    """The version of NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@functools.cache
def ptx(name: str, *defines: str) -> dict[str, str]:
    """The PTX of every kernel of a file, by name."""
    code, _ = _compile(SOURCES / name, "sm_90a", defines, output="PTX")
    parts = re.split(r"\.entry (\w+)\(", code.decode())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def variants(path: Path) -> list[list[str]]:
    """The definitions of each compilation of a file."""
    return [[f"VARIANT={variant}"] for variant in VARIANTS.get(path.stem, [])] or [[]]


def resources(log: str) -> dict[str, Resources]:
    """The resources of every kernel in a log."""

    def number(pattern: str, text: str) -> int:
        match = re.search(pattern, text)
        return int(match[1]) if match else 0

    parts = re.split(r"Compiling entry function '(\w+)'", log)
    return {
        name: Resources(
            registers=number(r"Used (\d+) registers", text),
            spilled_bytes=number(r"(\d+) bytes spill stores", text)
            + number(r"(\d+) bytes spill loads", text),
            stack_bytes=number(r"(\d+) bytes stack frame", text),
            shared_bytes=number(r"(\d+) bytes smem", text),
        )
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


class HostKernels:
    """A library of kernels that is compiled for the host."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.emu_launch.restype = ctypes.c_char_p
        self._library.emu_library.restype = ctypes.POINTER(ctypes.c_void_p)
        self._find = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(self._library.emu_library()[0])

    def __contains__(self, name: str) -> bool:
        return self._find(name.encode()) is not None

    def launch(self, name: str, grid: Sequence[int], block: int, *arguments: Any, shared: int = 0) -> None:
        """Runs a kernel. An array is passed as its address, an ``int`` as 32 bits, a ``float`` as float32."""
        self._launch(name, (grid, block, shared), 0, arguments)

    def _launch(
        self, name: str, shape: tuple[Sequence[int], int, int], first: int, arguments: Sequence[Any]
    ) -> None:
        grid, block, shared = shape
        values = [_argument(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        dimensions = (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid)))
        threads = (ctypes.c_uint * 3)(block, 1, 1)
        number = ctypes.c_uint64(first)
        error = self._library.emu_launch(name.encode(), dimensions, threads, number, shared, addresses)
        if error is not None:
            raise RuntimeError(f"{name}: {error.decode()}")


class LastBlock(HostKernels):
    """Kernels of which only the last block of a grid runs."""

    def launch(self, name: str, grid: Sequence[int], block: int, *arguments: Any, shared: int = 0) -> None:
        """Runs a block of a kernel."""
        self._launch(name, (grid, block, shared), math.prod(grid) - 1, arguments)


#: Of <sys/mman.h>, which the module `mmap` lacks.
MAP_NORESERVE = 0x4000


def sparse(*shape: int, dtype: Any = np.float32) -> Array:
    """An array of zeros that takes memory only where it is touched."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(shape)


#: The arrays of :func:`addresses` since the last launch, if the kernels run on a device.
arrays_in_structures: list[Array] = []
#: The addresses of the arrays of :func:`constant` since the last launch, if the kernels are checked.
constants: set[int] = set()


def constant(array: Array) -> Array:
    """Mark an array as one that no kernel writes, such as weights and inputs.

    The next launch may read it early, before dependency_wait.
    """
    if CHECKED:
        constants.add(array.ctypes.data)
    return array


def addresses(*arrays: Array | None) -> list[int | None]:
    """The addresses of arrays, for the fields of an argument that is a structure."""
    if CHECKED or ON_GPU:
        arrays_in_structures.extend(array for array in arrays if array is not None)
    return [None if array is None else array.ctypes.data for array in arrays]


def arrays_of(arguments: Sequence[Any]) -> dict[int, Array]:
    """The arrays of a launch by their addresses, those in structures included."""
    values = (*arguments, *arrays_in_structures)
    arrays_in_structures.clear()
    return {value.ctypes.data: value for value in values if isinstance(value, np.ndarray)}


def _argument(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, float):
        return ctypes.c_float(value)
    if isinstance(value, (int, np.integer)):
        return ctypes.c_int32(int(value))
    return value


def to_bits(values: Array, dtype: str) -> Array:
    """float32 values as an array of ``f32``, ``bf16`` (its bits) or ``f16``, rounded to the nearest."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "f32":
        return values
    if dtype == "f16":
        return values.astype(np.float16)
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_floats(values: Array) -> Array:
    """The float64 values of an array of :func:`to_bits`."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


@functools.cache
def host_kernels() -> HostKernels:
    """The library of all kernels."""
    if ON_GPU:
        from support.kernels.gpu import GpuKernels

        return GpuKernels()
    if CHECKED:
        from support.kernels.emulator import CheckedKernels

        return CheckedKernels(build.build_kernels(instrumented=True))
    return HostKernels(build.build_kernels())
