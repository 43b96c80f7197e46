"""Adds compiled CUDA kernels to a wheel, which makes a second wheel with a local version."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

from targets import ROOT

#: The kernels of `make kernels`.
KERNELS = ROOT / "python" / "penstock" / "kernels"
#: The local version: PyPI refuses it, so pip installs this wheel only if it is named.
LOCAL = "cuda"


def add_kernels(out: Path) -> Path:
    """Write a copy of the wheel in `out` for Linux on x86-64 that has the compiled kernels, too."""
    kernels = sorted(path for path in KERNELS.rglob("*") if path.is_file())
    wheels = [path for path in out.glob("*-abi3-manylinux*_x86_64.whl") if f"+{LOCAL}-" not in path.name]
    if not kernels or len(wheels) != 1:
        sys.exit(f"expected kernels in {KERNELS}, and one wheel for Linux on x86-64 in {out}")
    name, version, rest = wheels[0].name.split("-", 2)
    local = f"{version}+{LOCAL}"
    copy = out / f"{name}-{local}-{rest}"
    records: list[str] = []
    with zipfile.ZipFile(wheels[0]) as old, zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as new:

        def write(path: str, content: bytes, like: zipfile.ZipInfo) -> None:
            info = zipfile.ZipInfo(path, like.date_time)
            info.external_attr, info.compress_type = like.external_attr, zipfile.ZIP_DEFLATED
            new.writestr(info, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            records.append(f"{path},sha256={digest},{len(content)}\n")

        [record] = [item for item in old.infolist() if item.filename.endswith(".dist-info/RECORD")]
        for item in old.infolist():
            content = old.read(item)
            path = item.filename.replace(f"{name}-{version}.dist-info/", f"{name}-{local}.dist-info/", 1)
            if path.endswith(".dist-info/METADATA"):
                content = content.replace(f"\nVersion: {version}\n".encode(), f"\nVersion: {local}\n".encode(), 1)
            if item is not record:
                write(path, content, item)
        for path in kernels:
            write(f"penstock/kernels/{path.relative_to(KERNELS).as_posix()}", path.read_bytes(), record)
        path = record.filename.replace(f"{name}-{version}.dist-info/", f"{name}-{local}.dist-info/", 1)
        info = zipfile.ZipInfo(path, record.date_time)
        info.external_attr, info.compress_type = record.external_attr, zipfile.ZIP_DEFLATED
        new.writestr(info, "".join([*records, f"{path},,\n"]))
    return copy
