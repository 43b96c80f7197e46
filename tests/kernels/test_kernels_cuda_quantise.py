"""CUDA kernels that write rows of 8-bit numbers, on the host: the bytes are those of the CPU's rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.kernels import cuda
from support.kernels.quantised_matrix import e4m3_values
from support.kernels.quantised_rows import QuantisedRowsArgument, quantised

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.kernels.cuda import Array

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels

GROUPS = [0, 32, 64, 128, 256, 512, 1024]
WIDTHS = [8, 200, 1056, 2312]
EPSILON = 1e-5
dtypes = pytest.mark.parametrize("dtype", ["int8", "fp8"])


@pytest.fixture(scope="module")
def kernels() -> cuda.HostKernels:
    return cuda.host_kernels()


def random_values(rows: int, width: int) -> Array:
    """Values of several magnitudes, with groups of zeros."""
    rng = np.random.default_rng([rows, width])
    x = rng.standard_normal((rows, width)).astype(np.float32)
    x[:, width // 3 :] *= 50
    x[0, : min(width, 1024)] = 0
    return x


class Target:
    """Rows that a kernel writes, which are 0xff where nothing is written, with a row behind them."""

    def __init__(self, rows: int, columns: int, group: int, *, keeps_floats: bool = False) -> None:
        self.rows = np.full((rows + 1, -(-columns // 64) * 80), 0xFF, np.uint8)
        self.floats = np.full((rows + 1, columns), np.nan, np.float32)
        kept = self.floats if keeps_floats else None
        self.argument = QuantisedRowsArgument(*cuda.addresses(self.rows, kept), columns, group)
        #: Blocks that share a row, of kernels that have several.
        self.parts = -(-columns // 1024) if group else 1

    def check(self, expected: Array, group: int, dtype: str) -> None:
        """The rows are `expected`."""
        assert (self.rows[-1] == 0xFF).all()
        assert np.array_equal(self.rows[:-1], quantised(expected, group, dtype).packed())


@dtypes
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_quantised_as_on_the_cpu(
    kernels: cuda.HostKernels, width: int, group: int, dtype: str
) -> None:
    x = random_values(3, width)
    target = Target(3, width, group)
    kernels.launch(f"quantise_{dtype}", [3, target.parts], 256, x, target.argument)
    target.check(x, group, dtype)


def run_rms_norm(kernels: cuda.HostKernels, dtype: str, width: int, target: Target) -> Array:
    """Runs the kernel, and returns the norm in float32."""
    x, weight = random_values(2, width), random_values(1, width)[0] + 1
    kernels.launch(f"rms_norm_{dtype}", [2], 256, x, weight, target.argument, EPSILON)
    expected = np.empty_like(x)
    kernels.launch("rms_norm_f32", [2], 256, x, weight, expected, width, EPSILON)
    return expected


def run_silu_mul(kernels: cuda.HostKernels, dtype: str, width: int, target: Target) -> Array:
    """Runs the kernel, and returns the product in float32."""
    gate_up = random_values(2, 2 * width)
    kernels.launch(f"silu_mul_{dtype}", [2, target.parts], 256, gate_up, target.argument)
    expected = np.empty((2, width), np.float32)
    kernels.launch("silu_mul_f32", [2, -(-width // 1024)], 256, gate_up, expected, width)
    return expected


@dtypes
@pytest.mark.parametrize("run", [run_rms_norm, run_silu_mul])
@pytest.mark.parametrize("group", [0, 32, 256])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("keeps_floats", [False, True])
def test_operands_are_the_quantised_values_of_the_float32_kernel(
    kernels: cuda.HostKernels,
    run: Callable[[cuda.HostKernels, str, int, Target], Array],
    width: int,
    group: int,
    dtype: str,
    *,
    keeps_floats: bool,
) -> None:
    target = Target(2, width, group, keeps_floats=keeps_floats)
    expected = run(kernels, dtype, width, target)
    target.check(expected, group, dtype)
    kept = expected if keeps_floats else np.full_like(expected, np.nan)
    assert np.array_equal(target.floats[:-1], kept, equal_nan=True)
    assert np.isnan(target.floats[-1]).all()


@dtypes
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("group", [0, 32, 256])
def test_scale_of_a_group_that_is_not_finite_is_nan(
    kernels: cuda.HostKernels, value: float, group: int, dtype: str
) -> None:
    x = random_values(2, 1300)
    expected = quantised(x, group, dtype).packed()
    x[1, 700] = value
    target = Target(2, 1300, group)
    kernels.launch(f"quantise_{dtype}", [2, target.parts], 256, x, target.argument)
    assert np.array_equal(target.rows[0], expected[0])

    def scales(row: Array) -> Array:
        return row.reshape(-1, 80)[:, 64:].copy().view(np.float32).reshape(-1, 2)

    halves = np.arange(len(scales(expected[1]))) * 32
    is_other = halves // group != 700 // group if group else np.zeros(len(halves), bool)
    found = scales(target.rows[1])
    assert np.isnan(found[~is_other]).all()
    assert np.array_equal(found[is_other], scales(expected[1])[is_other])


@dtypes
def test_smallest_and_largest_values(kernels: cuda.HostKernels, dtype: str) -> None:
    x = np.repeat(np.array([[9e-31, 1.1e-30, 3e37, 1e-42]], np.float32), 32, axis=1)
    x *= np.tile(np.array([1, -0.5], np.float32), 64)
    target = Target(1, 128, 32)
    kernels.launch(f"quantise_{dtype}", [1, 1], 256, x, target.argument)
    target.check(x, 32, dtype)


def test_every_number_of_e4m3_and_the_middles_between_them(kernels: cuda.HostKernels) -> None:
    numbers = e4m3_values()[:127]
    values = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    values = np.concatenate(
        [values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(448))]
    )
    x = np.zeros((2, 1024), np.float32)
    x[:, : len(values)] = [values, -values]
    x[:, -1] = 448  # the scale is 1
    target = Target(2, 1024, 0)
    kernels.launch("quantise_fp8", [2, 1], 256, x, target.argument)
    target.check(x, 0, "fp8")
