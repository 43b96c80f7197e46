"""Every CUDA kernel compiles for every target, and keeps its values in registers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from support.kernels import cuda
from support.kernels.quantised_variants import VARIANTS, WARPGROUP_TARGET, WARPGROUP_VARIANTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from _pytest.mark.structures import ParameterSet

pytestmark = pytest.mark.timeout(600)  # compilers are slow on a machine with other work

#: Bytes of static shared memory that a block can have without asking for more.
SHARED_LIMIT = 48 * 1024


def compilations() -> Iterator[ParameterSet]:
    """Each variant of each file for each target.

    All but one variant for one target of a file are rare, and all of attention, which takes a minute.
    """
    for number, path in enumerate(sorted(cuda.SOURCES.glob("*.cu"))):
        targets = (WARPGROUP_TARGET,) if path.stem.endswith("_warpgroup") else cuda.TARGETS
        kept = (cuda.variants(path)[0], targets[number % len(targets)])
        for defines, target in itertools.product(cuda.variants(path), targets):
            marks = [] if (defines, target) == kept and path.stem != "attention" else [pytest.mark.rare]
            yield pytest.param(path, defines, target, id=" ".join([path.stem, *defines, target]), marks=marks)


@pytest.mark.parametrize(("path", "defines", "target"), list(compilations()))
def test_file_compiles_without_spills(path: Path, defines: list[str], target: str) -> None:
    for name in compile_without_spills(path, target, *defines):
        assert name in cuda.host_kernels(), f"EXPORT({name}) is missing"


@pytest.mark.rare
@pytest.mark.parametrize(
    ("variant", "target"),
    [
        ("bf16,bf16,bf16,64", "sm_90a"),
        ("bf16,int8,int8,64", "sm_80"),
        ("bf16,bf16,bf16,96", "sm_100a"),
        ("f16,f16,f16,128", "sm_120a"),
    ],
)
def test_other_heads_compile_without_spills(variant: str, target: str) -> None:
    kernels = compile_without_spills(cuda.SOURCES / "attention.cu", target, f"VARIANT={variant}")
    assert len(kernels) == 4


#: The variants for all formats of matrices that the loader accepts, each with one of the targets.
QUANTISED = [
    pytest.param(variant, target, id=f"{variant} {target}")
    for index, variant in enumerate(VARIANTS)
    for target in [cuda.TARGETS[index % len(cuda.TARGETS)]]
]


@pytest.mark.rare
@pytest.mark.parametrize(("variant", "target"), QUANTISED)
def test_every_quantised_format_compiles_without_spills(variant: str, target: str) -> None:
    kernels = compile_without_spills(cuda.SOURCES / "gemm_quantised.cu", target, f"VARIANT={variant}")
    assert len(kernels) == 7


@pytest.mark.rare
@pytest.mark.parametrize("variant", WARPGROUP_VARIANTS, ids=lambda variant: f"{variant} {WARPGROUP_TARGET}")
def test_every_format_by_warpgroups_compiles_without_spills(variant: str) -> None:
    path = cuda.SOURCES / "gemm_quantised_warpgroup.cu"
    assert len(compile_without_spills(path, WARPGROUP_TARGET, f"VARIANT={variant}")) == 1


def compile_without_spills(path: Path, target: str, *defines: str) -> set[str]:
    """The kernels of a file, which keep their values in registers."""
    cubin, log = cuda.compiled(path, target, *defines)
    assert cubin[:4] == b"\x7fELF"
    kernels = cuda.resources(log)
    assert kernels
    # The messages on products of warpgroups that are serialised, and on waits for them that are added.
    assert "(C75" not in log, log
    for name, used in kernels.items():
        assert used.spilled_bytes == 0, f"{name}: {used}"
        assert used.stack_bytes == 0, f"{name}: {used}"
        assert used.shared_bytes <= SHARED_LIMIT, f"{name}: {used}"
    return set(kernels)


@pytest.mark.parametrize("head_dim", [16, 72, 272])
def test_other_head_dimensions_do_not_compile(head_dim: int) -> None:
    with pytest.raises(RuntimeError, match="head dimensions: multiples of 16 from 32 to 256"):
        cuda.compiled(cuda.SOURCES / "attention.cu", "sm_80", f"VARIANT=bf16,bf16,bf16,{head_dim}")


def test_spill_is_found(tmp_path: Path) -> None:
    lines = "".join(f"x{i} = x{i} * x{(i * 7 + 1) % 64} + x{(i + 1) % 64};\n" for i in range(64))
    loads = "".join(f"float x{i} = p[{i} * n];\n" for i in range(64))
    stores = "".join(f"p[{i} * n] = x{i};\n" for i in range(64))
    source = f"""extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* p, int n) {{
        {loads} for (int i = 0; i < n; i++) {{ {lines} }} {stores} }}"""
    path = tmp_path / "spills.cu"
    path.write_text(source)
    _, log = cuda.compiled(path, "sm_80")
    assert cuda.resources(log)["spills"].spilled_bytes > 0


def test_error_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.cu"
    path.write_text('#include "common.cuh"\n\nint x = nothing;\n')
    with pytest.raises(RuntimeError, match=r'wrong\.cu\(3\): error: identifier "nothing" is undefined'):
        cuda.compiled(path, "sm_80")
