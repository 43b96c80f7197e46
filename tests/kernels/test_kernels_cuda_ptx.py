"""Properties of CUDA kernels that their results do not show: the accesses of memory in PTX."""

from __future__ import annotations

import re

import pytest

from support.kernels import cuda

pytestmark = pytest.mark.timeout(600)  # compilers are slow on a machine with other work

#: The parameters of kernels that no kernel writes.
CONSTANTS = {"rms_norm": {1}, "embed": {0}}

ROWS = ["copy.cu", "embedding.cu", "gated.cu", "rms_norm.cu"]

#: The kernel of rows that have no wide accesses.
NARROW = "gather_halves"


def params_of_nc_loads(code: str) -> set[int]:
    """The parameters of a kernel from which the addresses of ld.global.nc are computed."""
    sources: dict[str, set[int]] = {}
    for target, param in re.findall(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)", code):
        sources[target] = {int(param)}
    steps = re.findall(r"^\s*(?!ld\.|st\.|@)[\w.]+\s+(%rd\d+), (.*);", code, re.MULTILINE)
    for _ in range(20):  # until nothing changes
        before = sum(map(len, sources.values()))
        for target, operands in steps:
            for register in re.findall(r"%rd\d+", operands):
                sources.setdefault(target, set()).update(sources.get(register, ()))
        if sum(map(len, sources.values())) == before:
            break
    addresses = re.findall(r"ld\.global\.nc\S*\s+[^;]*\[(%rd\d+)", code)
    return set().union(*(sources[address] for address in addresses))


@pytest.mark.parametrize("file", ROWS)
def test_results_of_other_kernels_are_not_read_by_nc(file: str) -> None:
    for name, code in cuda.ptx(file).items():
        operation = re.sub(r"_(f32|bf16|f16|int8|fp8)$", "", name)
        assert params_of_nc_loads(code) == CONSTANTS.get(operation, set()), name


@pytest.mark.parametrize("file", ROWS)
def test_rows_have_wide_accesses_in_batches(file: str) -> None:
    kernels = {name: code for name, code in cuda.ptx(file).items() if name != NARROW}
    for name, code in kernels.items():
        accesses = re.findall(r"(?:ld|st)\.global(?:\.nc)?\.v4", code)
        batches = re.findall(r"l{2,}s", "".join(access[0] for access in accesses))
        assert batches, name


@pytest.mark.parametrize("kernel", ["gemm_narrow_bf16", "gemm_wide_f16"])
def test_products_add_to_out_in_batches(kernel: str) -> None:
    code = cuda.ptx("gemm.cu")[kernel]
    runs = re.findall(r"(?:ld|st)\.global", code)
    longest, run = 0, 0
    for access in runs:
        run = run + 1 if access.startswith("ld") else 0
        longest = max(longest, run)
    assert longest >= 16


@pytest.mark.parametrize(
    ("file", "kernel"),
    [("gemm.cu", "gemm_narrow_bf16"), ("gemm.cu", "gemm_wide_bf16"), ("gemm_f32.cu", "gemm_narrow_f32")],
)
def test_products_copy_a_step_without_branches(file: str, kernel: str) -> None:
    code = cuda.ptx(file)[kernel]
    step = re.search(r"cp\.async\.wait_group(?:(?!wait_group)[\s\S])*?(?:mma\.sync|fma\.rn)", code)
    assert step is not None
    assert step[0].count("cp.async.cg") >= 3
    assert not re.search(r"\bbra\b", step[0])


@pytest.mark.parametrize("kernel", ["gemm_middle", "gemm_wide"])
@pytest.mark.parametrize(("code", "scales"), [("code4", "scale16"), ("e4m3", "scale32")])
def test_quantised_weights_of_large_tiles_pass_through_the_ring(kernel: str, code: str, scales: str) -> None:
    kernels = cuda.ptx("gemm_quantised.cu", f"VARIANT={code},64,{scales},centred,bf16")
    program = kernels[f"{kernel}_{code}_64_{scales}_centred_bf16"]
    step = re.search(r"cp\.async\.wait_group(?:(?!wait_group)[\s\S])*?mma\.sync", program)
    assert step is not None
    assert step[0].count("cp.async.cg") >= 3
    assert not re.search(r"ld\.global(?:\.nc)?\.v4", program)
