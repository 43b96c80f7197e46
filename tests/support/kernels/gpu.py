"""The CUDA kernels on a device of the driver in the system: a GPU, or the emulated device.

The images are those of NVRTC for the device's architecture, from the cache of :mod:`support.kernels.cuda`.
"""

from __future__ import annotations

import ctypes
import functools
import re
from typing import TYPE_CHECKING, Any

from emu.client import Device, DriverError
from support.kernels import cuda
from support.kernels.emulator import MAX_DYNAMIC_SHARED, on_device, upload
from support.kernels.quantised_variants import WARPGROUP_TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
MAJOR, MINOR = 75, 76
#: The kernels that are compiled for one variant at a time, and its definition.
VARIANTS = [
    (
        "attention_warpgroup.cu",
        r"attention_prefill_warpgroup_(?P<type>b?f16)_(?P<kv>\w+)_(?P<dim>\d+)",
        "{type},{kv},{dim}",
    ),
    (
        "attention.cu",
        r"attention_[a-z_]+?_(?P<type>b?f16)_(?P<kv>\w+)_(?P<dim>\d+)",
        "{type},{element},{kv},{dim}",
    ),
    (
        "gemm_quantised_warpgroup.cu",
        r"gemm_warpgroup_[a-z]+_(?P<code>code\d|e4m3)_(?P<format>\d+_[a-z]+\d*_[a-z]+_[a-z]+\d+)",
        "{code},{format}",
    ),
    (
        "gemm_quantised.cu",
        r"[a-z_]+_(?P<code>code\d|e4m3)_(?P<format>\d+_[a-z]+\d*_[a-z]+_[a-z]+\d+)",
        "{code},{format}",
    ),
]
#: The elements of the KV types of which they are not the name.
ELEMENTS = {"uint4": "u4"}


def variant_of(name: str) -> tuple[Path, list[str]] | None:
    """The file of a kernel that is compiled for a variant, and its definition."""
    for file, pattern, definition in VARIANTS:
        if match := re.fullmatch(pattern, name):
            words = match.groupdict()
            kv = words.get("kv", "")
            text = definition.format(element=ELEMENTS.get(kv, kv), **words).replace("_", ",")
            return cuda.SOURCES / file, [f"VARIANT={text}"]
    return None


@functools.cache
def exported(path: Path) -> list[str]:
    """Patterns of the names of a file's kernels, in which the arguments of macros are words."""
    found = []
    for text in re.findall(r"EXPORT\((\S+)\)", path.read_text()):
        words = text.split("##")
        is_name = [len(words) == 1 or word[0] == "_" or word[-1] == "_" for word in words]
        found.append(
            "".join(word if literal else r"\w+" for word, literal in zip(words, is_name, strict=True))
        )
    return found


def source_of(
    name: str, architecture: str, folders: Sequence[Path] = (cuda.SOURCES,)
) -> tuple[Path, list[str]]:
    """The file of a kernel for an architecture, and the definitions that it is compiled with."""
    if variant := variant_of(name):
        return variant
    for path in (path for folder in folders for path in sorted(folder.glob("*.cu"))):
        if any(re.fullmatch(pattern, name) for pattern in exported(path)):
            _, log = cuda.compiled(path, architecture)
            if name in cuda.resources(log):
                return path, []
    raise KeyError(name)


class Gpu(Device):
    """A device, with the kernels of some folders by name."""

    #: By default, those of the product.
    folders: Sequence[Path] = (cuda.SOURCES,)

    def __init__(self) -> None:
        super().__init__("libcuda.so.1")
        self.modules: dict[str, int] = {}
        self.open()

    @functools.cached_property
    def architecture(self) -> str:
        """The target of the compiler."""
        major, minor = (self.output(ctypes.c_int, "cuDeviceGetAttribute", code, 0) for code in (MAJOR, MINOR))
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def function(self, name: str) -> int:
        """A kernel. Its module is compiled and loaded at its first use."""
        if name not in self.functions:
            path, defines = self.source_of(name)
            key = " ".join([path.stem, *defines])
            if key not in self.modules:
                image, _ = cuda.compiled(path, self.architecture, *defines)
                self.modules[key] = self.output(ctypes.c_void_p, "cuModuleLoadData", image)
            self.module = self.modules[key]
            super().function(name)
        return self.functions[name]

    def source_of(self, name: str) -> tuple[Path, list[str]]:
        """The file of a kernel, and the definitions that it is compiled with."""
        return source_of(name, self.architecture, self.folders)

    @property
    def has_warpgroups(self) -> bool:
        """Whether the device has the instructions of `warpgroup.cuh`."""
        return self.architecture == WARPGROUP_TARGET

    def allow_shared(self, name: str, size: int) -> None:
        """Allow launches of a kernel with dynamic shared memory of a size."""
        if size:
            self.call("cuFuncSetAttribute", self.function(name), MAX_DYNAMIC_SHARED, size)

    def reset(self) -> None:
        """Start again after an error that ends the context."""
        self.code("cuDevicePrimaryCtxRelease_v2", 0)
        self.functions.clear()
        self.modules.clear()
        self.open()


class GpuKernels(cuda.HostKernels):
    """Kernels that run on copies of the arrays on the device."""

    def __init__(self) -> None:
        self.device = Gpu()
        self.has_warpgroups = self.device.has_warpgroups

    def __contains__(self, name: str) -> bool:
        try:
            return bool(self.device.source_of(name))
        except KeyError:
            return False

    def launch(self, name: str, grid: Sequence[int], block: int, *arguments: Any, shared: int = 0) -> None:
        """Run a kernel, and copy the arrays back. An error of the device ends the context, and is raised."""
        arrays = cuda.arrays_of(arguments)
        d = self.device
        try:
            copies = {address: upload(d, array) for address, array in arrays.items()}
            d.call("cuCtxSynchronize")  # the stream does not wait for these copies
            d.allow_shared(name, shared)
            values = [on_device(argument, copies) for argument in arguments]
            stream = d.output(ctypes.c_void_p, "cuStreamCreate", 1)
            d.launch(stream, name, (tuple(grid), block, shared), *values)
            d.wait(stream)
            for address, array in arrays.items():
                if array.flags.writeable and array.nbytes:
                    d.call("cuMemcpyDtoH_v2", ctypes.c_void_p(address), copies[address], array.nbytes)
            for copy in filter(None, copies.values()):
                d.call("cuMemFree_v2", copy)
            d.call("cuStreamDestroy_v2", stream)
        except DriverError as error:
            d.reset()
            raise RuntimeError(f"{name}: {error}") from error


def has_warpgroups() -> bool:
    """Whether the kernels of the tests include those of ``*_warpgroup.cu``: not on every GPU."""
    return not cuda.ON_GPU or GpuKernels().has_warpgroups
