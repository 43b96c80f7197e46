"""A `libcuda.so.1` with answers that environment variables choose: `libcuda.cpp`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from emu.build import compiler

SOURCE = Path(__file__).with_name("libcuda.cpp")


def build(folder: Path, *options: str) -> Path:
    """Build the driver into a new folder; the folder."""
    folder.mkdir()
    library = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *options]
    subprocess.run([compiler(), *flags, "-o", str(library), str(SOURCE)], check=True)
    return folder
