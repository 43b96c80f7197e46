"""Builds wheels from the source distribution, on a Linux machine with an x86-64 CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from licences import write_licences
from sbom import remove_paths
from sdist import build_sdist, commit_time, unpack
from targets import ROOT, Wheel

#: Limit of the size of a wheel.
MAX_BYTES = 6_100_000
#: The linker for Windows.
MINGW = "x86_64-w64-mingw32-gcc"
#: The configuration of PyO3 for Python without the GIL, in the sources.
FREE_THREADED = Path("rust", "python", "pyo3-free-threaded.txt")


def build_wheels(wheels: Sequence[Wheel], out: Path) -> None:
    """Build the source distribution, and wheels from it, in `out`."""
    sources = ROOT / "target" / "wheels-source"
    unpack(build_sdist(out), sources)
    for wheel in wheels:
        build(wheel, sources, out)


def build(wheel: Wheel, sources: Path, out: Path) -> None:
    """Build a wheel from unpacked sources."""
    subprocess.run(["rustup", "target", "add", wheel.target], check=True)  # noqa: S607 - rustup is on the PATH
    if wheel.target.endswith("windows-gnu") and shutil.which(MINGW) is None:
        sys.exit(f"{MINGW} is missing: apt-get install gcc-mingw-w64-x86-64")
    write_licences(wheel.target, sources / "third-party")
    with tempfile.TemporaryDirectory(dir=out) as folder:
        command = [sys.executable, "-m", "maturin", "build", "--release", "--locked", "--offline"]
        command += ["--target", wheel.target, *wheel.options, "--out", folder]
        if wheel.python is not None:
            command += ["--interpreter", "python3.14t"]
        subprocess.run(command, check=True, cwd=sources, env=environment(wheel, sources))
        [path] = Path(folder).glob("*.whl")
        remove_paths(path, sources)
        if path.stat().st_size > MAX_BYTES:
            sys.exit(f"{path.name} has {path.stat().st_size:,} bytes; the limit is {MAX_BYTES:,}")
        path.replace(out / path.name)


def environment(wheel: Wheel, sources: Path) -> dict[str, str]:
    """The environment of a build. Nothing in a wheel depends on the time, or on paths of this machine."""
    target = ROOT / "target" / "wheels"
    remapped = [f"--remap-path-prefix={sources}=/penstock", f"--remap-path-prefix={target}=/penstock/target"]
    variables = {
        # maturin searches the program of zig beside Python.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SOURCE_DATE_EPOCH": str(commit_time()),
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(remapped),
        "CARGO_TARGET_DIR": str(target),
        "CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER": MINGW,
        "MACOSX_DEPLOYMENT_TARGET": "11.0",
    }
    if wheel.python is not None:
        variables["PYO3_CONFIG_FILE"] = str(sources / FREE_THREADED)
    # Those of make and of .cargo/config.toml are for builds in place.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYO3_")}
    return inherited | variables
