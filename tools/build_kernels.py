"""Compile the CUDA kernels for devices, into the archive of the package.

A wheel that has the archive needs no NVRTC on machines with these devices::

    python tools/build_kernels.py python/penstock/kernels sm_80 sm_90a

Requires the core with its test hooks (``make build``) and NVRTC. A driver loads kernels of its own major
version of CUDA and older ones: those that NVRTC 12 compiles can be used with drivers of CUDA 12 and 13.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # of the module `support`, which needs no other package
#: The sizes of heads, and the types of models with those of their KV caches.
HEAD_DIMS = (64, 80, 96, 128, 256)
ATTENTION = [
    f"{dtype},{cache},{dim}"
    for dtype, dim in product(["bf16", "f16"], HEAD_DIMS)
    for cache in (f"{dtype},{dtype}", "int8,int8", "u4,uint4")
]
WARPGROUP_ATTENTION = [
    f"{dtype},{cache}" for dtype in ("bf16", "f16") for cache in (f"{dtype},64", f"{dtype},128", "int8,128")
]


def sources(architecture: str) -> list[tuple[str, str]]:
    """Files of kernels of an architecture, with the variants that are compiled."""
    from support.kernels.quantised_variants import VARIANTS, WARPGROUP_TARGET, WARPGROUP_VARIANTS

    variants = {
        "attention.cu": ATTENTION,
        "attention_warpgroup.cu": WARPGROUP_ATTENTION,
        "gemm_quantised.cu": VARIANTS,
        "gemm_quantised_warpgroup.cu": WARPGROUP_VARIANTS,
    }
    files = sorted(path.name for path in (ROOT / "cuda").glob("*.cu"))
    if architecture != WARPGROUP_TARGET:
        files = [file for file in files if not file.endswith("_warpgroup.cu")]
    found = [(file, variant) for file in files for variant in variants.get(file, [""])]
    if architecture == "sm_80":  # devices of 8.9, which multiply 8-bit floats, also run these kernels
        found = [(file, variant) for file, variant in found if not variant.endswith(",fp8")]
    return found


def archive(jobs: list[tuple[str, str, str]]) -> None:
    """Compile files of kernels, each with a variant and an architecture, into `PENSTOCK_KERNEL_ARCHIVE`."""
    from support import hooks

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for _ in threads.map(lambda job: hooks.archive_cuda_kernel(*job), jobs):
            pass


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the archive")
    parser.add_argument("architectures", nargs="+", help="such as sm_90a")
    arguments = parser.parse_args()
    os.environ["PENSTOCK_KERNEL_ARCHIVE"] = str(arguments.folder.absolute())
    jobs = [
        (*source, architecture)
        for architecture in arguments.architectures
        for source in sources(architecture)
    ]
    archive(jobs)
    size = sum(path.stat().st_size for path in arguments.folder.rglob("*.cubin"))
    print(f"{len(jobs)} files of kernels, {size / 2**20:.1f} MiB in {arguments.folder}")


if __name__ == "__main__":
    main()
