"""Times of single kernels, launched through the driver from a captured graph."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import test_kernels_cuda_attention as attention
import test_kernels_cuda_gemm as gemm
import test_kernels_cuda_gemm_quantised as quantised
from cases import Attention, Product, QuantisedProduct
from rows import Row, Rows

from emu.client import DriverError, Pointer
from support.kernels.gpu import Gpu
from support.kernels.kv_pages import KvCache, KvLayout
from support.kernels.quantised_matrix import Format, tile_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 7
#: Rows up to which a product is by `gemv`, and by `gemm_narrow`, as in the engine without a division.
MOST_GEMV_ROWS, MOST_NARROW_ROWS = 8, 64
#: The formats of quantised weights, as they are loaded, and the type of the activations.
FORMATS = {
    "int4": (Format("code4", 32, "bf16", "stored"), "int8"),
    "int8": (Format("code8", 128, "bf16"), "int8"),
    "fp8": (Format("e4m3", 0, "f32"), "fp8"),
    "w4a16": (Format("code4", 32, "bf16", "stored"), "bf16"),
}
#: Blocks of a launch of combine; with fewer, 4 share a work item.
ENOUGH_BLOCKS = 256
KV_NAMES = {"bfloat16": "bf16", "int8": "int8", "uint4": "uint4"}
BLOCK_SIZE = 16
#: Random bytes that buffers repeat.
RANDOM = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32).view(np.uint16)[1::2].copy()

Launch = tuple[str, tuple[Any, ...], ctypes.Structure]


class Bench(Gpu):
    """A device that measures launches."""

    output_buffer, output_size = Pointer(0), 0

    def random(self, size: float) -> Pointer:
        """Device memory of bfloat16 numbers of a normal distribution."""
        size = max(int(size), 256)
        buffer = self.alloc(size)
        filled = min(size, RANDOM.nbytes)
        self.call("cuMemcpyHtoD_v2", buffer, ctypes.c_void_p(RANDOM.ctypes.data), filled)
        self.call("cuCtxSynchronize")  # the stream does not wait for this copy
        stream = self.stream()
        while filled < size:
            part = min(filled, size - filled)
            self.call("cuMemcpyDtoDAsync_v2", buffer + filled, buffer, part, stream)
            filled += part
        self.wait(stream)
        return buffer

    def array(self, values: np.ndarray[Any, Any]) -> Pointer:
        """Device memory with an array."""
        buffer = self.alloc(values.nbytes)
        self.call("cuMemcpyHtoD_v2", buffer, ctypes.c_void_p(values.ctypes.data), values.nbytes)
        self.call("cuCtxSynchronize")
        return buffer

    def reset_output(self, size: int) -> None:
        """Another buffer for results, of bytes that no result has."""
        self.output_buffer, self.output_size = self.alloc(size), size
        stream = self.stream()
        self.call("cuMemsetD8Async", self.output_buffer, 0xFF, size, stream)
        self.wait(stream)

    def is_output_written(self) -> bool:
        """Whether the results have a beginning and an end."""
        ends = ctypes.create_string_buffer(16)
        for place in (0, self.output_size - 16):
            self.call("cuMemcpyDtoH_v2", ends, self.output_buffer + place, 16)
            if ends.raw == b"\xff" * 16:
                return False
        return True

    def times(
        self, operations: list[list[Launch]], repeats: int = REPEATS, *, dependent: bool = False
    ) -> list[float]:
        """The time of an operation, which is some launches, from replays of a graph of all operations.

        With `dependent`, a kernel may start while the one before it ends.
        """
        for name, _, _ in operations[0]:
            self.function(name)

        def launch(stream: int, launches: list[Launch]) -> None:
            for name, shape, argument in launches:
                self.launch(stream, name, shape, argument, dependent=dependent)

        return self.timed([functools.partial(launch, launches=launches) for launches in operations], repeats)

    def timed(self, calls: list[Callable[[int], None]], repeats: int = REPEATS) -> list[float]:
        """The time of a call, which launches kernels in a stream, from replays of a graph of all calls."""
        stream = self.stream()
        self.begin_capture(stream)
        for call in calls:
            call(stream)
        graph = self.end_capture(stream)
        start, end = (
            self.own("cuEventDestroy_v2", self.output(ctypes.c_void_p, "cuEventCreate", 0)) for _ in "ab"
        )
        found = []
        for _ in range(repeats):
            self.call("cuEventRecord", start, stream)
            self.call("cuGraphLaunch", graph, stream)
            self.call("cuEventRecord", end, stream)
            self.wait(stream)
            milliseconds = self.output(ctypes.c_float, "cuEventElapsedTime", start, end)
            found.append(milliseconds / 1e3 / len(calls))
        return found[1:]

    def release(self) -> None:
        """Free the memory and the other objects of a case."""
        self.call("cuCtxSynchronize")
        for destroy, handle in reversed(self.owned):
            self.call(destroy, handle)
        self.owned.clear()


def product(bench: Bench, case: Product) -> list[list[Launch]]:
    """The launches of a product with each copy of its weights, by the kernel that is the fastest."""
    bench.reset_output(4 * case.rows * case.outputs)
    operands = {
        "x": bench.random(2 * case.rows * case.inner),
        "out": bench.output_buffer,
        "rows": case.rows,
        "outputs": case.outputs,
        "inner": case.inner,
        "pitch": case.outputs,
    }
    weights = [bench.random(2 * case.outputs * case.inner) for _ in range(case.copies)]
    candidates = [
        [[(f"{name}_bf16", shape, gemm.Product(w=w, **operands))] for w in weights]
        for name, shape in kernels_of(bench, case)
    ]
    return min(candidates, key=lambda launches: min(bench.times(launches)))


def kernels_of(bench: Bench, case: Product) -> list[tuple[str, tuple[Any, ...]]]:
    """The kernels that the engine chooses from, with their launches, without split-K."""
    if case.rows <= MOST_GEMV_ROWS:
        names = ["gemv"]
    elif bench.has_warpgroups:
        names = [*gemm.STAGES]
    else:
        names = ["gemm_wide" if case.rows > MOST_NARROW_ROWS else "gemm_narrow"]
    found: list[tuple[str, tuple[Any, ...]]] = []
    for name in names:
        outputs, rows = gemm.TILES[name]
        tiles = (-(-case.outputs // outputs), -(-case.rows // rows))
        if name == "gemv":
            found.append((name, (tiles, 32 * min(8, -(-case.inner // gemm.SPLIT_COLUMNS)))))
            continue
        threads, shared = gemm.launch_of(name)
        bench.allow_shared(f"{name}_bf16", shared)
        found.append((name, (tiles[0] * tiles[1], threads, shared)))
    return found


def quantised_product(bench: Bench, case: QuantisedProduct) -> list[list[Launch]]:
    """The launches of a product with each copy of its quantised weights, by the fastest kernel."""
    return min(quantised_candidates(bench, case), key=lambda launches: min(bench.times(launches)))


def quantised_candidates(bench: Bench, case: QuantisedProduct) -> list[list[list[Launch]]]:
    """The same for each kernel that the engine chooses from."""
    format_, dtype = FORMATS[case.weights]
    bench.reset_output(4 * case.rows * case.outputs)
    shift = format_.group.bit_length() - 1 if format_.group else 31
    operands = {
        "x": bench.random(case.rows * case.row_bytes),
        "out": bench.output_buffer,
        "rows": case.rows,
        "pitch": case.outputs,
        "x_group_shift": shift,
    }
    size = -(-case.outputs // 16) * tile_bytes(format_, case.inner)
    matrices = [
        quantised.MatrixArgument(
            bench.random(size), case.outputs, case.inner, shift, format_.scales == "bf16", 0
        )
        for _ in range(case.copies)
    ]
    is_small = case.rows <= MOST_GEMV_ROWS
    names = [name for name in quantised.kernels_of(format_, dtype) if is_small == name.startswith("gemv")]
    names = [name for name in names if bench.has_warpgroups or "warpgroup" not in name]
    names = [
        name for name in names if name not in quantised.OF_FEW_ROWS or case.rows <= quantised.TILES[name][1]
    ]
    candidates = []
    for name in names:
        shape = quantised.launch_of(name, format_, dtype, case.rows, case.outputs, case.inner)
        kernel = f"{name}_{format_.kernels(dtype)}"
        bench.allow_shared(kernel, shape[2])
        candidates.append([[(kernel, shape, quantised.Product(w=matrix, **operands))] for matrix in matrices])
    return candidates


class AttentionOperands:
    """The operands of attention, with copies of the cache."""

    def __init__(self, bench: Bench, case: Attention) -> None:
        self.bench, self.case = bench, case
        self.group = case.heads // case.kv_heads
        self.rows, self.splits = case.sequences * case.queries, -(-case.context // attention.SPLIT)
        self.blocks = -(-case.context // BLOCK_SIZE)
        tables = np.random.default_rng(1).permutation(case.sequences * self.blocks).astype(np.uint32)
        self.places = self.splits * case.kv_heads * self.group
        layout = KvLayout(KV_NAMES[case.kv], case.kv_heads, case.head_dim, BLOCK_SIZE)
        self.qkv = bench.random(4 * self.rows * (case.heads + 2 * case.kv_heads) * case.head_dim)
        bench.reset_output(2 * self.rows * case.heads * case.head_dim)
        self.partials = bench.random(4 * case.sequences * self.places * (case.head_dim + 2))
        self.table = bench.array(tables)
        self.copies = [
            bench.random(case.sequences * self.blocks * layout.block_bytes) for _ in range(case.copies)
        ]
        self._work_items: dict[tuple[str, int, bool], tuple[Pointer, int]] = {}

    @property
    def kernels(self) -> list[str]:
        """The kernels that the engine chooses from."""
        if not self.case.is_prefill:
            return ["decode", "decode_wide"]
        exists = attention.has_warpgroup_prefill(KV_NAMES[self.case.kv], self.case.head_dim)
        return ["prefill", *["prefill_warpgroup"] * (exists and self.bench.has_warpgroups)]

    def launches(self, kernel: str, pages: Pointer, *, of_last: bool = False) -> list[Launch]:
        """The launches by a kernel, or those of the last query of each sequence by a kernel of decode."""
        case, is_decode = self.case, not kernel.startswith("prefill")
        work_items = {kernel: self._work_items_of(kernel, self.splits if is_decode else 1, of_last=of_last)}
        if is_decode and self.splits > 1:
            work_items["combine"] = self._work_items_of(kernel, 1, of_last=of_last)
        found: list[Launch] = []
        for name, (entries, count) in work_items.items():
            pointers = (self.qkv, self.table, entries, self.partials, self.bench.output_buffer)
            call = attention.Attention(
                cache=KvCache(pages, case.kv_heads, BLOCK_SIZE, case.head_dim),
                heads=case.heads,
                scale=case.head_dim**-0.5,
                out_type=attention.FLOAT_TYPES.index("bf16"),
                **{f"pointer_{index}": pointer for index, pointer in enumerate(pointers)},
            )
            depth = 4 if name == "combine" and count * case.kv_heads < ENOUGH_BLOCKS else 1
            shared = attention.shared_bytes(name, "bf16", KV_NAMES[case.kv], case.head_dim)
            function = f"attention_{name}_bf16_{KV_NAMES[case.kv]}_{case.head_dim}"
            self.bench.allow_shared(function, shared)
            found.append((function, ((count, case.kv_heads, depth), attention.THREADS[name], shared), call))
        return found

    def _work_items_of(self, kernel: str, splits: int, *, of_last: bool) -> tuple[Pointer, int]:
        """The work items of all sequences, one for each of `splits`: `WorkItem` of the kernels."""
        key = kernel, splits, of_last
        if key not in self._work_items:
            case = self.case
            queries = 1 if of_last else case.queries
            packed, most = queries * self.group, attention.ROWS[kernel]
            entries = np.array(
                [
                    (
                        (i + 1) * case.queries - queries,
                        case.context - queries,
                        i * self.blocks,
                        first,
                        min(most, packed - first),
                        split,
                        i * self.places,
                        0,
                    )
                    for i in range(case.sequences)
                    for first in range(0, packed, most)
                    for split in range(splits)
                ],
                np.uint32,
            )
            self._work_items[key] = self.bench.array(entries), len(entries)
        return self._work_items[key]


def attend(bench: Bench, case: Attention) -> list[list[Launch]]:
    """The launches of attention with each copy of the cache, by the kernel that is the fastest."""
    operands = AttentionOperands(bench, case)
    candidates = [
        [operands.launches(kernel, pages) for pages in operands.copies] for kernel in operands.kernels
    ]
    return min(candidates, key=lambda launches: min(bench.times(launches)))


def launches_of(bench: Bench, case: Product | Attention) -> list[list[Launch]]:
    """The launches of a case with each copy of its operands."""
    if isinstance(case, QuantisedProduct):
        return quantised_product(bench, case)
    return product(bench, case) if isinstance(case, Product) else attend(bench, case)


def measure(cases: list[Any], rows: Rows) -> None:
    """Append a row for each case. Those that fail are printed, and end the process with an error."""
    bench, failed = Bench(), 0
    for case in cases:
        try:
            times = bench.times(launches_of(bench, case))
            is_written = bench.is_output_written()
        except (DriverError, KeyError, RuntimeError) as error:
            print(f"  {case.name}: {type(error).__name__}: {error}")
            failed += 1
            bench.owned.clear()
            bench.reset()
            continue
        bench.release()
        if is_written:
            rows.add(Row(case.name, times, bytes=case.bytes, flops=case.flops))
        else:
            print(f"  {case.name}: the kernel writes no result")
            failed += 1
    if failed:
        sys.exit(f"{failed} kernels have failed")
