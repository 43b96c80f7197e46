"""Builds the emulated CUDA driver and libraries of kernels for the host, incrementally, into `target/emu`.

From the command line, it builds everything and prints the folder: `python tests/emu/build.py`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
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

if __name__ == "__main__":  # as a script, it is outside of the package
    sys.path.insert(0, str(Path(__file__).parent.parent))

from emu import gen_api

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KERNELS = ROOT / "cuda"
PROBES = ROOT / "benches" / "gpu" / "probes"
OUTPUT = ROOT / "target" / "emu"

WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter", "-Wno-ignored-attributes"]
COMMON = ["-std=c++17", "-fPIC", "-g1", "-fno-strict-aliasing", "-pthread", *WARNINGS, f"-I{HERE}"]
MACHINE = {"x86_64": ["-march=x86-64-v3"]}.get(platform.machine(), [])
#: Products and sums are not contracted to fused operations, so that bits do not depend on the compiler's
#: choice for a loop. NVRTC contracts them, except those of intrinsics such as `__fmul_rn`. Levels above -O1
#: take minutes more to compile, and the tests are not faster: they spend their time in fibers.
HOST_KERNEL = [
    *("-O1", *MACHINE, "-ffp-contract=off", "-fvisibility=hidden", "-DPENSTOCK_HOST"),
    "-fno-optimize-sibling-calls",  # return addresses are places in kernels
    f"-I{KERNELS}",
]
CONTRACTED = ["-O3", "-ffp-contract=fast", "-DEMU_CONTRACTED"]
INSTRUMENTED = ["-fsanitize=thread,alignment", "--param", "tsan-instrument-func-entry-exit=0"]


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
        known = json.loads(output.with_name(output.name + ".json").read_text())
        if not output.exists() or known["command"] != [compiler_version(), *command]:
            return False
        return all(digest(Path(path)) == value for path, value in known["inputs"].items())
    except (OSError, ValueError, KeyError):
        return False


def record(output: Path, command: list[str], inputs: Sequence[Path]) -> None:
    """Write down how a fresh output was made."""
    content = {
        "command": [compiler_version(), *command],
        "inputs": {str(path): digest(path) for path in inputs},
    }
    output.with_name(output.name + ".json").write_text(json.dumps(content))


def inputs_of(listing: Path) -> list[Path]:
    """The files in a list of dependencies by the compiler, without the system's headers."""
    words = listing.read_text().replace("\\\n", " ").split()[1:]
    return sorted({Path(word).resolve() for word in words})


def make(output: Path, command: list[str], inputs: Sequence[Path] | None = None) -> None:
    """Run the compiler, unless the output is fresh. Without `inputs`, the compiler lists the files."""
    if is_fresh(output, command):
        return
    listing = output.with_name(output.name + ".d")
    partial = output.with_name(output.name + ".partial")
    arguments = [*command, "-o", str(partial)]
    if inputs is None:
        arguments += ["-MMD", "-MF", str(listing)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(arguments)}\n{done.stderr}")
    if done.stderr:
        sys.stderr.write(done.stderr)
    partial.replace(output)
    digest.cache_clear()
    sources = inputs_of(listing) if inputs is None else inputs
    record(output, command, sources)


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
    import fcntl  # not on Windows

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
    name: str, sources: Sequence[Path], *, instrumented: bool = False, options: Sequence[str] = ()
) -> Path:
    """Compile kernels for the host; the library's path.

    The library exports the functions of abi.h: Python calls `emu_launch` through ctypes, the emulated driver
    reads the path from EMU_KERNELS. The driver checks every access of an instrumented library.
    """
    if instrumented:
        name += "_checked"
    flags = [*HOST_KERNEL, *(INSTRUMENTED if instrumented else []), *options]
    with locked():
        build_runtime()
        objects = compile_objects(name, sources, flags)
        # Not instrumented themselves.
        own = [HERE / "library.cpp", *([HERE / "instrument.cpp"] if instrumented else [])]
        marker = ["-DEMU_INSTRUMENTED"] if instrumented else []
        objects += compile_objects(name, own, [*HOST_KERNEL, *marker])
        return link(f"lib{name}.so", objects, [f"-L{OUTPUT}", "-lemu", "-Wl,-rpath,$ORIGIN"])


def find_bindings() -> Path:
    """The driver's bindings in the crate cudarc of Cargo.lock, which Cargo downloads if need be."""
    cargo = shutil.which("cargo") or shutil.which("cargo", path=Path.home() / ".cargo" / "bin")
    if cargo is None:
        raise BuildError("cargo is missing: install Rust")
    machine = f"{platform.machine()}-unknown-linux-gnu"
    command = [
        *(cargo, "metadata", "--locked", "--format-version", "1", "--filter-platform", machine),
        *("--manifest-path", str(ROOT / "Cargo.toml")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    packages = {package["name"]: package for package in json.loads(done.stdout)["packages"]}
    return Path(packages["cudarc"]["manifest_path"]).parent / "src" / "driver" / "sys" / "mod.rs"


def write_header() -> None:
    """cuda_api.h, the declarations of the driver's functions."""
    output = OUTPUT / "cuda_api.h"
    if not is_fresh(output, []):
        output.write_text(gen_api.header(find_bindings(), HERE / "calls.txt"))
        record(output, [], [ROOT / "Cargo.lock", HERE / "calls.txt", HERE / "gen_api.py"])


def build_driver() -> Path:
    """libcuda.so.1, the emulated driver. cudarc looks for libcuda.so first, so that name exists, too."""
    names = ["device", "faults", "findings", "graphs", "memory", "modules", "shadow", "streams"]
    with locked():
        write_header()
        objects = compile_objects("cuda", [HERE / f"{name}.cpp" for name in names], ["-O2", f"-I{OUTPUT}"])
        path = link("libcuda.so.1", objects, ["-Wl,-soname,libcuda.so.1", "-ldl"])
        other = OUTPUT / "libcuda.so"
        if not other.is_symlink():
            other.symlink_to(path.name)
        return path


def build_cublas() -> Path:
    """The emulated cuBLASLt, under a name of its own: no search finds it."""
    with locked():
        write_header()
        objects = compile_objects("cublas", [HERE / "cublas.cpp"], ["-O2", f"-I{OUTPUT}"])
        return link("libemu_cublas.so", objects, ["-ldl"])


def build_contracted(kernels: str) -> Path:
    """Compile a file of kernels with fused operations wherever the compiler can have them."""
    return build_library(f"{kernels}_contracted", [KERNELS / f"{kernels}.cu"], options=CONTRACTED)


def build_kernels(*, instrumented: bool = False) -> Path:
    """Compile the kernels of the product, of benchmarks, and of the emulator that programs use."""
    sources = [*sorted(KERNELS.glob("*.cu")), *sorted(PROBES.glob("*.cu"))]
    own = [HERE / "cublas_product.cu", *([HERE / "plants" / "rewrite.cu"] if instrumented else [])]
    return build_library("kernels", [*sources, *own], instrumented=instrumented)


def main() -> None:
    """Build everything."""
    try:
        build_kernels()
        build_kernels(instrumented=True)
        build_driver()
        build_cublas()
    except BuildError as error:
        sys.exit(str(error))
    print(OUTPUT)


if __name__ == "__main__":
    main()
