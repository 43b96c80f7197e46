"""CUDA kernels access arrays of more than 2^32 elements: the last block of a large grid is right."""

from __future__ import annotations

import numpy as np
import pytest
from test_kernels_cuda_attention import Case, Filled
from test_kernels_cuda_gemm import DIVIDED, KERNELS, TILES, Product, launch_of
from test_kernels_cuda_gemm_quantised import OF_FEW_ROWS, MatrixArgument
from test_kernels_cuda_gemm_quantised import TILES as QUANTISED_TILES
from test_kernels_cuda_gemm_quantised import Operands as QuantisedOperands
from test_kernels_cuda_gemm_quantised import Product as QuantisedProduct
from test_kernels_cuda_gemm_quantised import launch_of as launch_of_quantised
from test_kernels_cuda_rows import Strides

from emu import build
from support.kernels import cuda, kv_pages, quantised_matrix
from support.kernels.cuda import sparse, to_bits
from support.kernels.quantised_rows import QuantisedRowsArgument, quantised

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels

if cuda.CHECKED or cuda.ON_GPU:
    pytest.skip("the arrays are too large for a copy", allow_module_level=True)

FAR = 1 << 32
RANDOM = np.random.default_rng(0)
#: Divided products are the same kernels, and their sizes are limited by the room for chains.
PRODUCTS = [
    *((kernel, dtype) for kernel, dtype in KERNELS if kernel not in DIVIDED),
    *(("gemm_any", dtype) for dtype in ("bf16", "f16", "f32")),
]


@pytest.fixture(scope="module")
def kernels() -> cuda.LastBlock:
    return cuda.LastBlock(build.build_kernels())


def normal(*shape: int) -> cuda.Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def test_embedding_reads_and_writes_far_rows(kernels: cuda.LastBlock) -> None:
    width = 1 << 16
    rows = FAR // width + 1
    table, tokens, out = sparse(rows, width), sparse(rows, dtype=np.uint32), sparse(rows, width)
    table[-1], tokens[-1] = normal(width), rows - 1
    kernels.launch("embed_f32", [rows], 256, table, tokens, None, out, width)
    assert np.array_equal(out[-1], table[-1])


@pytest.mark.parametrize(("kernel", "dtype"), [("gather_rows", np.uint32), ("gather_halves", np.uint16)])
def test_gather_reads_and_writes_far_rows(kernels: cuda.LastBlock, kernel: str, dtype: type) -> None:
    width = 1 << 16
    rows = FAR // width + 1
    x, sources, out = (
        sparse(*shape, dtype=kind)
        for shape, kind in (((rows, width), dtype), ((rows,), np.uint32), ((rows, width), dtype))
    )
    x[-1], sources[-1] = np.arange(width), rows - 1
    kernels.launch(kernel, [rows], 256, x, sources, out, width)
    assert np.array_equal(out[-1], x[-1])


def test_copy_of_a_far_block_is_right(kernels: cuda.LastBlock) -> None:
    words = 1 << 12
    blocks = FAR // words + 1
    source, target = (sparse(blocks, 4 * words, dtype=np.uint32) for _ in range(2))
    source[-1] = np.arange(4 * words)
    strides, copies = Strides(words, 0), np.array([[blocks - 1, blocks - 1]], np.uint32)
    kernels.launch("copy_blocks", [1, 1], 256, source, strides, target, strides, copies, words)
    assert np.array_equal(target[-1], source[-1])


def test_norm_of_a_far_row_is_right(kernels: cuda.LastBlock) -> None:
    width = 1 << 14
    rows = FAR // width + 1
    x, out, weight = sparse(rows, width), sparse(rows, width), np.ones(width, np.float32)
    x[-1] = normal(width)
    kernels.launch("rms_norm_f32", [rows], 256, x, weight, out, width, 0.0)
    assert np.allclose(out[-1], x[-1] / np.sqrt(np.mean(x[-1].astype(np.float64) ** 2)), atol=1e-5)


