"""CUDA attention on the host: against float64, and the same bits for every division of the work."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.kernels import cuda, kv_pages
from support.kernels.kv_pages import KvLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.kernels.cuda import Array

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels

SPLIT = 256
#: The largest heads of `decode_wide`.
WIDE_HEAD_DIM = 128
#: The rows of a work item, and the threads of its blocks.
ROWS = {"decode": 16, "decode_wide": 16, "prefill": 64, "prefill_warpgroup": 128}
THREADS = {"decode": 32, "decode_wide": 128, "prefill": 128, "prefill_warpgroup": 256, "combine": 128}
#: A work item without rows. The rest of it is not read.
NO_WORK_ITEM = [0x7FFFFFFF] * 4 + [0] + [0x7FFFFFFF] * 3


@pytest.fixture(scope="module")
def kernels() -> cuda.HostKernels:
    return cuda.host_kernels()


class Attention(ctypes.Structure):
    """``Attention`` of ``cuda/attention.cu``."""

    _fields_ = (
        *((f"pointer_{i}", ctypes.c_void_p) for i in range(5)),
        ("cache", kv_pages.KvCache),
        ("heads", ctypes.c_int),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("out_type", ctypes.c_int),
    )


#: ``FloatType`` of ``cuda/attention_call.cuh``.
FLOAT_TYPES = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class Case:
    """A cache with sequences of these lengths, and the heads that attend to it."""

    dtype: str = "bf16"  # of the arithmetic
    kv: str = "bf16"
    out_dtype: str | None = None  # by default, that of the arithmetic
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 3
    block_size: int = 16
    lengths: tuple[int, ...] = (300,)
    window: int = 0
    softcap: float = 0.0
    value_factor: float = 1.5
    bad_value: tuple[int, float] | None = None  # a position of the first sequence, and a value there

    @property
    def layout(self) -> KvLayout:
        """The layout of the cache."""
        return KvLayout(self.kv, self.kv_heads, self.head_dim, self.block_size)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def result(self) -> str:
        """The type of the result."""
        return self.out_dtype or self.dtype

    @property
    def kernels(self) -> list[str]:
        """The kernels for decode and prefill."""
        words = -(-self.head_dim * self.layout.bits // 128)
        has_wide = self.dtype != "f32" and self.head_dim <= WIDE_HEAD_DIM and words % 4 == 0
        has_warpgroup = self.dtype != "f32" and has_warpgroup_prefill(self.kv, self.head_dim)
        return ["prefill", "decode", *["decode_wide"] * has_wide, *["prefill_warpgroup"] * has_warpgroup]

    @property
    def variant(self) -> str:
        """The end of the kernels' names."""
        dim = "" if self.dtype == "f32" else f"_{self.head_dim}"
        return f"{self.dtype}_{self.kv}{dim}"


