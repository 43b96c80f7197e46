"""Builds the emulated CUDA driver and libraries of kernels for the host, incrementally, into `target/emu`.

From the command line, it builds everything and prints the folder: `python tests/emu/build.py`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KERNELS = ROOT / "cuda"
OUTPUT = ROOT / "target" / "emu"

WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter", "-Wno-ignored-attributes"]
COMMON = ["-std=c++17", "-fPIC", "-g1", "-fno-strict-aliasing", "-pthread", *WARNINGS, f"-I{HERE}"]
MACHINE = {"x86_64": ["-march=x86-64-v3"]}.get(platform.machine(), [])
#: Products and sums are not contracted, so that bits do not depend on the compiler's choice for a loop.
HOST_KERNEL = [
    *("-O3", *MACHINE, "-ffp-contract=off", "-fvisibility=hidden", "-DPENSTOCK_HOST"),
    f"-I{KERNELS}",
]
INSTRUMENTED = ["-O2", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]


class BuildError(Exception):
    """A compiler is missing or has reported errors."""


@functools.cache
def compiler() -> str:
    """The path of the C++ compiler: CXX, or g++."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"the C++ compiler {name!r} is missing: install g++, or set CXX")
    return path


@functools.cache
def compiler_version() -> str:
    command = [compiler(), "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.partition("\n")[0]


@functools.cache
def digest(path: Path) -> str:
    """The hash of a source, which does not change while a process runs."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_fresh(output: Path, command: list[str]) -> bool:
    """Whether the output was made by this command from files with this content."""
    try:
        record = json.loads(output.with_name(output.name + ".json").read_text())
        if not output.exists() or record["command"] != [compiler_version(), *command]:
            return False
        return all(digest(Path(path)) == value for path, value in record["inputs"].items())
    except (OSError, ValueError, KeyError):
        return False


def inputs_of(listing: Path) -> list[Path]:
    """The project's files in a list of dependencies by the compiler."""
    words = listing.read_text().replace("\\\n", " ").split()[1:]
    paths = {Path(word).resolve() for word in words}
    return sorted(path for path in paths if path.is_relative_to(ROOT))


def make(output: Path, command: list[str], inputs: Sequence[Path] | None = None) -> None:
    """Run the compiler, unless the output is fresh. Without `inputs`, the compiler lists the files."""
    if is_fresh(output, command):
        return
    listing = output.with_name(output.name + ".d")
    partial = output.with_name(output.name + ".partial")
    arguments = [*command, "-o", str(partial)]
    if inputs is None:
        arguments += ["-MD", "-MF", str(listing)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(arguments)}\n{done.stderr}")
    if done.stderr:
        sys.stderr.write(done.stderr)
    partial.replace(output)
    digest.cache_clear()
    sources = inputs_of(listing) if inputs is None else inputs
    record = {
        "command": [compiler_version(), *command],
        "inputs": {str(path): digest(path) for path in sources},
    }
    output.with_name(output.name + ".json").write_text(json.dumps(record))


def compile_objects(prefix: str, sources: Sequence[Path], flags: list[str]) -> list[Path]:
    """Compile sources, at most two at a time."""

    def compile_one(source: Path) -> Path:
        output = OUTPUT / f"{prefix}.{source.stem}.o"
        make(output, [compiler(), *COMMON, *flags, "-x", "c++", "-c", str(source)])
        return output

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def link(name: str, objects: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    output = OUTPUT / name
    files = [str(path) for path in objects]
    command = [compiler(), "-shared", "-pthread", "-Wl,-z,defs", "-Wl,-Bsymbolic", *files, *flags]
    libraries = [OUTPUT / "libemu.so"] if "-lemu" in flags else []
    make(output, command, [*objects, *libraries])
    return output


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Exclude other processes that build into the same folder."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    with (OUTPUT / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_runtime() -> Path:
    """libemu.so, which runs blocks of CUDA threads. A library of its own, as runtime.h explains."""
    sources = [HERE / name for name in ("block.cpp", "fiber.cpp", "grid.cpp", "primitives.cpp")]
    objects = compile_objects("emu", sources, ["-O3", *MACHINE])
    return link("libemu.so", objects, ["-Wl,-soname,libemu.so"])


def build_library(
    name: str, sources: Sequence[Path], *, instrumented: bool = False, defines: Sequence[str] = ()
) -> Path:
    """Compile kernels for the host; the library's path.

    The library exports the functions of abi.h: Python calls `emu_launch` through ctypes, the emulated driver
    reads the path from EMU_KERNELS. The driver checks every access of an instrumented library.
    """
    if instrumented:
        name += "_checked"
    flags = [*HOST_KERNEL, *(INSTRUMENTED if instrumented else []), *(f"-D{define}" for define in defines)]
    with locked():
        build_runtime()
        objects = compile_objects(name, sources, flags)
        # Not instrumented themselves.
        own = [HERE / "library.cpp", *([HERE / "instrument.cpp"] if instrumented else [])]
        marker = ["-DEMU_INSTRUMENTED"] if instrumented else []
        objects += compile_objects(name, own, [*HOST_KERNEL, *marker])
        return link(f"lib{name}.so", objects, [f"-L{OUTPUT}", "-lemu", "-Wl,-rpath,$ORIGIN"])


def build_kernels(*, instrumented: bool = False) -> Path:
    """Compile the kernels of the product."""
    return build_library("kernels", sorted(KERNELS.glob("*.cu")), instrumented=instrumented)


if __name__ == "__main__":
    build_kernels()
    build_kernels(instrumented=True)
    print(OUTPUT)
