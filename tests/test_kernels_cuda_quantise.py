"""CUDA kernels that write rows of 8-bit integers, on the host: the bytes are those of the CPU's rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from support import cuda
from support.cuda_quantised_rows import QuantisedRowsArgument, quantised

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.cuda import Array

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels

SPANS = [0, 32, 64, 128, 256, 512, 1024]
WIDTHS = [8, 200, 1056, 2312]
EPSILON = 1e-5


@pytest.fixture(scope="module")
def kernels() -> cuda.HostKernels:
    return cuda.host_kernels()


def random_values(rows: int, width: int) -> Array:
    """Values of several magnitudes, with spans of zeros."""
    rng = np.random.default_rng([rows, width])
    x = rng.standard_normal((rows, width)).astype(np.float32)
    x[:, width // 3 :] *= 50
    x[0, : min(width, 1024)] = 0
    return x


class Target:
    """Rows that a kernel writes, which are 0xff where nothing is written, with a row behind them."""

    def __init__(self, rows: int, columns: int, span: int, *, keeps_floats: bool = False) -> None:
        self.rows = np.full((rows + 1, -(-columns // 64) * 80), 0xFF, np.uint8)
        self.floats = np.full((rows + 1, columns), np.nan, np.float32)
        kept = self.floats if keeps_floats else None
        self.argument = QuantisedRowsArgument(*cuda.addresses(self.rows, kept), columns, span)
        #: Blocks that share a row, of kernels that have several.
        self.parts = -(-columns // 1024) if span else 1

    def check(self, expected: Array, span: int) -> None:
        """The rows are `expected`."""
        assert (self.rows[-1] == 0xFF).all()
        assert np.array_equal(self.rows[:-1], quantised(expected, span).packed())


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_quantised_as_on_the_cpu(kernels: cuda.HostKernels, width: int, span: int) -> None:
    x = random_values(3, width)
    target = Target(3, width, span)
    kernels.launch("quantise_int8", [3, target.parts], 256, x, target.argument)
    target.check(x, span)


def run_rms_norm(kernels: cuda.HostKernels, rows: int, width: int, target: Target) -> Array:
    """Runs the kernel, and returns the norm in float32."""
    x, weight = random_values(rows, width), random_values(1, width)[0] + 1
    kernels.launch("rms_norm_int8", [rows], 256, x, weight, target.argument, EPSILON)
    expected = np.empty_like(x)
    kernels.launch("rms_norm_f32", [rows], 256, x, weight, expected, width, EPSILON)
    return expected


def run_silu_mul(kernels: cuda.HostKernels, rows: int, width: int, target: Target) -> Array:
    """Runs the kernel, and returns the product in float32."""
    gate_up = random_values(rows, 2 * width)
    kernels.launch("silu_mul_int8", [rows, target.parts], 256, gate_up, target.argument)
    expected = np.empty((rows, width), np.float32)
    kernels.launch("silu_mul_f32", [rows, -(-width // 1024)], 256, gate_up, expected, width)
    return expected


@pytest.mark.parametrize("run", [run_rms_norm, run_silu_mul])
@pytest.mark.parametrize("span", [0, 32, 256])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("keeps_floats", [False, True])
def test_operands_are_the_quantised_values_of_the_float32_kernel(
    kernels: cuda.HostKernels,
    run: Callable[[cuda.HostKernels, int, int, Target], Array],
    width: int,
    span: int,
    *,
    keeps_floats: bool,
) -> None:
    target = Target(2, width, span, keeps_floats=keeps_floats)
    expected = run(kernels, 2, width, target)
    target.check(expected, span)
    kept = expected if keeps_floats else np.full_like(expected, np.nan)
    assert np.array_equal(target.floats[:-1], kept, equal_nan=True)
    assert np.isnan(target.floats[-1]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("span", [0, 32, 256])
def test_scale_of_a_span_that_is_not_finite_is_nan(
    kernels: cuda.HostKernels, value: float, span: int
) -> None:
    x = random_values(2, 1300)
    expected = quantised(x, span).packed()
    x[1, 700] = value
    target = Target(2, 1300, span)
    kernels.launch("quantise_int8", [2, target.parts], 256, x, target.argument)
    assert np.array_equal(target.rows[0], expected[0])

    def scales(row: Array) -> Array:
        return row.reshape(-1, 80)[:, 64:].copy().view(np.float32).reshape(-1, 2)

    halves = np.arange(len(scales(expected[1]))) * 32
    is_other = halves // span != 700 // span if span else np.zeros(len(halves), bool)
    found = scales(target.rows[1])
    assert np.isnan(found[~is_other]).all()
    assert np.array_equal(found[is_other], scales(expected[1])[is_other])


def test_smallest_and_largest_values(kernels: cuda.HostKernels) -> None:
    x = np.repeat(np.array([[9e-31, 1.1e-30, 3e37, 1e-42]], np.float32), 32, axis=1)
    x *= np.tile(np.array([1, -0.5], np.float32), 64)
    target = Target(1, 128, 32)
    kernels.launch("quantise_int8", [1, 1], 256, x, target.argument)
    target.check(x, 32)