def test_activation_of_a_far_row_is_right(kernels: cuda.LastBlock) -> None:
    width = 1 << 10
    rows = FAR // width + 1
    gate_up, out = sparse(rows, 2 * width), sparse(rows, width)
    gate_up[-1] = normal(2 * width)
    kernels.launch("silu_mul_f32", [rows, 1], 256, gate_up, out, width)
    gate, up = gate_up[-1, :width], gate_up[-1, width:]
    assert np.allclose(out[-1], gate / (1 + np.exp(-gate)) * up, atol=1e-5)


def test_far_rows_are_quantised(kernels: cuda.LastBlock) -> None:
    width = 1 << 14
    rows = FAR // width + 1
    x, out = sparse(rows, width), sparse(rows, width // 64 * 80, dtype=np.uint8)
    x[-1] = normal(width)
    target = QuantisedRowsArgument(*cuda.addresses(out, None), width, 0)
    kernels.launch("quantise_int8", [rows, 1], 256, x, target)
    assert np.array_equal(out[-1:], quantised(x[-1:], 0).packed())


# Kernels of few rows have no far rows.
@pytest.mark.parametrize("kernel", [kernel for kernel in QUANTISED_TILES if kernel not in OF_FEW_ROWS])
def test_product_reads_far_rows_of_integers(kernels: cuda.LastBlock, kernel: str) -> None:
    inner, (tile_outputs, _) = 1 << 14, QUANTISED_TILES[kernel]
    matrix = quantised_matrix.random_matrix(quantised_matrix.FORMATS[0], tile_outputs, inner)
    data = quantised_matrix.packed(matrix)
    last = quantised(normal(1, inner), 32)
    rows = FAR // (inner // 64 * 80) + 1
    x, out = zeros_like_far((rows, inner // 64 * 80), last.packed()), sparse(rows, tile_outputs)
    call = [*cuda.addresses(x, None, out), rows, tile_outputs, 0, last.group_shift]
    grid, threads, shared = launch_of_quantised(kernel, matrix.format, "int8", rows, tile_outputs, inner)
    name = f"{kernel}_{matrix.format.kernels('int8')}"
    kernels.launch(
        name, grid, threads, QuantisedProduct(MatrixArgument.of(matrix, data), *call), shared=shared
    )
    expected, magnitude = QuantisedOperands(last, matrix).expected()
    assert (np.abs(out[-1] - expected[0]) <= 1e-6 * magnitude[0]).all()


def multiply(
    kernels: cuda.LastBlock, name: tuple[str, str], x: cuda.Array, w: cuda.Array, pitch: int
) -> cuda.Array:
    """The last columns of the last row of a product."""
    kernel, dtype = name
    (rows, inner), outputs = x.shape, len(w)
    out = sparse(rows, pitch)
    product = Product(*cuda.addresses(x, w, None, out), rows, outputs, inner, pitch, 0)
    tiles = [-(-outputs // TILES[kernel][0]), -(-rows // TILES[kernel][1])]
    threads, shared = launch_of(kernel)
    threads = {"gemv": 128 if dtype == "f32" else 32, "gemm_any": 256}.get(kernel, threads)
    grid = {"gemv": tiles, "gemm_any": tiles[::-1]}.get(kernel, [tiles[0] * tiles[1]])
    kernels.launch(f"{kernel}_{dtype}", grid, threads, product, shared=shared)
    return out[-1, :outputs][-8:]


def zeros_like_far(shape: tuple[int, int], last: cuda.Array) -> cuda.Array:
    """A large matrix with these last rows."""
    matrix = sparse(*shape, dtype=last.dtype)
    matrix[-len(last) :] = last
    return matrix


@pytest.mark.parametrize("name", PRODUCTS, ids="_".join)
def test_product_reads_far_weights(kernels: cuda.LastBlock, name: tuple[str, str]) -> None:
    inner = 2048
    x, last = to_bits(normal(1, inner), name[1]), to_bits(normal(8, inner), name[1])
    outputs = FAR // inner + 8
    result = multiply(kernels, name, x, zeros_like_far((outputs, inner), last), outputs)
    assert np.allclose(result, (cuda.to_floats(x) @ cuda.to_floats(last).T)[0], atol=1e-3)


@pytest.mark.parametrize("name", PRODUCTS, ids="_".join)
def test_product_reads_and_writes_far_rows(kernels: cuda.LastBlock, name: tuple[str, str]) -> None:
    inner = 1 << 16
    x, w = to_bits(normal(1, inner), name[1]), to_bits(normal(8, inner), name[1])
    rows = FAR // inner + 1
    result = multiply(kernels, name, zeros_like_far((rows, inner), x), w, inner)
    assert np.allclose(result, (cuda.to_floats(x) @ cuda.to_floats(w).T)[0], atol=1e-2)


@pytest.mark.parametrize("kernel", QUANTISED_TILES)
def test_product_reads_far_quantised_weights(kernels: cuda.LastBlock, kernel: str) -> None:
    inner, tile_outputs = 4096, QUANTISED_TILES[kernel][0]
    small = quantised_matrix.random_matrix(quantised_matrix.FORMATS[0], 16, inner)
    tile = quantised_matrix.packed(small)
    outputs = FAR // tile.shape[1] * 16 // tile_outputs * tile_outputs + tile_outputs
    data = sparse(outputs // 16, tile.shape[1], dtype=np.uint8)
    data[-1] = tile
    x, out = to_bits(normal(1, inner), "bf16"), sparse(1, outputs)
    matrix = MatrixArgument.of(small, data)
    matrix.rows = outputs
    product = QuantisedProduct(matrix, *cuda.addresses(x, None, out), 1, outputs, 0)
    grid, threads, shared = launch_of_quantised(kernel, small.format, "bf16", 1, outputs, inner)
    kernels.launch(f"{kernel}_{small.format.kernels()}", grid, threads, product, shared=shared)
    expected = QuantisedOperands(x, small).expected()[0]
    assert np.allclose(out[0, -16:], expected[0], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("dtype", kv_pages.DTYPES)
def test_far_blocks_of_the_cache_are_written(kernels: cuda.LastBlock, dtype: str) -> None:
    layout = kv_pages.KvLayout(dtype, 1, 64, 16)
    row_values = 3 * layout.head_dim
    rows, blocks = FAR // row_values + 1, FAR // layout.block_bytes + 2
    qkv, cache = sparse(rows, row_values), sparse(blocks * layout.block_bytes, dtype=np.uint8)
    qkv[-1] = normal(row_values)
    positions, places, offsets = (sparse(rows, dtype=np.uint32) for _ in range(3))
    places[-1], offsets[-1] = blocks - 1, 15
    table = np.array([[1, 0]], np.float32)
    arrays = cuda.addresses(qkv, None, None, table, None, positions, None, places, offsets)
    call = kv_pages.RopeWriteKv(*arrays, layout.argument(cache), 1, 1, 0.0)
    kernels.launch(f"rope_write_kv_{dtype}", [rows, 1], 128, call, shared=32 * layout.head_dim)
    _, k, v = qkv[-1].reshape(3, -1).astype(np.float64)
    layout.page(cache, blocks - 1, 0).check(15, k, v)


@pytest.mark.parametrize(
    ("kernel", "kv"),
    [
        *((kernel, kv) for kernel in ("decode", "prefill") for kv in ("bf16", "int8", "uint4")),
        ("prefill_warpgroup", "bf16"),
        ("prefill_warpgroup", "int8"),
    ],
)
def test_attention_reads_far_blocks_of_the_cache(kernel: str, kv: str) -> None:
    case = Case(
        kv=kv, head_dim=128 if kernel == "prefill_warpgroup" else 64, lengths=(40,), kv_heads=1, group=1
    )
    filled = Filled(cuda.HostKernels(build.build_kernels()), case)
    expected = filled.attend([(0, 30, 40)], kernel)
    size = case.layout.block_bytes
    first = FAR // size + 1
    cache = sparse(first * size + filled.cache.size, dtype=np.uint8)
    cache[first * size :] = filled.cache
    filled.cache, filled.tables = cache, [table + np.uint32(first) for table in filled.tables]
    assert np.array_equal(filled.attend([(0, 30, 40)], kernel), expected)
