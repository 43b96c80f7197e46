"""CUDA matrix products on the host: against float64, and the same bits for every number of rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.kernels import cuda
from support.kernels.gpu import has_warpgroups

if TYPE_CHECKING:
    from support.kernels.cuda import Array

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels

#: Outputs and rows of a block.
TILES = {
    "gemv": (16, 8),
    "gemm_narrow": (64, 32),
    "gemm_middle": (64, 64),
    "gemm_wide": (128, 128),
    "gemm_any": (8, 1),
    "gemm_warpgroup_narrow": (64, 32),
    "gemm_warpgroup_middle": (64, 64),
    "gemm_warpgroup_wide": (128, 128),
    "gemm_warpgroup_widest": (128, 256),
}
#: Stages of the kernels of warpgroups, of 64 columns.
STAGES = {
    "gemm_warpgroup_narrow": 8,
    "gemm_warpgroup_middle": 6,
    "gemm_warpgroup_wide": 6,
    "gemm_warpgroup_widest": 4,
}
#: Products of which a block computes one split.
DIVIDED = {
    "divided_narrow": "gemm_narrow",
    "divided_middle": "gemm_middle",
    "divided_warpgroup": "gemm_warpgroup_narrow",
}
HAS_WARPGROUPS = has_warpgroups()
#: Kernels and types of operands; those of float32 are in a file of their own.
KERNELS = [
    (kernel, dtype)
    for kernel in ("gemv", "gemm_narrow", "gemm_middle", *DIVIDED, *STAGES, "gemm_wide")
    if HAS_WARPGROUPS or "warpgroup" not in kernel
    for dtype in ("bf16", "f16")
]
KERNELS += [("gemv", "f32"), ("gemm_narrow", "f32")]
DTYPES = ("bf16", "f16", "f32")


def kernels_of(dtype: str) -> list[str]:
    """The kernels for operands of a type; the last one has the largest tiles."""
    return [kernel for kernel, of in KERNELS if of == dtype]


SPLIT_COLUMNS = 2048


@pytest.fixture(scope="module")
def kernels() -> cuda.HostKernels:
    return cuda.host_kernels()


class Product(ctypes.Structure):
    """``Product`` of ``cuda/gemm.cu``."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("inner", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("accumulates", ctypes.c_int),
    )


