"""CUDA quantised GEMM on the host: against float64, and the same bits for every number of rows."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.kernels import cuda
from support.kernels.gpu import has_warpgroups
from support.kernels.quantised_matrix import CODES, FORMATS, Format, Matrix, hash_lines, packed, random_matrix
from support.kernels.quantised_rows import QuantisedRows, quantised
from support.kernels.quantised_variants import WARPGROUP_VARIANTS
from support.paths import DATA

if TYPE_CHECKING:
    from support.kernels.cuda import Array

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels

#: Outputs and rows of a block.
TILES = {
    "gemv_row": (16, 1),
    "gemv_few": (16, 4),
    "gemv": (16, 8),
    "gemm_narrow": (32, 32),
    "gemm_middle": (128, 32),
    "gemm_wide": (128, 64),
    "gemm_warpgroup_wide": (128, 128),
}
#: Kernels whose grid has one tile of rows. The tests divide more rows.
OF_FEW_ROWS = ("gemv_row", "gemv_few", "gemv")
THREADS = {"gemm_middle": 128, "gemm_wide": 256, "gemm_warpgroup_wide": 256}
SPLIT_COLUMNS = 512
FOLLOWS = 1 << 31
HAS_WARPGROUPS = has_warpgroups()
#: Formats, and the type of the rows.
PRODUCTS = [
    *((format_, "bf16") for format_ in FORMATS),
    *((format_, "fp8" if format_.code == "e4m3" else "int8") for format_ in FORMATS),
    (Format("code4", 64, "nested", "stored"), "bf16"),
    (Format("code4", 128, "nested"), "int8"),
]
product_parameters = pytest.mark.parametrize(("format_", "dtype"), PRODUCTS, ids=str)
KERNELS = [kernel for kernel in TILES if HAS_WARPGROUPS or "warpgroup" not in kernel]
kernel_parameters = pytest.mark.parametrize("kernel", KERNELS)
HASHES = DATA / "cuda_quantised.txt"


@pytest.fixture(scope="module")
def kernels() -> cuda.HostKernels:
    return cuda.host_kernels()


class MatrixArgument(ctypes.Structure):
    """``QuantisedMatrix`` of ``cuda/quantised_matrix.cuh``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("group_shift", ctypes.c_int),
        ("has_bf16_scales", ctypes.c_uint16),
        ("has_zero_points", ctypes.c_uint16),
    )

    @classmethod
    def of(cls, matrix: Matrix, data: Array) -> MatrixArgument:
        """The argument for a matrix that is packed as ``data``."""
        format_ = matrix.format
        shift = format_.group.bit_length() - 1 if format_.group else 31
        is_bf16, has_zeros = format_.scales == "bf16", format_.minimum == "zero_point"
        return cls(*cuda.addresses(cuda.constant(data)), *matrix.codes.shape, shift, is_bf16, has_zeros)


class Product(ctypes.Structure):
    """``QuantisedProduct`` of ``cuda/gemm_quantised.cuh``."""

    _fields_ = (
        ("w", MatrixArgument),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("accumulates", ctypes.c_int),
        ("x_group_shift", ctypes.c_int),
    )