class Filled:
    """The cache of a case after all positions have been written, and the queries of all positions."""

    def __init__(self, kernels: cuda.HostKernels, case: Case) -> None:
        self.kernels, self.case = kernels, case
        self.combine_blocks = 1  # for a work item; none: the kernel is not launched
        rng = np.random.default_rng(sum(case.lengths) + case.head_dim)
        layout, dim, size = case.layout, case.head_dim, case.block_size
        counts = [-(-length // size) for length in case.lengths]
        order = np.random.default_rng(1).permutation(sum(counts) + 1)[: sum(counts)].astype(np.uint32)
        self.tables = np.split(order, np.cumsum(counts)[:-1])
        self.cache = np.full(
            (sum(counts) + 1) * layout.block_bytes, 0xFF, np.uint8
        )  # NaN where nothing is written
        self.starts = np.cumsum([0, *case.lengths])
        rows = int(self.starts[-1])
        self.qkv = rng.standard_normal((rows, case.heads + 2 * case.kv_heads, dim)).astype(np.float32)
        self.qkv[:, case.heads : -case.kv_heads] *= 1.5
        self.qkv[:, -case.kv_heads :] *= case.value_factor
        if case.bad_value is not None:
            self.qkv[case.bad_value[0], -case.kv_heads :, 3] = case.bad_value[1]
        self.inputs = self.qkv.copy()
        positions = np.concatenate([np.arange(length) for length in case.lengths])
        table = np.repeat([[1.0, 0.0]], dim // 2, axis=1).astype(np.float32)
        zeros = np.zeros(rows, np.uint32)
        blocks = np.concatenate(
            [
                table[np.arange(length) // size]
                for table, length in zip(self.tables, case.lengths, strict=True)
            ]
        )
        offsets = (positions % size).astype(np.uint32)
        inputs = (cuda.constant(zeros), None, cuda.constant(blocks), cuda.constant(offsets))
        call = kv_pages.RopeWriteKv(
            *cuda.addresses(self.qkv, None, None, table, None, *inputs),
            layout.argument(self.cache),
            case.heads,
            dim // 2,
            0.0,
        )
        grid = [rows, -(-(case.heads + 2 * case.kv_heads) // 4)]
        kernels.launch(f"rope_write_kv_{case.kv}", grid, 128, call, shared=32 * dim)

    def attend(self, parts: Sequence[tuple[int, int, int]], kernel: str) -> Array:
        """The rows of some queries: of a sequence, from a position to another."""
        case, limit = self.case, ROWS[kernel]
        items, split_items, places = [NO_WORK_ITEM], [], 0
        rows: list[int] = []
        for sequence, first, last in parts:
            first_block = sum(len(table) for table in self.tables[:sequence])
            packed = (last - first) * case.group
            for start in range(0, packed, limit):
                count = min(limit, packed - start)
                splits = (first + (start + count - 1) // case.group) // SPLIT + 1
                entry = [len(rows), first, first_block, start, count, 0, places, 0]
                items.append(entry)
                split_items += [[*entry[:5], split, *entry[6:]] for split in range(splits)] + [NO_WORK_ITEM]
                places += splits * case.kv_heads * count
            rows += range(self.starts[sequence] + first, self.starts[sequence] + last)
        qkv = np.ascontiguousarray(self.qkv[rows])
        out = cuda.to_bits(np.full((len(rows), case.heads, case.head_dim), np.nan), case.result)
        partials = np.full((places, case.head_dim + 2), np.nan, np.float32)
        blocks = np.concatenate(self.tables)
        launches = [(kernel, items, 1)]
        if kernel.startswith("decode"):
            launches = [(kernel, split_items, 1), ("combine", items, self.combine_blocks)]
        for name, entries, depth in launches:
            if depth == 0:
                continue
            grid, array = [len(entries), case.kv_heads, depth], np.array(entries, np.uint32)
            call = Attention(
                *cuda.addresses(qkv, cuda.constant(blocks), cuda.constant(array), partials, out),
                case.layout.argument(self.cache),
                case.heads,
                case.window,
                case.head_dim**-0.5,
                case.softcap,
                FLOAT_TYPES.index(case.result),
            )
            shared = shared_bytes(name, case.dtype, case.kv, case.head_dim)
            function = f"attention_{name}_{case.variant}"
            self.kernels.launch(function, grid, THREADS[name], call, shared=shared)
        return out

    def expected(self, parts: Sequence[tuple[int, int, int]]) -> Array:
        """The same in float64, over the keys and values that the cache restores."""
        case, out = self.case, []
        scale = float(np.float32(case.head_dim**-0.5))
        for sequence, first, last in parts:
            restored = [
                [self.restored(sequence, position, head) for position in range(last)]
                for head in range(case.kv_heads)
            ]
            for position in range(first, last):
                low = max(0, position - case.window + 1) if case.window else 0
                for head in range(case.heads):
                    keys, values = np.array(restored[head // case.group][low : position + 1]).transpose(
                        1, 0, 2
                    )
                    x = keys @ self.inputs[self.starts[sequence] + position, head].astype(np.float64) * scale
                    x = case.softcap * np.tanh(x / case.softcap) if case.softcap else x
                    p = np.exp(x - x.max())
                    out.append(p @ values / p.sum())
        return np.array(out).reshape(-1, case.heads, case.head_dim)

    def restored(self, sequence: int, position: int, head: int) -> tuple[Array, Array]:
        """The key and the value of a position."""
        block = self.tables[sequence][position // self.case.block_size]
        page = self.case.layout.page(self.cache, block, head)
        return page.restored(position % self.case.block_size)


def has_warpgroup_prefill(kv: str, head_dim: int) -> bool:
    """Whether warpgroups have a kernel of prefill for a cache."""
    return (kv, head_dim) == ("int8", 128) or (kv in ("bf16", "f16") and head_dim in (64, 128))


def shared_bytes(kernel: str, dtype: str, kv: str, head_dim: int) -> int:
    """The dynamic shared memory of a block."""
    if kernel == "decode_wide":
        return 64 << 10
    if kernel == "prefill_warpgroup":
        return 1024 + 1280 * head_dim + (3 << 10 if kv == "int8" else 0)
    has_queries = kernel != "combine" and dtype != "f32" and head_dim > 128
    return 2 * head_dim * ROWS[kernel] if has_queries else 0


CASES = [
    Case(lengths=(1, 31, 300)),
    Case(dtype="f16", kv="f16", lengths=(65, 270), block_size=32),
    Case(kv="int8", lengths=(5, 290)),
    Case(dtype="f16", kv="int8", group=1, lengths=(40,)),
    Case(kv="int8", head_dim=32, group=1, lengths=(40,)),
    Case(kv="uint4", lengths=(9, 280)),
    Case(dtype="f16", kv="uint4", group=5, lengths=(50,)),
    Case(kv="uint4", head_dim=128, group=4, lengths=(50,)),
    Case(head_dim=128, kv_heads=1, group=8, lengths=(70,)),
    Case(head_dim=32, kv="uint4", kv_heads=1, group=2, lengths=(33,)),
    Case(kv="int8", head_dim=128, kv_heads=1, group=7, lengths=(64,), softcap=2.0),
    Case(lengths=(300, 20), window=37),
    Case(lengths=(520,), window=300, group=1, softcap=5.0),
    Case(head_dim=32, kv_heads=1, group=20, lengths=(35,)),
    *(
        Case(dtype="f16", kv=kv, group=1, lengths=(length,), value_factor=factor)
        for kv in ("int8", "uint4")
        for length, factor in ((201, 1e-3), (202, 1e-4), (203, 3e3))
    ),
    Case(dtype="f16", kv="f16", head_dim=32, lengths=(40,)),
    Case(head_dim=96, lengths=(70,)),
    Case(head_dim=80, lengths=(70,)),
    Case(kv="uint4", head_dim=80, group=1, lengths=(40,)),
    Case(dtype="f16", kv="int8", head_dim=80, kv_heads=1, lengths=(33,)),
    Case(dtype="f16", kv="uint4", head_dim=48, kv_heads=1, lengths=(33,)),
    Case(dtype="f16", kv="f16", head_dim=160, kv_heads=1, group=1, lengths=(40,)),
    Case(head_dim=256, kv_heads=1, lengths=(300,), window=270),
    Case(kv="int8", head_dim=256, kv_heads=1, group=2, lengths=(40,)),
    Case(dtype="f16", kv="uint4", head_dim=256, kv_heads=1, group=1, lengths=(290,)),
    Case(dtype="f16", kv="uint4", head_dim=144, kv_heads=1, group=1, lengths=(290,)),
    Case(out_dtype="f32", lengths=(70,)),
    Case(out_dtype="f16", kv="uint4", lengths=(70,)),
    Case(dtype="f16", kv="f16", out_dtype="bf16", lengths=(70,)),
    Case(dtype="f32", kv="f32", lengths=(1, 31, 300)),
    Case(dtype="f32", kv="f32", head_dim=8, lengths=(300, 20), window=37),
    Case(dtype="f32", kv="f32", head_dim=256, kv_heads=1, lengths=(40,), softcap=5.0, block_size=48),
    Case(dtype="f32", kv="bf16", head_dim=80, group=2, lengths=(70,)),
    Case(dtype="f32", kv="f16", head_dim=18, group=20, kv_heads=1, lengths=(65,), out_dtype="bf16"),
    Case(dtype="f32", kv="int8", head_dim=20, lengths=(70,), out_dtype="f16"),
    *(Case(dtype="f32", kv="uint4", head_dim=dim, lengths=(33,)) for dim in (16, 48, 80, 128, 160)),
]

#: The error of a result relative to the largest one. Queries, weights and results are rounded to the type,
#: and the weights of quantised values to bf16, if tensor cores multiply them.
TOLERANCE = {"bf16": 0.02, "f16": 0.004, "f32": 1e-5}


def last_rows(case: Case, count: int) -> list[tuple[int, int, int]]:
    """The last queries of every sequence."""
    return [(index, max(0, length - count), length) for index, length in enumerate(case.lengths)]


def name_of(value: Case | str) -> str:
    """The name of a parameter."""
    if isinstance(value, str):
        return value
    return f"{value.variant}-{value.head_dim}-{value.result}-{value.lengths}"


@pytest.mark.parametrize(
    ("case", "kernel"), [(case, kernel) for case in CASES for kernel in case.kernels], ids=name_of
)
def test_attention_equals_float64(kernels: cuda.HostKernels, case: Case, kernel: str) -> None:
    filled = Filled(kernels, case)
    parts = last_rows(case, 5 if kernel.startswith("prefill") else 1)
    out, expected = cuda.to_floats(filled.attend(parts, kernel)), filled.expected(parts)
    weights = "bf16" if case.dtype == "f16" and case.kv in ("int8", "uint4") else case.dtype
    tolerance = max(TOLERANCE[dtype] for dtype in (case.dtype, case.result, weights))
    assert np.abs(out - expected).max() < tolerance * np.abs(expected).max()
    assert np.sqrt(np.mean((out - expected) ** 2)) < tolerance / 3 * np.sqrt(np.mean(expected**2))


def test_weights_of_centred_codes_cost_little_precision(kernels: cuda.HostKernels) -> None:
    case = Case(dtype="f16", kv="int8", group=1, lengths=(40,))
    filled = Filled(kernels, case)
    parts = last_rows(case, 7)
    out, expected = cuda.to_floats(filled.attend(parts, "prefill")), filled.expected(parts)
    # A weight is rounded to 2^-9, and multiplies codes up to 128; without the centre, up to 255.
    assert np.sqrt(np.mean((out - expected) ** 2)) < 0.002 * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(600, 300)),
        Case(kv="int8", lengths=(300, 40)),
        Case(dtype="f16", kv="uint4", lengths=(300, 40)),
        Case(lengths=(600,), window=280, softcap=3.0),
        Case(dtype="f16", kv="int8", lengths=(300, 40), value_factor=1e-4),
        Case(kv="uint4", head_dim=80, kv_heads=1, group=2, lengths=(300, 40)),
        Case(head_dim=256, kv_heads=1, group=1, lengths=(520, 40)),
        Case(kv="int8", head_dim=256, kv_heads=1, group=1, lengths=(300,), softcap=3.0),
        Case(dtype="f32", kv="f32", lengths=(600, 40), window=280),
        Case(dtype="f32", kv="uint4", head_dim=80, lengths=(300, 40), softcap=3.0),
    ],
    ids=[
        *("plain", "int8", "uint4", "window", "small", "uint4 of 80", "256", "int8 of 256"),
        *("float32", "float32 of uint4"),
    ],
)
def test_bits_do_not_depend_on_the_division(kernels: cuda.HostKernels, case: Case) -> None:
    filled = Filled(kernels, case)
    parts = last_rows(case, 23)
    expected = filled.attend(parts, "prefill")
    assert np.isfinite(cuda.to_floats(expected)).all()
    for kernel in case.kernels:
        assert np.array_equal(filled.attend(parts, kernel), expected), kernel
    assert np.array_equal(filled.attend(parts[::-1], "prefill")[-23:], expected[:23])
    sequence, first, last = parts[0]
    for low, high in [(first, first + 1), (first + 5, first + 16), (last - 1, last)]:
        for kernel in case.kernels:
            alone = filled.attend([(sequence, low, high)], kernel)
            assert np.array_equal(alone, expected[low - first : high - first]), (low, high, kernel)


@pytest.mark.parametrize(
    "case",
    [
        Case(head_dim=128, kv_heads=1, group=1, lengths=(600, 129)),
        Case(dtype="f16", kv="f16", kv_heads=1, group=2, lengths=(520,), window=70, softcap=3.0),
        Case(kv_heads=1, group=16, lengths=(100,), block_size=48),
        Case(kv="int8", head_dim=128, kv_heads=1, group=1, lengths=(600, 129)),
        Case(kv="int8", head_dim=128, kv_heads=1, lengths=(300,), window=70, softcap=3.0, block_size=32),
    ],
    ids=["two groups", "window", "many heads", "int8", "int8 with window"],
)
def test_warpgroups_have_the_bits_of_other_kernels(kernels: cuda.HostKernels, case: Case) -> None:
    filled = Filled(kernels, case)
    parts = [(index, 0, length) for index, length in enumerate(case.lengths)]
    expected = filled.attend(parts, "prefill")
    assert np.array_equal(filled.attend(parts, "prefill_warpgroup"), expected)
    last = [(sequence, max(0, end - 67), end) for sequence, _, end in parts]
    assert np.array_equal(filled.attend(last, "prefill_warpgroup"), filled.attend(last, "decode"))


@pytest.mark.parametrize(
    "case",
    [
        Case(head_dim=32, kv_heads=1, group=3, lengths=(4500,)),
        Case(dtype="f32", kv="f32", head_dim=36, kv_heads=1, group=1, lengths=(4500, 4096)),
    ],
    ids=["tensor cores", "float32"],
)
def test_many_splits_are_merged_in_order(kernels: cuda.HostKernels, case: Case) -> None:
    filled = Filled(kernels, case)
    parts = last_rows(case, 2)
    expected = filled.attend(parts, "prefill")
    for filled.combine_blocks in (1, 4, 16):
        assert np.array_equal(filled.attend(parts, "decode"), expected), filled.combine_blocks


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(200, 256, 1), group=7),
        Case(kv="uint4", lengths=(40,)),
        Case(lengths=(600,), window=60),
        Case(dtype="f32", kv="int8", lengths=(200, 1)),
        Case(dtype="f32", kv="f32", lengths=(600,), window=60),
    ],
    ids=["tensor cores", "rotated", "window", "float32", "float32 with window"],
)
def test_one_split_needs_no_merge(kernels: cuda.HostKernels, case: Case) -> None:
    filled = Filled(kernels, case)
    parts = last_rows(case, 3)
    expected = filled.attend(parts, "prefill")
    for filled.combine_blocks, kernel in itertools.product((0, 1), case.kernels):
        assert np.array_equal(filled.attend(parts, kernel), expected), (filled.combine_blocks, kernel)


@pytest.mark.parametrize(
    ("dtype", "kv", "bad"),
    [
        ("bf16", "bf16", np.inf),
        ("bf16", "bf16", np.nan),
        ("f16", "f16", 7e4),
        ("bf16", "int8", np.inf),
        ("bf16", "uint4", np.inf),
        ("f32", "f32", np.inf),
        ("f32", "int8", np.nan),
        ("f32", "uint4", np.inf),
    ],
)
def test_bad_value_changes_the_rows_that_see_it(
    kernels: cuda.HostKernels, dtype: str, kv: str, bad: float
) -> None:
    case = Case(dtype, kv, lengths=(64,), window=30)
    sound, filled = (Filled(kernels, replace(case, bad_value=value)) for value in (None, (20, bad)))
    expected, out = (data.attend([(0, 0, 64)], "prefill") for data in (sound, filled))
    sees = (np.arange(64) >= 20) & (np.arange(64) < 50)
    assert np.isnan(cuda.to_floats(out[sees])).all()
    assert np.array_equal(out[~sees], expected[~sees])
    for position, kernel in itertools.product((5, 19, 20, 49, 50), case.kernels):
        alone = filled.attend([(0, position, position + 1)], kernel)
        assert np.array_equal(np.isnan(cuda.to_floats(alone[0])), np.isnan(cuda.to_floats(out[position])))
        if not sees[position]:
            assert np.array_equal(alone[0], out[position])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_results_of_f16_are_saturated(kernels: cuda.HostKernels, dtype: str) -> None:
    case = Case(dtype=dtype, kv="int8", out_dtype="f16", lengths=(40,), value_factor=1e5)
    filled = Filled(kernels, case)
    parts = last_rows(case, 3)
    expected = filled.expected(parts).clip(-65504, 65504)
    assert np.abs(expected).max() == 65504
    for kernel in case.kernels:
        assert np.allclose(filled.attend(parts, kernel), expected, rtol=0.02, atol=1500)


def test_blocks_before_the_window_are_not_read(kernels: cuda.HostKernels) -> None:
    case = Case(lengths=(300,), window=40)
    filled = Filled(kernels, case)
    parts = [(0, 298, 300)]
    expected = {kernel: filled.attend(parts, kernel) for kernel in case.kernels}
    filled.tables[0][: (299 - 41) // 16] = 0x7FFFFFFF
    for kernel, out in expected.items():
        assert np.array_equal(filled.attend(parts, kernel), out)


def test_other_block_sizes_have_the_same_bits(kernels: cuda.HostKernels) -> None:
    case = Case(lengths=(100,), kv="int8")
    parts = last_rows(case, 3)
    outs = [Filled(kernels, replace(case, block_size=size)).attend(parts, "prefill") for size in (16, 32, 48)]
    assert np.array_equal(outs[0], outs[1])
    assert np.array_equal(outs[0], outs[2])
