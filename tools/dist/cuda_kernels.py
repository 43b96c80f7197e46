"""Adds compiled CUDA kernels to a wheel, which makes a second wheel with a local version."""

from __future__ import annotations

import sys
from pathlib import Path

from archive import rewrite
from targets import ROOT

#: The kernels of `make kernels`.
KERNELS = ROOT / "python" / "penstock" / "kernels"
#: The local version and the folder of the wheel. PyPI refuses it, and pip would prefer it in the same folder.
LOCAL = "cuda"


def add_kernels(out: Path) -> Path:
    """Write a copy of the wheel in `out` for Linux on x86-64, with the compiled kernels, to `out/cuda`."""
    kernels = sorted(path for path in KERNELS.rglob("*") if path.is_file())
    wheels = list(out.glob("*-abi3-manylinux*_x86_64.whl"))
    if not kernels or len(wheels) != 1:
        sys.exit(f"expected kernels in {KERNELS}, and one wheel for Linux on x86-64 in {out}")
    name, version, rest = wheels[0].name.split("-", 2)
    local = f"{version}+{LOCAL}"

    def edit(path: str, content: bytes) -> tuple[str, bytes]:
        path = path.replace(f"{name}-{version}.dist-info/", f"{name}-{local}.dist-info/", 1)
        if path.endswith(".dist-info/METADATA"):
            content = content.replace(f"\nVersion: {version}\n".encode(), f"\nVersion: {local}\n".encode(), 1)
        return path, content

    copy = out / LOCAL / f"{name}-{local}-{rest}"
    copy.parent.mkdir(exist_ok=True)
    added = {
        f"penstock/kernels/{path.relative_to(KERNELS).as_posix()}": path.read_bytes() for path in kernels
    }
    rewrite(wheels[0], copy, edit, added)
    return copy
