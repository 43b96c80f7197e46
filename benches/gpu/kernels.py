"""Times of single kernels, launched through the driver from a captured graph."""

from __future__ import annotations

import ctypes
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests"))

import test_kernels_cuda_attention as attention
import test_kernels_cuda_codes as codes
import test_kernels_cuda_gemm as gemm
from cases import Attention, Product, QuantisedProduct
from rows import Row, Rows

from emu.client import DriverError, Pointer
from support.kernels.codes_layout import Format, tile_bytes
from support.kernels.gpu import Gpu
from support.kernels.kv_pages import KvLayout

REPEATS = 7
#: Rows up to which a product is by `gemv`, and by `gemm_narrow`, as in the engine without a division.
MOST_GEMV_ROWS, MOST_NARROW_ROWS = 8, 64
#: The formats of quantised weights, as they are loaded, and the type of the activations.
FORMATS = {
    "int4": (Format("code4", 32, "bf16", "stored"), "int8"),
    "int8": (Format("code8", 128, "bf16"), "int8"),
    "fp8": (Format("e4m3", 0, "f32"), "fp8"),
}
#: Blocks of a launch of combine; with fewer, 4 share a work.
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

    def times(self, operations: list[list[Launch]]) -> list[float]:
        """The time of an operation, which is some launches, from replays of a graph of all operations."""
        stream = self.stream()
        for name, _, _ in operations[0]:
            self.function(name)
        self.begin_capture(stream)
        for name, shape, argument in itertools.chain.from_iterable(operations):
            self.launch(stream, name, shape, argument)
        graph = self.end_capture(stream)
        start, end = (
            self.own("cuEventDestroy_v2", self.output(ctypes.c_void_p, "cuEventCreate", 0)) for _ in "ab"
        )
        found = []
        for _ in range(REPEATS):
            self.call("cuEventRecord", start, stream)
            self.call("cuGraphLaunch", graph, stream)
            self.call("cuEventRecord", end, stream)
            self.wait(stream)
            milliseconds = self.output(ctypes.c_float, "cuEventElapsedTime", start, end)
            found.append(milliseconds / 1e3 / len(operations))
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
    """The kernels that the engine chooses from, with their launches. Sums are not divided."""
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
            found.append((name, (tiles, 32 * min(8, -(-case.inner // gemm.SEGMENT)))))
            continue
        threads, shared = gemm.launch_of(name)
        bench.allow_shared(f"{name}_bf16", shared)
        found.append((name, (tiles[0] * tiles[1], threads, shared)))
    return found


def quantised_product(bench: Bench, case: QuantisedProduct) -> list[list[Launch]]:
    """The launches of a product of 8-bit activations with each copy of its weights, by the fastest kernel."""
    format_, dtype = FORMATS[case.weights]
    bench.reset_output(4 * case.rows * case.outputs)
    row_bytes = -(-case.inner // 64) * 80
    shift = format_.group.bit_length() - 1 if format_.group else 31
    operands = {
        "x": bench.random(case.rows * row_bytes),
        "out": bench.output_buffer,
        "rows": case.rows,
        "pitch": case.outputs,
        "span_shift": shift,
    }
    size = -(-case.outputs // 16) * tile_bytes(format_, case.inner)
    matrices = [
        codes.Codes(bench.random(size), case.outputs, case.inner, shift, format_.scales == "bf16", 0)
        for _ in range(case.copies)
    ]
    is_small = case.rows <= MOST_GEMV_ROWS
    names = [name for name in codes.kernels_of(format_, dtype) if is_small == name.startswith("gemv")]
    names = [name for name in names if bench.has_warpgroups or "warpgroup" not in name]
    names = [name for name in names if name not in codes.OF_FEW_ROWS or case.rows <= codes.TILES[name][1]]
    candidates = []
    for name in names:
        shape = codes.launch_of(name, format_, dtype, case.rows, case.outputs, case.inner)
        kernel = f"{name}_{format_.kernels(dtype)}"
        bench.allow_shared(kernel, shape[2])
        candidates.append([[(kernel, shape, codes.Product(w=matrix, **operands))] for matrix in matrices])
    return min(candidates, key=lambda launches: min(bench.times(launches)))


def attend(bench: Bench, case: Attention) -> list[list[Launch]]:
    """The launches of attention with each copy of the cache, by the kernel that is the fastest."""
    group, queries = case.heads // case.kv_heads, case.context if case.is_prefill else 1
    rows, splits = case.sequences * queries, -(-case.context // attention.SPLIT)
    blocks = -(-case.context // BLOCK_SIZE)
    tables = np.random.default_rng(1).permutation(case.sequences * blocks).astype(np.uint32)
    places = splits * case.kv_heads * group
    kernels = ["decode", "decode_wide"]
    if case.is_prefill:
        exists = attention.has_warpgroup_prefill(KV_NAMES[case.kv], case.head_dim)
        kernels = ["prefill", *["prefill_warpgroup"] * (exists and bench.has_warpgroups)]
    layout = KvLayout(KV_NAMES[case.kv], case.kv_heads, case.head_dim, BLOCK_SIZE)
    qkv = bench.random(4 * rows * (case.heads + 2 * case.kv_heads) * case.head_dim)
    bench.reset_output(2 * rows * case.heads * case.head_dim)
    partials = bench.random(0 if case.is_prefill else 4 * case.sequences * places * (case.head_dim + 2))
    table = bench.array(tables)
    copies = [bench.random(case.sequences * blocks * layout.block_bytes) for _ in range(case.copies)]
    candidates = []
    for kernel in kernels:
        works = {kernel: works_of(case, kernel, 1 if case.is_prefill else splits)}
        if not case.is_prefill and splits > 1:
            works["combine"] = works_of(case, kernel, 1)
        lists = {name: bench.array(entries) for name, entries in works.items()}
        operations = []
        for pages in copies:
            cache = attention.cuda_kv.KvCache(pages, case.kv_heads, BLOCK_SIZE, case.head_dim)
            launches: list[Launch] = []
            for name, entries in works.items():
                pointers = enumerate((qkv, table, lists[name], partials, bench.output_buffer))
                call = attention.Attention(
                    cache=cache,
                    heads=case.heads,
                    scale=case.head_dim**-0.5,
                    out_type=attention.FLOAT_TYPES.index("bf16"),
                    **{f"pointer_{index}": pointer for index, pointer in pointers},
                )
                depth = 4 if name == "combine" and len(entries) * case.kv_heads < ENOUGH_BLOCKS else 1
                shared = attention.shared_bytes(name, "bf16", KV_NAMES[case.kv], case.head_dim)
                shape = ((len(entries), case.kv_heads, depth), attention.THREADS[name], shared)
                function = f"attention_{name}_bf16_{KV_NAMES[case.kv]}_{case.head_dim}"
                bench.allow_shared(function, shared)
                launches.append((function, shape, call))
            operations.append(launches)
        candidates.append(operations)
    return min(candidates, key=lambda launches: min(bench.times(launches)))


def works_of(case: Attention, kernel: str, splits: int) -> np.ndarray[Any, Any]:
    """The works of all sequences, with one for each of `splits`: the structure `Work` of the kernels."""
    group, queries = case.heads // case.kv_heads, case.context if case.is_prefill else 1
    blocks, places = (
        -(-case.context // BLOCK_SIZE),
        -(-case.context // attention.SPLIT) * case.kv_heads * group,
    )
    packed, most = queries * group, attention.ROWS[kernel]
    return np.array(
        [
            (
                i * queries,
                case.context - queries,
                i * blocks,
                first,
                min(most, packed - first),
                split,
                i * places,
                0,
            )
            for i in range(case.sequences)
            for first in range(0, packed, most)
            for split in range(splits)
        ],
        np.uint32,
    )


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
