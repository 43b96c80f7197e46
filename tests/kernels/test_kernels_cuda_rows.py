"""CUDA kernels that work on rows, on the host: embedding, RMSNorm, gated activations, copies."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.kernels import cuda

if TYPE_CHECKING:
    from support.kernels.cuda import Array

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels

DTYPES = ("f32", "bf16", "f16")
#: One rounding to the type; the sums of float32 in a norm add a few units of float32.
TOLERANCE = {"f32": 2e-6, "bf16": 2**-8, "f16": 2**-11}

FOLLOWS = 1 << 31


@pytest.fixture(scope="module")
def kernels() -> cuda.HostKernels:
    return cuda.host_kernels()


def empty(rows: int, width: int, dtype: str) -> Array:
    """A result that is NaN where nothing is written."""
    return cuda.to_bits(np.full((rows, width), np.nan, np.float32), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 31, 256, 577])
def test_embedding_reads_rows_and_last_tokens(kernels: cuda.HostKernels, dtype: str, width: int) -> None:
    rng = np.random.default_rng(width)
    table = cuda.to_bits(rng.standard_normal((50, width)), dtype)
    last = np.array([7, 49, 13], np.uint32)
    tokens = np.array([0, 49, FOLLOWS | 1, 20, FOLLOWS | 2], np.uint32)
    out = empty(len(tokens), width, "f32")
    kernels.launch(f"embed_{dtype}", [len(tokens)], 256, table, tokens, last, out, width)
    assert np.array_equal(out, cuda.to_floats(table)[[0, 49, 49, 20, 13]])


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    x = x.astype(np.float64)
    normed: Array = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + epsilon) * weight
    return normed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 33, 576, 1023, 4096])
def test_rms_norm_equals_its_formula(kernels: cuda.HostKernels, dtype: str, width: int) -> None:
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((5, width)) * [[1e-4], [1], [30], [0], [1e4]]).astype(np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    out = empty(5, width, dtype)
    kernels.launch(f"rms_norm_{dtype}", [5], 256, x, weight, out, width, 1e-5)
    expected = rms_norm(x, weight, float(np.float32(1e-5)))
    assert np.allclose(cuda.to_floats(out), expected, rtol=TOLERANCE[dtype], atol=1e-7)


@pytest.mark.parametrize("width", [64, 577])
@pytest.mark.parametrize("magnitude", [1e-42, 3e-25, 3e19, 3e38])
def test_rms_norm_of_extreme_values_equals_its_formula(
    kernels: cuda.HostKernels, width: int, magnitude: float
) -> None:
    signs = np.where(np.arange(2 * width) % 3, 1, -1).reshape(2, width)
    x = (signs * magnitude).astype(np.float32)
    x[1, 5] = 0
    weight, out = np.full(width, 2, np.float32), empty(2, width, "f32")
    kernels.launch("rms_norm_f32", [2], 256, x, weight, out, width, 1e-60)
    # As on the CPU, the factor is of float32: it is subnormal for large values, infinite for subnormal ones.
    with np.errstate(invalid="ignore", over="ignore"):
        factor = np.float32(1 / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True)))
        assert np.allclose(out, x * factor * 2, rtol=1e-6, equal_nan=True)


def test_rms_norm_bits_do_not_depend_on_the_batch(kernels: cuda.HostKernels) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 577)).astype(np.float32)
    weight = rng.standard_normal(577).astype(np.float32)
    together = empty(9, 577, "f32")
    kernels.launch("rms_norm_f32", [9], 256, x, weight, together, 577, 1e-6)
    for row in range(9):
        alone = empty(1, 577, "f32")
        kernels.launch("rms_norm_f32", [1], 256, x[row : row + 1], weight, alone, 577, 1e-6)
        assert np.array_equal(alone[0].view(np.uint32), together[row].view(np.uint32))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_operands_are_rounded_to_the_nearest_even(kernels: cuda.HostKernels, dtype: str) -> None:
    rng = np.random.default_rng(0)
    ties = (rng.integers(0, 2**15, 500, np.uint32) << 16 | 0x8000).view(np.float32)
    steps = np.arange(-300, 300, dtype=np.float32) / 8192 + 2
    weight = np.concatenate([ties[np.isfinite(ties)], steps, rng.standard_normal(500).astype(np.float32)])
    weight = weight[np.abs(weight) < 6e4]
    out = empty(1, len(weight), dtype)
    kernels.launch(f"rms_norm_{dtype}", [1], 256, np.ones_like(weight), weight, out, len(weight), 0.0)
    assert np.array_equal(out[0], cuda.to_bits(weight, dtype))


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def gelu(x: Array) -> Array:
    result: Array = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 1024, 1537])
@pytest.mark.parametrize("function", [silu, gelu])
def test_gated_activation_equals_its_formula(
    kernels: cuda.HostKernels, dtype: str, width: int, function: type[Array]
) -> None:
    rng = np.random.default_rng(width)
    gate_up = (rng.standard_normal((3, 2 * width)) * [[0.01], [1], [8]]).astype(np.float32)
    out = empty(3, width, dtype)
    kernels.launch(f"{function.__name__}_mul_{dtype}", [3, -(-width // 1024)], 256, gate_up, out, width)
    with np.errstate(over="ignore"):
        expected = function(gate_up[:, :width].astype(np.float64)) * gate_up[:, width:]
    assert np.allclose(cuda.to_floats(out), expected, rtol=4 * TOLERANCE[dtype], atol=2e-7)


@pytest.mark.parametrize("function", ["silu", "gelu"])
def test_gated_activation_of_extreme_gates(kernels: cuda.HostKernels, function: str) -> None:
    gate_up = np.array([[-1e30, -200, 0, 200, 1, 1, 1, 1]], np.float32)
    out = empty(1, 4, "f32")
    kernels.launch(f"{function}_mul_f32", [1, 1], 256, gate_up, out, 4)
    assert np.array_equal(out, [[0, 0, 0, 200]])


def test_operands_of_f16_are_saturated(kernels: cuda.HostKernels) -> None:
    gate_up = np.array(
        [[300, -300, 300, 1, 3e19, 255, np.nan], [300, 300, 1, 70000, 3e19, 256.9, 1]], np.float32
    )
    expected = [65504, 0, 300, 51168, np.inf, 65504, np.nan]  # of f16; infinite is infinite in float32 only
    out = empty(1, 7, "f16")
    kernels.launch("silu_mul_f16", [1, 1], 256, gate_up, out, 7)
    assert np.allclose(out[0], expected, rtol=1e-3, equal_nan=True)
    wide = empty(1, 7, "f32")
    kernels.launch("silu_mul_f32", [1, 1], 256, gate_up, wide, 7)
    assert np.array_equal(np.isinf(out), np.isinf(wide))
    weight = np.array([7e4, -7e4, 1, 65519], np.float32)
    out = empty(1, 4, "f16")
    kernels.launch("rms_norm_f16", [1], 256, np.ones((1, 4), np.float32), weight, out, 4, 0.0)
    assert np.array_equal(out[0], np.array([65504, -65504, 1, 65504], np.float16))


@pytest.mark.parametrize(
    ("kernel", "dtype", "width"),
    [
        *(("gather_rows", np.uint32, words) for words in (1, 200, 300, 2304)),
        ("gather_halves", np.uint16, 333),
    ],
)
def test_gather_copies_the_rows(
    kernels: cuda.HostKernels, kernel: str, dtype: type[np.integer[Any]], width: int
) -> None:
    x = np.arange(7 * width, dtype=dtype).reshape(7, width)
    rows = np.array([6, 0, 0, 3], np.uint32)
    out = np.zeros((4, width), dtype)
    kernels.launch(kernel, [4], 256, x, rows, out, width)
    assert np.array_equal(out, x[rows])


class Strides(ctypes.Structure):
    """``BlockStrides`` of ``cuda/copy.cu``."""

    _fields_ = [("block", ctypes.c_uint64), ("layer", ctypes.c_uint64)]


def test_blocks_are_saved_and_loaded(kernels: cuda.HostKernels) -> None:
    layers, blocks, host_blocks, words = 3, 5, 4, 260
    rng = np.random.default_rng(0)
    cache = rng.integers(0, 2**32, (layers, blocks, words * 4), np.uint32)
    host = np.zeros((host_blocks, layers, words * 4), np.uint32)
    of_cache, of_host = Strides(words, blocks * words), Strides(layers * words, words)
    save = np.array([[4, 0], [1, 3]], np.uint32)
    kernels.launch("copy_blocks", [2, layers], 256, cache, of_cache, host, of_host, save, words)
    assert np.array_equal(host[0], cache[:, 4])
    assert np.array_equal(host[3], cache[:, 1])
    assert not host[1:3].any()
    expected = cache.copy()
    expected[:, 2] = cache[:, 1]
    load = np.array([[3, 2]], np.uint32)
    kernels.launch("copy_blocks", [1, layers], 256, host, of_host, cache, of_cache, load, words)
    assert np.array_equal(cache, expected)
