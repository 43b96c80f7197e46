"""The host's implementation of CUDA C++: indices, warps, tensor cores, asynchronous copies, atomics."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from emu import build
from support.kernels.cuda import HostKernels, to_bits, to_floats
from support.kernels.emulator import PLANTS, plants, run
from support.kernels.quantised_matrix import e4m3_values

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator

RANDOM = np.random.default_rng(1)


@functools.cache
def kernels() -> HostKernels:
    return HostKernels(plants(checked=False))


def test_indices_of_blocks_and_threads_have_three_dimensions() -> None:
    library = ctypes.CDLL(str(plants(checked=False)))
    grid, block = (2, 3, 4), (5, 3, 2)
    out = np.zeros((*grid[::-1], *block[::-1]), np.uint32)
    pointer = ctypes.c_void_p(out.ctypes.data)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    three = ctypes.c_uint * 3
    library.emu_launch.restype = ctypes.c_char_p
    assert (
        library.emu_launch(b"indices", three(*grid), three(*block), ctypes.c_uint64(0), 0, arguments) is None
    )
    shifts = (8, 4, 0, 28, 20, 12)  # of blockIdx.z, .y, .x, threadIdx.z, .y, .x
    expected = sum(index << shift for index, shift in zip(np.indices(out.shape), shifts, strict=True))
    assert (out == expected).all()


@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles_and_votes_follow_their_definitions(width: int) -> None:
    out = np.zeros((32, 8), np.uint32)
    kernels().launch("exchanges", (1,), 32, out, width)
    for lane in range(32):
        first = lane - lane % width

        def inside(other: int, lane: int = lane, first: int = first) -> int:
            return other if first <= other < first + width else lane

        votes = sum(1 << i for i in range(0, 32, 3))
        expected = [first + 3, inside(lane ^ 5), inside(lane + 2), inside(lane - 2), votes, 1, 1]
        assert out[lane].tolist() == [*expected, lane ^ 1 if lane < 8 else 99]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_tensor_core_product_equals_the_product_of_matrices(dtype: str) -> None:
    a = to_bits(RANDOM.uniform(-2, 2, (16, 16)).astype(np.float32), dtype)
    b = to_bits(RANDOM.uniform(-2, 2, (8, 16)).astype(np.float32), dtype)
    d = np.zeros((16, 8), np.float32)
    kernels().launch(f"multiply_{dtype}", (1,), 32, a, b, d)
    expected = to_floats(a).astype(np.float64) @ to_floats(b).astype(np.float64).T
    np.testing.assert_allclose(d, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_product_of_tiles_equals_the_product_of_matrices(dtype: str) -> None:
    a = to_bits(RANDOM.uniform(-2, 2, (64, 64)).astype(np.float32), dtype)
    b = to_bits(RANDOM.uniform(-2, 2, (32, 64)).astype(np.float32), dtype)
    d = np.zeros((64, 32), np.float32)
    kernels().launch(f"multiply_tiles_{dtype}", (1,), 128, a, b, d, shared=(1 + 12) << 10)
    expected = to_floats(a).astype(np.float64) @ to_floats(b).astype(np.float64).T
    np.testing.assert_allclose(d, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_product_of_registers_and_a_tile_is_that_of_matrices(dtype: str) -> None:
    floats = (RANDOM.uniform(-2, 2, (64, 64)).astype(np.float32) for _ in "ab")
    a, b = (to_bits(matrix, dtype) for matrix in floats)
    d = np.zeros((64, 64), np.float32)
    kernels().launch(f"multiply_registers_{dtype}", (1,), 128, a, b, d, shared=9 << 10)
    expected = to_floats(a).astype(np.float64) @ to_floats(b).astype(np.float64).T
    np.testing.assert_allclose(d, expected, rtol=0, atol=1e-4)


def test_product_of_bytes_in_registers_is_exact() -> None:
    x, y = (RANDOM.integers(-128, 128, (64, 128)).astype(np.int8) for _ in "ab")
    sums = np.zeros((64, 64), np.int32)
    kernels().launch("multiply_registers_int8", (1,), 128, x, y, sums, shared=9 << 10)
    assert np.array_equal(sums, x.astype(np.int32) @ y.astype(np.int32).T)


@pytest.mark.parametrize("inner", [16, 32])
def test_tensor_core_product_of_integers_is_exact(inner: int) -> None:
    a = RANDOM.integers(-128, 128, (16, inner)).astype(np.int8)
    b = RANDOM.integers(-128, 128, (8, inner)).astype(np.int8)
    d = np.zeros((16, 8), np.int32)
    kernels().launch(f"multiply_int8_{inner}", (1,), 32, a, b, d)
    assert np.array_equal(d, a.astype(np.int32) @ b.astype(np.int32).T)


def test_tensor_core_product_of_e4m3_is_that_of_values() -> None:
    a, b = (RANDOM.integers(0, 256, (rows, 32)).astype(np.uint8) for rows in (16, 8))
    a[a & 127 == 127] = 0
    b[b & 127 == 127] = 0
    d = np.zeros((16, 8), np.float32)
    kernels().launch("multiply_fp8_32", (1,), 32, a, b, d)
    x, y = (e4m3_values()[codes].astype(np.float64) for codes in (a, b))
    assert (np.abs(d - x @ y.T) <= 1e-6 * (np.abs(x) @ np.abs(y).T)).all()


def test_transposed_matrices_have_the_fragments_of_ldmatrix() -> None:
    tiles = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros((32, 4), np.uint32)
    kernels().launch("transpose_tiles", (1,), 32, tiles, out)
    for lane in range(32):
        group, quad = lane // 4, lane % 4
        low, high = (
            tiles[:, 2 * quad, group].astype(np.uint32),
            tiles[:, 2 * quad + 1, group].astype(np.uint32),
        )
        assert (out[lane] == low | high << 16).all()


@pytest.mark.parametrize("threads", [32, 96, 1024])
def test_block_sum_crosses_warps(threads: int) -> None:
    x = RANDOM.uniform(-1, 1, (3, 1000)).astype(np.float32)
    out = np.zeros(3, np.float32)
    kernels().launch("row_sums", (3,), threads, x, out, 1000)
    np.testing.assert_allclose(out, x.astype(np.float64).sum(axis=1), atol=1e-4)


def test_staged_copies_arrive_in_order() -> None:
    x = np.arange(5 * 64 * 4, dtype=np.float32)
    out = np.zeros_like(x)
    kernels().launch("staged_copy", (1,), 64, x, out, 5)
    assert (out.reshape(-1, 2, 4) == x.reshape(-1, 2, 4)[:, ::-1]).all()


def test_atomic_additions_count_every_value() -> None:
    values = RANDOM.integers(0, 1000, 5000).astype(np.uint32)
    counts = np.zeros(16, np.uint32)
    kernels().launch("histogram", (20,), 256, values, counts, len(values))
    assert (counts == np.bincount(values % 16, minlength=16)).all()


def test_failed_kernel_has_a_reason_and_the_next_one_runs() -> None:
    out = np.zeros(64, np.float32)
    with pytest.raises(RuntimeError, match="arrive at different barriers"):
        kernels().launch("divergent_barrier", (1,), 64, out)
    with pytest.raises(RuntimeError, match="no such kernel"):
        kernels().launch("absent", (1,), 64, out)
    with pytest.raises(RuntimeError, match="a block has 1 to 1024 threads"):
        kernels().launch("divergent_barrier", (1,), 1025, out)
    test_block_sum_crosses_warps(96)


@pytest.mark.parametrize("kernel", ["row_sums_dynamic", "staged_copy", "histogram"])
def test_kernel_has_one_result_on_all_kinds_of_threads(kernel: str) -> None:
    result = run("kernel", kernel).result
    assert run("kernel", kernel, EMU_UCONTEXT="1").result == result
    assert run("kernel", kernel, EMU_WORKERS="3").result == result


# ---- The build.


def test_second_build_runs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    plants.__wrapped__(checked=False)

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError

    build.compiler_version()
    monkeypatch.setattr("subprocess.run", refuse)
    assert plants.__wrapped__(checked=False).exists()


def test_changed_source_is_compiled_again(tmp_path: Path) -> None:
    source = tmp_path / "changing.cu"
    text = (PLANTS / "sound.cu").read_text()

    def inode() -> int:
        build.digest.cache_clear()
        return build.build_library("changing", [source]).stat().st_ino

    source.write_text(text)
    first = inode()
    assert inode() == first
    source.write_text(text.replace("y[i] += a", "y[i] += 2 * a"))
    assert inode() != first


def test_missing_compiler_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        build.BuildError, match="the C\\+\\+ compiler 'no-such-compiler' is missing: install g\\+\\+"
    ):
        build.compiler.__wrapped__()


def test_error_of_the_compiler_names_file_and_line(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("\n\nbroken\n")
    with pytest.raises(build.BuildError, match=r"broken\.cu:3:1: error"):
        build.build_library("broken", [source])