class Chains(ctypes.Structure):
    """``Chains`` of ``cuda/gemm.cu``."""

    _fields_ = (
        ("chains", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("accumulates", ctypes.c_int),
    )


def launch_of(kernel: str) -> tuple[int, int]:
    """The threads of a block of a kernel of tiles, and bytes of its dynamic shared memory."""
    outputs, rows = TILES[kernel]
    stages = STAGES.get(kernel)
    return (2 * outputs, 1024 + stages * 128 * (outputs + rows)) if stages else (128, 0)


@dataclass
class Operands:
    """A product."""

    x: Array
    w: Array
    bias: Array | None = None
    base: Array | None = None

    def run(self, kernels: cuda.HostKernels, kernel: str) -> Array:
        """The product by a kernel, as columns of a wider matrix, of which the others stay as they were."""
        rows, outputs = len(self.x), len(self.w)
        out = np.full((rows + 1, outputs + 3), np.nan, np.float32)
        if self.base is not None:
            out[:rows, :outputs] = self.base
        if kernel in DIVIDED:
            self._run_divided(kernels, DIVIDED[kernel], out)
        else:
            self._run(kernels, kernel, out)
        assert np.isnan(out[rows]).all()
        assert np.isnan(out[:, outputs:]).all()
        return np.ascontiguousarray(out[:rows, :outputs])

    def _run(self, kernels: cuda.HostKernels, kernel: str, out: Array) -> None:
        (rows, inner), outputs = self.x.shape, len(self.w)
        arrays = cuda.addresses(self.x, cuda.constant(self.w), self.bias, out)
        product = Product(*arrays, rows, outputs, inner, outputs + 3, self.base is not None)
        tiles, dtype = self._tiles(kernel), self._dtype()
        if kernel == "gemv":
            threads = 128 if dtype == "f32" else 32 * min(8, -(-inner // SPLIT_COLUMNS))
            kernels.launch(f"gemv_{dtype}", tiles, threads, product)
        elif kernel == "gemm_any":
            kernels.launch(f"gemm_any_{dtype}", tiles[::-1], 256, product)
        else:
            threads, shared = launch_of(kernel)
            kernels.launch(f"{kernel}_{dtype}", [tiles[0] * tiles[1]], threads, product, shared=shared)

    def _run_divided(self, kernels: cuda.HostKernels, kernel: str, out: Array) -> None:
        (rows, inner), outputs = self.x.shape, len(self.w)
        tiles, splits = self._tiles(kernel), -(-inner // SPLIT_COLUMNS)
        chains = np.full((splits, rows, outputs), np.nan, np.float32)
        part = Product(
            *cuda.addresses(self.x, cuda.constant(self.w), None, chains), rows, outputs, inner, outputs, 0
        )
        threads, shared = launch_of(kernel)
        name = f"{kernel}_{self._dtype()}"
        kernels.launch(name, [tiles[0] * tiles[1], splits], threads, part, shared=shared)
        arrays = cuda.addresses(chains, self.bias, out)
        call = Chains(*arrays, rows, outputs, splits, outputs + 3, self.base is not None)
        kernels.launch("add_chains", [-(-outputs // 256), rows], 256, call)

    def _tiles(self, kernel: str) -> list[int]:
        tile_outputs, tile_rows = TILES[kernel]
        return [-(-len(self.w) // tile_outputs), -(-len(self.x) // tile_rows)]

    def _dtype(self) -> str:
        return {"float16": "f16", "float32": "f32"}.get(self.x.dtype.name, "bf16")

    def has_product(self, out: Array) -> bool:
        """Whether `out` equals the product within the rounding errors of its sums, which are near 1.

        The tensor cores of a GPU truncate each sum of 16 products; the emulated ones round it.
        """
        truncates = cuda.ON_GPU and self._dtype() != "f32"
        atol = 3e-6 + (self.x.shape[1] / 16 * 2.0**-23 if truncates else 0)
        return np.allclose(out, self.expected(), rtol=1e-5, atol=atol)

    def expected(self) -> Array:
        """The product in float64."""
        result: Array = cuda.to_floats(self.x) @ cuda.to_floats(self.w).T
        if self.base is not None:
            result = result + self.base
        return result if self.bias is None else result + self.bias


def random_operands(rows: int, outputs: int, inner: int, dtype: str = "bf16") -> Operands:
    rng = np.random.default_rng(rows * 1000 + outputs + inner)
    x = cuda.to_bits(rng.standard_normal((rows, inner)), dtype)
    return Operands(x, cuda.to_bits(rng.standard_normal((outputs, inner)) / inner**0.5, dtype))


SHAPES = [(1, 1, 8), (1, 16, 64), (3, 40, 576), (8, 33, 2048), (9, 70, 2056), (33, 130, 96), (130, 129, 40)]


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_equals_float64(
    kernels: cuda.HostKernels, kernel: str, dtype: str, shape: tuple[int, int, int]
) -> None:
    operands = random_operands(*shape, dtype)
    out = operands.run(kernels, kernel)
    assert operands.has_product(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 333), (9, 8, 70)], ids=str)
def test_product_of_any_columns_equals_float64(
    kernels: cuda.HostKernels, dtype: str, shape: tuple[int, int, int]
) -> None:
    operands = random_operands(*shape, dtype)
    out = operands.run(kernels, "gemm_any")
    assert operands.has_product(out)
    first = Operands(operands.x[:1], operands.w)
    assert np.array_equal(first.run(kernels, "gemm_any"), out[:1])


@pytest.mark.parametrize(("kernel", "dtype"), [*KERNELS, *(("gemm_any", dtype) for dtype in DTYPES)])
@pytest.mark.parametrize("inner", [64, 4104])
def test_epilogues_add_to_out_and_add_the_bias(
    kernels: cuda.HostKernels, kernel: str, dtype: str, inner: int
) -> None:
    operands = random_operands(5, 37, inner, dtype)
    rng = np.random.default_rng(0)
    operands.base = rng.standard_normal((5, 37)).astype(np.float32)
    added = operands.run(kernels, kernel)
    assert operands.has_product(added)
    operands.bias = rng.standard_normal(37).astype(np.float32)
    assert np.array_equal(operands.run(kernels, kernel), added + operands.bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [40, 576, 2048, 4104])
def test_bits_do_not_depend_on_the_rows_or_the_kernel(
    kernels: cuda.HostKernels, dtype: str, inner: int
) -> None:
    operands = random_operands(41, 50, inner, dtype)
    operands.base = np.random.default_rng(1).standard_normal((41, 50)).astype(np.float32)
    *others, largest = kernels_of(dtype)
    expected = operands.run(kernels, largest).view(np.uint32)
    for kernel in others:
        assert np.array_equal(operands.run(kernels, kernel).view(np.uint32), expected)
    for first, last in [(0, 1), (7, 8), (40, 41), (3, 9), (20, 35)]:
        part = Operands(operands.x[first:last], operands.w, None, operands.base[first:last])
        for kernel in kernels_of(dtype):
            out = part.run(kernels, kernel)
            assert np.array_equal(out.view(np.uint32), expected[first:last]), (kernel, first, last)


def test_bits_do_not_depend_on_the_warps_of_gemv(kernels: cuda.HostKernels) -> None:
    operands = random_operands(2, 16, 9 * SPLIT_COLUMNS + 32)
    assert np.array_equal(operands.run(kernels, "gemv"), operands.run(kernels, "gemm_narrow"))


def test_divided_products_read_their_own_columns(kernels: cuda.HostKernels) -> None:
    operands = random_operands(70, 300, 2 * SPLIT_COLUMNS + 40)
    expected = operands.run(kernels, "gemm_wide")
    divided = [kernel for kernel in kernels_of("bf16") if kernel in DIVIDED]
    for kernel in divided:
        assert np.array_equal(operands.run(kernels, kernel), expected)
    first = Operands(operands.x[:, :SPLIT_COLUMNS].copy(), operands.w[:, :SPLIT_COLUMNS].copy())
    operands.x[:, SPLIT_COLUMNS:] = 0
    for kernel in divided:
        assert np.array_equal(operands.run(kernels, kernel), first.run(kernels, "gemv")), kernel


def test_gemv_has_no_limit_of_inner(kernels: cuda.HostKernels) -> None:
    operands = random_operands(1, 16, 33 * SPLIT_COLUMNS + 32)
    assert np.array_equal(operands.run(kernels, "gemv"), operands.run(kernels, "gemm_narrow"))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_row_of_nan_does_not_change_others(kernels: cuda.HostKernels, dtype: str) -> None:
    operands = random_operands(11, 20, 96, dtype)
    expected = {kernel: operands.run(kernels, kernel) for kernel in kernels_of(dtype)}
    operands.x[4] = cuda.to_bits(np.full(96, np.nan), dtype)
    for kernel in expected:
        out = operands.run(kernels, kernel)
        assert np.isnan(out[4]).all()
        others = np.arange(11) != 4
        assert np.array_equal(out[others], expected[kernel][others])


def test_sum_of_float32_has_the_error_of_a_chain(kernels: cuda.HostKernels) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(0.5, 1, (rows, 16384)).astype(np.float32) for rows in (2, 20))
    operands = Operands(x, w)
    # A single chain of 16,384 terms has an error near 1e-5.
    assert np.allclose(operands.run(kernels, "gemv"), operands.expected(), rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_of_a_large_product_is_computed(kernels: cuda.HostKernels, dtype: str) -> None:
    operands = random_operands(9 * 32 + 5, 70, 16, dtype)
    out = operands.run(kernels, "gemm_narrow")
    assert operands.has_product(out)
