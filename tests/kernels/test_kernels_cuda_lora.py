"""CUDA low-rank updates on the host: against float64, and the same bits for every division of the rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.kernels import cuda

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.kernels.cuda import Array

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels

MAX_UPDATES = 3
TILE_ROWS = 16
TYPES = ["f32", "bf16", "f16"]  # in the order of `FloatType`

#: ``Update`` and ``Tile`` of ``cuda/lora.cu``.
UPDATE = np.dtype(
    [
        ("a", "u8"),
        ("b", "u4"),
        ("type", "i4"),
        ("scale", "f4"),
        ("rank", "i4"),
        ("first_column", "i4"),
        ("num_columns", "i4"),
    ]
)
TILE = np.dtype([("first", "i4"), ("rows", "i4"), ("adapter", "i4")])


class LowRank(ctypes.Structure):
    """``LowRank`` of ``cuda/lora.cu``."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
        ("updates", ctypes.c_void_p),
        ("columns", ctypes.c_int),
        ("width", ctypes.c_int),
        ("hidden_pitch", ctypes.c_int),
        ("update_pitch", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def kernels() -> cuda.HostKernels:
    return cuda.host_kernels()


@dataclass
class Update:
    """The update of some columns of the output."""

    a: Array
    b: Array
    first: int = 0
    scale: float = 1.0
    dtype: str = "f32"

    def packed(self) -> tuple[bytes, bytes]:
        """A and B, of 64-byte units; the rows of B are filled up to a multiple of 4 values."""
        rank = self.a.shape[0]
        b = np.pad(self.b, ((0, 0), (0, -rank % 4)))
        of_a, of_b = (cuda.to_bits(values, self.dtype).tobytes() for values in (self.a, b))
        return of_a + bytes(-len(of_a) % 64), of_b + bytes(-len(of_b) % 64)

    def of(self, x: Array) -> Array:
        """The product with rows of x, in float64."""
        a, b = (cuda.to_floats(cuda.to_bits(values, self.dtype)) for values in (self.a, self.b))
        result: Array = np.float32(self.scale) * (cuda.to_floats(x) @ a.T @ b.T)
        return result


def random_update(
    rank: int, columns: int, rows: int, *, first: int = 0, scale: float = 1.0, dtype: str = "f32"
) -> Update:
    rng = np.random.default_rng([rank, columns, rows, first])
    a, b = rng.standard_normal((rank, columns)) / columns**0.5, rng.standard_normal((rows, rank)) / rank**0.5
    return Update(a, b, first, scale, dtype)


def random_rows(rows: int, columns: int, dtype: str = "f32") -> Array:
    return cuda.to_bits(np.random.default_rng(rows + columns).standard_normal((rows, columns)), dtype)


#: The updates of a matrix, by adapter.
Adapters = list[list[Update]]


def in_memory(adapters: Adapters) -> tuple[Array, Array]:
    """The bytes of the updates, and the table of them; those of another matrix are beside them."""
    memory, table = b"", np.zeros((len(adapters), MAX_UPDATES + 2), UPDATE)
    table[:, MAX_UPDATES:]["rank"] = 1 << 20
    for adapter, updates in enumerate(adapters):
        for index, update in enumerate(updates):
            a, b = update.packed()
            shape = len(update.a), update.first, len(update.b)
            table[adapter, index] = (len(memory), len(a), TYPES.index(update.dtype), update.scale, *shape)
            memory += a + b
    return np.frombuffer(memory or bytes(64), np.uint8), table


def tiles_of(rows: Sequence[int | None]) -> list[tuple[int, int, int]]:
    """The tiles of rows by their adapters."""
    tiles: list[tuple[int, int, int]] = []
    for row, adapter in enumerate(rows):
        if adapter is None:
            continue
        first, count, last = tiles[-1] if tiles else (0, 0, None)
        if last == adapter and first + count == row and count < TILE_ROWS:
            tiles[-1] = (first, count + 1, adapter)
        else:
            tiles.append((row, 1, adapter))
    return tiles


def run(
    kernels: cuda.HostKernels, x: Array, out: Array, adapters: Adapters, tiles: list[tuple[int, int, int]]
) -> Array:
    """The output after the updates of some tiles; guard rows behind it stay as they were."""
    (rows, width), columns = out.shape, x.shape[1]
    every = [update for updates in adapters for update in updates]
    highest, most = (
        max(len(values) for values in parts) for parts in zip(*((u.a, u.b) for u in every), strict=True)
    )
    memory, table = in_memory(adapters)
    pitch = -(-highest // 16) * 16
    hidden = np.full((rows, MAX_UPDATES, pitch), np.nan, np.float32)
    result = np.concatenate([out, np.full((1, width), np.nan, np.float32)])
    tile_array = np.array(tiles, TILE)

    def launch(name: str, blocks: int, threads: int) -> None:
        uploaded = cuda.constant(tile_array), memory, cuda.constant(table)
        places = cuda.addresses(x, hidden, result, *uploaded)
        call = LowRank(*places, columns, width, pitch, table.shape[1])
        kernels.launch(name, [len(tiles), blocks, MAX_UPDATES], threads, call)

    dtype = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}.get(x.dtype, "bf16")
    kernel = "lora_shrink" if columns % 4 == 0 else "lora_shrink_any"
    launch(f"{kernel}_{dtype}", pitch // 16, 512)
    launch("lora_expand", -(-most // 128), 128)
    assert np.isnan(result[rows]).all()
    return result[:rows]


def expected(x: Array, out: Array, adapters: Adapters, rows: Sequence[int | None]) -> Array:
    """The same in float64."""
    result = out.astype(np.float64)
    for row, adapter in enumerate(rows):
        for update in adapters[adapter] if adapter is not None else []:
            result[row, update.first : update.first + len(update.b)] += update.of(x[row : row + 1])[0]
    return result


def check(kernels: cuda.HostKernels, x: Array, update: Update) -> None:
    """Compares the update of all rows and columns with float64."""
    out, rows = random_rows(len(x), len(update.b)), [0] * len(x)
    result = run(kernels, x, out, [[update]], tiles_of(rows))
    assert np.allclose(result, expected(x, out, [[update]], rows), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("of_x", TYPES)
@pytest.mark.parametrize(
    "shape", [(1, 4, 1), (16, 64, 128), (5, 68, 130), (17, 1091, 40), (33, 2052, 40)], ids=str
)
def test_update_equals_float64(
    kernels: cuda.HostKernels, of_x: str, dtype: str, shape: tuple[int, int, int]
) -> None:
    rank, columns, width = shape
    update = random_update(rank, columns, width, scale=0.75, dtype=dtype)
    check(kernels, random_rows(3, columns, of_x), update)


def test_rows_have_adapters_of_their_own(kernels: cuda.HostKernels) -> None:
    """Several ranks, types, scales and parts; rows without an adapter stay as they are."""
    query, key, value = (0, 96), (96, 40), (136, 40)
    adapters = [
        [random_update(8, 96, count, first=first, scale=2) for first, count in (query, key, value)],
        [random_update(16, 96, key[1], first=key[0], dtype="bf16")],
        [random_update(3, 96, value[1], first=value[0], scale=-1, dtype="f16")],
        [random_update(40, 96, count, first=first) for first, count in (query, value)],
        [],
    ]
    rows = [0, 1, 2, None, 3, 3, None, None, 4, 2, *[0] * 20, *[1] * 16, *[3] * 33, 0]
    x = random_rows(len(rows), 96, "bf16")
    out = random_rows(len(rows), 176)
    result = run(kernels, x, out, adapters, tiles_of(rows))
    assert np.allclose(result, expected(x, out, adapters, rows), rtol=1e-6, atol=4e-6)
    untouched = [row for row, adapter in enumerate(rows) if adapter in (None, 4)]
    assert np.array_equal(result[untouched], out[untouched])


@pytest.mark.parametrize("of_x", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_do_not_depend_on_the_tiles(kernels: cuda.HostKernels, of_x: str, dtype: str) -> None:
    adapters = [[random_update(20, 1100, 150, first=3, dtype=dtype)], [random_update(64, 1100, 160)]]
    x, out = random_rows(19, 1100, of_x), random_rows(19, 160)
    alone = run(kernels, x, out, adapters, [(row, 1, 0) for row in range(19)]).view(np.uint32)
    for tiles in [
        [(0, 16, 0), (16, 3, 0)],
        [(0, 3, 0), (3, 9, 0), (12, 7, 0)],
        [(12, 7, 0), (0, 0, 0), (0, 12, 0)],
    ]:
        assert np.array_equal(run(kernels, x, out, adapters, tiles).view(np.uint32), alone)
    mixed = run(kernels, x, out, adapters, [(0, 1, 1), (1, 2, 0), (3, 5, 1), (8, 11, 0)]).view(np.uint32)
    own = [1, 2, *range(8, 19)]
    assert np.array_equal(mixed[own], alone[own])


@pytest.mark.parametrize("of_x", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_do_not_depend_on_the_alignment(kernels: cuda.HostKernels, of_x: str, dtype: str) -> None:
    """Columns of zeros change nothing."""
    update, x, out = random_update(6, 130, 40, dtype=dtype), random_rows(3, 130, of_x), random_rows(3, 40)
    wide = Update(np.pad(update.a, ((0, 0), (0, 2))), update.b, dtype=dtype)
    found = run(kernels, x, out, [[update]], [(0, 3, 0)])
    padded = run(kernels, np.pad(x, ((0, 0), (0, 2))), out, [[wide]], [(0, 3, 0)])
    assert np.array_equal(found.view(np.uint32), padded.view(np.uint32))


def test_row_of_nan_does_not_change_others(kernels: cuda.HostKernels) -> None:
    x, out = random_rows(11, 96, "bf16"), random_rows(11, 40)
    adapters = [[random_update(8, 96, 40)]]
    plain = run(kernels, x, out, adapters, [(0, 11, 0)])
    x[4] = 0x7FC0
    result = run(kernels, x, out, adapters, [(0, 11, 0)])
    assert np.isnan(result[4]).all()
    others = np.arange(11) != 4
    assert np.array_equal(result[others], plain[others])


def test_float32_keeps_its_precision(kernels: cuda.HostKernels) -> None:
    """Terms that cancel; only the last bits of float32 remain."""
    a, b = np.array([[1 + 2**-20, -1, 0, 0]]), np.array([[1 + 2**-22]])
    x = np.array([[1 + 2**-21, 1 + 2**-21, 0, 0]], np.float32)
    result = run(kernels, x, np.zeros((1, 1), np.float32), [[Update(a, b)]], [(0, 1, 0)])
    assert np.allclose(result, 2**-20, rtol=2**-2, atol=0)


def test_update_of_zeros_changes_no_bit(kernels: cuda.HostKernels) -> None:
    update = random_update(8, 96, 40)
    out = random_rows(5, 40)
    for zero in (Update(update.a, update.b * 0), Update(update.a, update.b, scale=0)):
        assert np.array_equal(run(kernels, random_rows(5, 96), out, [[zero]], [(0, 5, 0)]), out)


def test_large_and_small_values_keep_their_ratio(kernels: cuda.HostKernels) -> None:
    for factor in (1e-30, 1e-10, 1e10, 1e18):
        update = random_update(8, 64, 24)
        check(kernels, random_rows(2, 64), Update(update.a * factor, update.b / factor))
