"""The kernels of the measuring plan, compiled beforehand for a machine with a GPU."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

from shapes import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

#: Where `--prepare` writes, and the other runs look.
PREPARED = REPOSITORY / "target" / "gpu" / "kernels"
ARCHITECTURE = "sm_90a"
#: Variants of kernels that the engines of the plan load, besides all files without variants.
ENGINE_VARIANTS = ("bf16,bf16,bf16,128", "bf16,int8,int8,128", "bf16,bf16,128", "bf16,int8,128")
ENGINE_FORMATS = ("code4,32,scale16,affine,bf16", "code8,64,scale16,centred,bf16")


def environment(folder: Path) -> dict[str, str]:
    """The variables with which kernels are taken from a folder."""
    variables = {"PENSTOCK_TEST_CUBINS": folder / "cubins", "PENSTOCK_KERNEL_ARCHIVE": folder / "archive"}
    return {name: str(path) for name, path in variables.items() if path.is_dir()}


def prepare(folder: Path, *, archive: bool = True) -> None:
    """Compile all kernels that the sections launch, and those of the engines."""
    folder = folder.absolute()
    (folder / "cubins").mkdir(parents=True, exist_ok=True)
    (folder / "archive").mkdir(exist_ok=True)
    os.environ |= environment(folder)
    start = time.monotonic()
    import plan_attention
    import plan_checks
    import plan_counters
    import plan_facts
    import plan_quantised
    from plan_bench import PlanBench

    from support.kernels import cuda
    from support.kernels.gpu import source_of

    modules = (plan_facts, plan_attention, plan_quantised, plan_counters, plan_checks)
    lists = (module.KERNELS for module in modules)
    for name in dict.fromkeys(name for names in lists for name in names):
        path, defines = source_of(name, ARCHITECTURE, PlanBench.folders)
        cuda.compiled(path, ARCHITECTURE, *defines)
    if archive:
        write_archive()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    about = {"nvrtc": cuda.compiler_version(), "architecture": ARCHITECTURE, "bytes": size}
    (folder / "about.json").write_text(json.dumps(about) + "\n")
    seconds = time.monotonic() - start
    print(f"{size / 2**20:.1f} MiB of kernels by NVRTC {about['nvrtc']} in {folder}, {seconds:.0f} s")


def write_archive() -> None:
    """Compile the files that the engines of the plan load, into PENSTOCK_KERNEL_ARCHIVE."""
    sys.path.insert(0, str(REPOSITORY / "tools"))
    import build_kernels

    wanted = {"", *ENGINE_VARIANTS, *ENGINE_FORMATS}
    build_kernels.archive(
        [
            (file, variant, ARCHITECTURE)
            for file, variant in build_kernels.sources(ARCHITECTURE)
            if variant in wanted
        ]
    )