class Rows(ctypes.Structure):
    """``QuantisedTableRows`` of ``cuda/gemm_quantised.cu``."""

    _fields_ = (
        ("table", MatrixArgument),
        ("tokens", ctypes.c_void_p),
        ("last_tokens", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


def kernels_of(format_: Format, dtype: str) -> list[str]:
    """The kernels for a format and the type of the rows on this device."""
    has_groups = format_.kernels(dtype).replace("_", ",") in WARPGROUP_VARIANTS
    return [kernel for kernel in KERNELS if has_groups or "warpgroup" not in kernel]


def shared_bytes(kernel: str, format_: Format, dtype: str) -> int:
    """The dynamic shared memory of a block: that of ``gemm_quantised_warpgroup.cu``, from a tile on."""
    if "warpgroup" not in kernel:
        return 0
    outputs, rows = TILES[kernel]
    is_quantised = dtype != "bf16"
    blocks, stages = (2, 4) if is_quantised else (1, 6)
    chunks = 64 // min(format_.group or 64, 64)
    codes, row_scales = blocks * outputs * 8 * CODES[format_.code][0], blocks * rows * 16
    has_factors = is_quantised or format_.has_minima
    totals, factors = 4 * rows * outputs, 2 * blocks * chunks * rows * 8
    stage = rows * 128 + codes + is_quantised * row_scales
    return 1024 + stages * stage + has_factors * factors + totals


def launch_of(
    kernel: str, format_: Format, dtype: str, rows: int, outputs: int, inner: int
) -> tuple[list[int], int, int]:
    """The grid of a product, the threads of a block and its dynamic shared memory."""
    tile_outputs, tile_rows = TILES[kernel]
    tiles = [-(-outputs // tile_outputs), -(-rows // tile_rows)]
    shared = shared_bytes(kernel, format_, dtype)
    threads = THREADS.get(kernel, 32 * min(8, -(-inner // SPLIT_COLUMNS)))
    return [math.prod(tiles)] if shared else tiles, threads, shared


@dataclass
class Operands:
    """A product."""

    x: Array | QuantisedRows
    matrix: Matrix
    bias: Array | None = None
    base: Array | None = None

    def run(self, kernels: cuda.HostKernels, kernel: str) -> Array:
        """The product by a kernel, as columns of a wider matrix, of which the others stay as they were."""
        rows, (outputs, inner) = len(self.x), self.matrix.codes.shape
        most = TILES[kernel][1]
        if kernel in OF_FEW_ROWS and rows > most:
            parts = [self.part(first, first + most) for first in range(0, rows, most)]
            return np.concatenate([part.run(kernels, kernel) for part in parts])
        out = np.full((rows + 1, outputs + 3), np.nan, np.float32)
        if self.base is not None:
            out[:rows, :outputs] = self.base
        data = packed(self.matrix)
        if isinstance(self.x, QuantisedRows):
            x, dtype, x_group_shift = self.x.packed(), self.x.dtype, self.x.group_shift
        else:
            x, dtype, x_group_shift = self.x, "bf16", 0
        call = [*cuda.addresses(x, self.bias, out), rows, outputs + 3, self.base is not None, x_group_shift]
        product = Product(MatrixArgument.of(self.matrix, data), *call)
        grid, threads, shared = launch_of(kernel, self.matrix.format, dtype, rows, outputs, inner)
        name = f"{kernel}_{self.matrix.format.kernels(dtype)}"
        kernels.launch(name, grid, threads, product, shared=shared)
        assert np.isnan(out[rows]).all()
        assert np.isnan(out[:, outputs:]).all()
        return np.ascontiguousarray(out[:rows, :outputs])

    def part(self, first: int, last: int) -> Operands:
        """The product of some rows."""
        base = None if self.base is None else self.base[first:last]
        return Operands(self.x[first:last], self.matrix, self.bias, base)

    def expected(self) -> tuple[Array, Array]:
        """The product in float64, and the sum of the magnitudes that are added in float32."""
        scale, minimum = (value.astype(np.float64) for value in self.matrix.scale_and_minimum())
        numbers = self.matrix.numbers().astype(np.float64)
        x = self.x.values() if isinstance(self.x, QuantisedRows) else cuda.to_floats(self.x)
        centre = self.matrix.format.centre
        magnitudes = np.abs(scale * (numbers - centre)) + np.abs(minimum + scale * centre)
        result, magnitude = x @ (scale * numbers + minimum).T, np.abs(x) @ magnitudes.T
        for added in (self.base, self.bias):
            if added is not None:
                result, magnitude = result + added, magnitude + np.abs(added)
        return result, magnitude


def random_operands(
    format_: Format, rows: int, outputs: int, inner: int, dtype: str = "bf16", x_group: int | None = None
) -> Operands:
    """Random operands; groups of x are as wide as those of the weights, if ``x_group`` is not given."""
    rng = np.random.default_rng([rows, outputs, inner])
    x = rng.standard_normal((rows, inner)).astype(np.float32)
    matrix = random_matrix(format_, outputs, inner)
    if dtype == "bf16":
        return Operands(cuda.to_bits(x, "bf16"), matrix)
    default = max(format_.group, 32) if format_.group else 0
    return Operands(quantised(x, default if x_group is None else x_group, dtype), matrix)


def check(operands: Operands, out: Array, kernel: str = "") -> None:
    expected, magnitude = operands.expected()
    errors = np.abs(out - expected)
    assert (errors <= 1e-6 * magnitude).all(), (kernel, np.max(errors / magnitude))


@product_parameters
def test_product_equals_float64(kernels: cuda.HostKernels, format_: Format, dtype: str) -> None:
    for shape in [(1, 16, 64), (3, 19, 288), (9, 40, 40)]:
        operands = random_operands(format_, *shape, dtype)
        for kernel in kernels_of(format_, dtype):
            check(operands, operands.run(kernels, kernel), kernel)


@kernel_parameters
@pytest.mark.parametrize("shape", [(1, 1, 8), (8, 33, 512), (35, 150, 576), (140, 130, 1096)], ids=str)
def test_every_tile_and_split_is_computed(
    kernels: cuda.HostKernels, kernel: str, shape: tuple[int, int, int]
) -> None:
    operands = random_operands(Format("code4", 128, "f16", "zero_point"), *shape)
    check(operands, operands.run(kernels, kernel))


@pytest.mark.parametrize(
    ("group", "x_group"),
    [(32, 128), (64, 64), (64, 128), (128, 64), (0, 256), (256, 512), (1024, 0), (1024, 1024)],
)
def test_groups_of_weights_and_rows_may_differ(kernels: cuda.HostKernels, group: int, x_group: int) -> None:
    formats = [
        (Format("code4", group, "f16", "stored"), "int8"),
        (Format("code8", group, "f32" if group == 0 else "bf16"), "int8"),
        (Format("e4m3", group, "f32"), "fp8"),
    ]
    for format_, dtype in formats[: 2 if group == 32 else 3]:
        operands = random_operands(format_, 3, 20, 1160, dtype, x_group)
        expected = operands.run(kernels, "gemv")
        check(operands, expected)
        for kernel in kernels_of(format_, dtype):
            assert np.array_equal(operands.run(kernels, kernel), expected), (kernel, format_)


#: Formats for which the kernels of warpgroups take different paths.
BY_WARPGROUPS = [
    (Format("code4", 32, "bf16", "stored"), "int8"),
    (Format("code4", 128, "f16", "zero_point"), "int8"),
    (Format("code8", 128, "bf16"), "int8"),
    (Format("code4", 128, "f16", "zero_point"), "bf16"),
    (Format("code5", 32, "f16"), "bf16"),
]


@pytest.mark.skipif(not HAS_WARPGROUPS, reason="the device has no warpgroups")
@pytest.mark.parametrize(("format_", "dtype"), BY_WARPGROUPS, ids=str)
def test_bits_by_warpgroups_are_those_of_other_kernels(
    kernels: cuda.HostKernels, format_: Format, dtype: str
) -> None:
    operands = random_operands(format_, 140, 150, 1096, dtype)
    expected = operands.run(kernels, "gemm_middle")
    for kernel in kernels_of(format_, dtype):
        if "warpgroup" in kernel:
            assert np.array_equal(operands.run(kernels, kernel), expected), kernel


@kernel_parameters
@pytest.mark.parametrize("inner", [64, 1032])
def test_epilogues_add_to_out_and_add_the_bias(kernels: cuda.HostKernels, kernel: str, inner: int) -> None:
    operands = random_operands(Format("code8", 128, "bf16"), 5, 37, inner)
    plain = operands.run(kernels, kernel)
    rng = np.random.default_rng(0)
    operands.base = rng.standard_normal((5, 37)).astype(np.float32)
    added = operands.run(kernels, kernel)
    assert np.array_equal(added, operands.base + plain)
    operands.bias = rng.standard_normal(37).astype(np.float32)
    assert np.array_equal(operands.run(kernels, kernel), added + operands.bias)


@product_parameters
def test_bits_do_not_depend_on_the_rows_or_the_kernel(
    kernels: cuda.HostKernels, format_: Format, dtype: str
) -> None:
    operands = random_operands(format_, 41, 20, 552, dtype)
    expected = operands.run(kernels, "gemm_wide").view(np.uint32)
    for first, last in [(0, 41), (7, 8), (40, 41), (3, 12)]:
        part = operands.part(first, last)
        for kernel in kernels_of(format_, dtype):
            out = part.run(kernels, kernel)
            assert np.array_equal(out.view(np.uint32), expected[first:last]), (kernel, first, last)


@pytest.mark.parametrize(("code", "dtype"), [("code4", "bf16"), ("code4", "int8"), ("e4m3", "fp8")])
def test_bits_do_not_depend_on_the_warps_or_rounds_of_gemv(
    kernels: cuda.HostKernels, code: str, dtype: str
) -> None:
    operands = random_operands(Format(code, 128, "f16"), 2, 16, 18 * SPLIT_COLUMNS + 64, dtype)
    expected = operands.run(kernels, "gemm_wide")
    check(operands, expected)
    for kernel in (*OF_FEW_ROWS, "gemm_narrow"):
        assert np.array_equal(operands.run(kernels, kernel), expected)


@kernel_parameters
@pytest.mark.parametrize(("group", "dtype"), [(32, "bf16"), (32, "int8"), (64, "int8")])
def test_a_row_of_nan_does_not_change_others(
    kernels: cuda.HostKernels, kernel: str, group: int, dtype: str
) -> None:
    operands = random_operands(Format("code4", group, "f16", "stored"), 11, 20, 96, dtype)
    expected = operands.run(kernels, kernel)
    if isinstance(operands.x, QuantisedRows):
        operands.x.scales[4] = np.nan
    else:
        operands.x[4] = 0x7FC0
    out = operands.run(kernels, kernel)
    assert np.isnan(out[4]).all()
    others = np.arange(11) != 4
    assert np.array_equal(out[others], expected[others])


@pytest.mark.parametrize(
    ("format_", "dtype"),
    [
        (Format("code4", 32, "f16"), "bf16"),
        (Format("code4", 32, "f16", "stored"), "int8"),
        (Format("code4", 64, "bf16", "zero_point"), "bf16"),
        (Format("code4", 64, "bf16"), "int8"),
        (Format("code4", 32, "nested", "stored"), "bf16"),
        (Format("code4", 64, "nested"), "int8"),
        (Format("code4", 64, "nested", "stored"), "bf16"),
    ],
    ids=str,
)
def test_kernels_agree_on_an_infinite_scale(kernels: cuda.HostKernels, format_: Format, dtype: str) -> None:
    operands = random_operands(format_, 8, 16, 5 * 64, dtype)
    matrix = operands.matrix
    if matrix.outer_scales is None:
        matrix.scales[5, -1] = np.inf
    else:
        matrix.scales[5], matrix.outer_scales[5, -1] = 1, np.inf
    expected = operands.run(kernels, "gemm_middle")
    # With minima, the factor of the sum of x is infinite, too, maybe of the other sign.
    allowed = np.isnan(expected[:, 5]) if format_.has_minima else False
    assert (np.isinf(expected[:, 5]) | allowed).all()
    for kernel in OF_FEW_ROWS:
        assert np.array_equal(operands.run(kernels, kernel), expected, equal_nan=True), kernel


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_rows_of_a_table_are_those_of_the_cpu(kernels: cuda.HostKernels, format_: Format) -> None:
    table = random_matrix(format_, 37, 296)
    tokens = np.array([0, 36, 7, 8, FOLLOWS | 2, 15, 16], np.uint32)
    last_tokens = np.array([0, 0, 29], np.uint32)
    out = np.full((len(tokens) + 1, 296), np.nan, np.float32)
    data = packed(table)
    rows = Rows(MatrixArgument.of(table, data), *cuda.addresses(tokens, last_tokens, out))
    kernels.launch(f"embed_{format_.kernels()}", [len(tokens)], 64, rows)
    expected = table.weights()[[0, 36, 7, 8, 29, 15, 16]]
    assert np.array_equal(out[:-1].view(np.uint32), expected.view(np.uint32))
    assert np.isnan(out[-1]).all()


def test_shared_memory_is_that_of_the_kernels() -> None:
    for group, dtype, small, large in [(32, "int8", 189_440, 222_208), (128, "bf16", 189_440, 214_016)]:
        assert shared_bytes("gemm_warpgroup_wide", Format("code4", group, "f16"), dtype) == small
        assert shared_bytes("gemm_warpgroup_wide", Format("code8", group, "f16"), dtype) == large


def test_packing_in_rust_is_tested_with_this_layout() -> None:
    assert HASHES.read_text().splitlines() == hash_lines()
