"""Run A of the measuring plan: bits of tensor cores, memory, latencies, boundaries between kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import test_kernels_cuda_gemm as gemm
from plan_bench import REPLAYS, PlanBench
from plan_rows import IS_EMULATED

if TYPE_CHECKING:
    from plan_rows import Figures

    from emu.client import Pointer

#: Rows of the second operand of wgmma.
COLUMNS = (8, 24, 32, 64, 96, 128, 192, 256)
#: The kernels of today's products that are compared with one chain.
TODAYS = ("gemv", "gemm_narrow", "gemm_warpgroup_narrow", "gemm_warpgroup_widest")
#: Triggers of `probes/ring.cuh`: the text, and whether the launch is dependent.
TRIGGERS = {
    "no dependent launch": (0, False),
    "launched after the wait": (1, True),
    "launched at the start": (2, True),
}
#: The rings: the slots, and the threads of a block.
RINGS = {"cp.async": ("ring_async", 4, 256), "bulk copies": ("ring_bulk", 8, 32)}
MULTICAST = "multicast to 2"
NO_BULK = "the emulated device has no bulk copies"


class Chain(ctypes.Structure):
    """`Chain` of `probes/chains.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "out")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "inner", "row_pitch", "column_pitch")),
    )


class Ring(ctypes.Structure):
    """`Ring` of `probes/ring.cuh`."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("chunks", ctypes.c_uint64),
        ("total", ctypes.c_uint64),
        ("chunk_bytes", ctypes.c_int),
        ("trigger", ctypes.c_int),
    )


class Latency(ctypes.Structure):
    """`Latency` of `probes/latency.cu`."""

    _fields_ = (("clocks", ctypes.c_void_p), ("out", ctypes.c_void_p), ("steps", ctypes.c_int))


@dataclass(frozen=True)
class Matrices:
    """Rows x and weights w of one product."""

    x: Pointer
    w: Pointer
    rows: int
    outputs: int
    inner: int


def chain(bench: PlanBench, m: Matrices, kernel: str, out: Pointer, *, rows_first: bool = False) -> None:
    """Compute out[row][output] as one chain. `kernel` is mma, or the columns of wgmma."""
    a, b = (m.x, m.w) if rows_first else (m.w, m.x)
    sizes = (m.rows, m.outputs) if rows_first else (m.outputs, m.rows)
    pitches = (m.outputs, 1) if rows_first else (1, m.outputs)
    height, width, threads, shared = 16, 8, 32, 0
    if kernel != "mma":
        height, width, threads = 64, int(kernel), 128
        shared = 1024 + 128 * (height + width)
    grid = (-(-sizes[1] // width), -(-sizes[0] // height))
    name = "chain_mma" if kernel == "mma" else f"chain_wgmma_{kernel}"
    bench.poison(out, 4 * m.rows * m.outputs)
    bench.run(name, (grid, threads, shared), Chain(a, b, out, *sizes, m.inner, *pitches))


def matrices(bench: PlanBench, rows: int, outputs: int, inner: int, spread: int = 12) -> Matrices:
    """Random operands; sums of exponents that are far apart depend on every rounding."""
    x = bench.spread_numbers(rows * inner, 1, spread)
    w = bench.spread_numbers(outputs * inner, 2, spread)
    return Matrices(x, w, rows, outputs, inner)


def bits(figures: Figures, *, tiny: bool) -> None:
    """Compare the bits of wgmma and mma, of exchanged operands, and of today's products."""
    bench = PlanBench()
    sizes = [(24, 72, 128)] if tiny else [(256, 384, 4096), (256, 384, 14336)]
    for rows, outputs, inner in sizes:
        m = matrices(bench, rows, outputs, inner)
        size = 4 * rows * outputs
        expected, out = bench.poisoned(size), bench.poisoned(size)
        chain(bench, m, "mma", expected)
        note = f"of {rows * outputs} sums of {inner} columns"

        def compare(
            name: str, out: Pointer = out, expected: Pointer = expected, size: int = size, note: str = note
        ) -> None:
            figures.figure(name, [bench.differences(out, expected, size)], "words", note)

        for columns in COLUMNS:
            chain(bench, m, str(columns), out)
            compare(f"wgmma of {columns} columns = mma, {inner}")
        for kernel in ("mma", *map(str, COLUMNS)):
            chain(bench, m, kernel, out, rows_first=True)
            name = "mma" if kernel == "mma" else f"wgmma of {kernel} columns"
            compare(f"operands exchanged, {name}, {inner}")
        bench.release()
    todays(bench, figures, tiny=tiny)


def todays(bench: PlanBench, figures: Figures, *, tiny: bool) -> None:
    """Compare today's products of one split with one chain."""
    rows, outputs, inner = (8, 72, 128) if tiny else (8, 4096, gemm.SPLIT_COLUMNS)
    m = matrices(bench, rows, outputs, inner)
    size = 4 * rows * outputs
    expected, out = bench.poisoned(size), bench.poisoned(size)
    chain(bench, m, "mma", expected)
    for name in TODAYS:
        if "warpgroup" in name and not bench.has_warpgroups:
            continue
        tile_outputs, tile_rows = gemm.TILES[name]
        tiles = (-(-outputs // tile_outputs), -(-rows // tile_rows))
        threads, shared = gemm.launch_of(name)
        shape = (tiles, 32, 0) if name == "gemv" else (tiles[0] * tiles[1], threads, shared)
        bench.allow_shared(f"{name}_bf16", shape[2])
        bench.poison(out, size)
        call = gemm.Product(
            x=m.x, w=m.w, out=out, rows=rows, outputs=outputs, inner=inner, pitch=outputs, accumulates=0
        )
        bench.run(f"{name}_bf16", shape, call)
        difference = bench.differences(out, expected, size)
        figures.figure(f"today's {name} = one chain", [difference], "words", f"of {rows * outputs}")
    bench.release()


# ---- memory


@dataclass
class Reader:
    """Reads memory through rings."""

    bench: PlanBench
    source: Pointer
    size: int
    out: Pointer

    def launch(
        self, kind: str, blocks: int, ring: int, read: int, *, size: int = 0, start: int = 0, trigger: int = 0
    ) -> tuple[str, tuple[int, int, int], Ring]:
        """A launch that reads `read` bytes of `size` bytes, from `start` on, by rings of `ring` bytes."""
        kernel, slots, threads = RINGS.get(kind, ("ring_multicast", 8, 32))
        chunk = ring // slots
        self.bench.allow_shared(kernel, ring)
        call = Ring(
            self.source + start, self.out, (size or self.size) // chunk, read // chunk, chunk, trigger
        )
        return kernel, (blocks, threads, ring), call

    def rate(self, kind: str, blocks: int, ring: int, read: int, size: int = 0) -> list[float]:
        """TB/s that multiprocessors receive."""
        launch = self.launch(kind, blocks, ring, read, size=size)
        received = launch[2].total * launch[2].chunk_bytes * (2 if kind == MULTICAST else 1)
        self.bench.poison(self.out, 4 * blocks)
        samples = [received / seconds / 1e12 for seconds in self.bench.times([[launch]], REPLAYS)]
        self.check(launch[2], blocks, 2 if kind == MULTICAST else 1)
        return samples

    def check(self, call: Ring, blocks: int, sharing: int) -> None:
        """Compare the words that the first and the last block have read with those of the source."""
        for block in (0, blocks - 1):
            first, step = block // sharing, blocks // sharing
            last = first + (call.total - 1 - first) // step * step
            address = call.source + last % call.chunks * call.chunk_bytes
            read, expected = (
                self.bench.word(type(self.source)(place)) for place in (self.out + 4 * block, address)
            )
            if read != expected:
                raise RuntimeError(f"block {block} has read {read:#x} instead of {expected:#x}")

    def boundary(self, kind: str, trigger: int, blocks: int, ring: int, unit: int, count: int) -> list[float]:
        """Microseconds of a launch that are not proportional to its bytes.

        Launches that read `unit` bytes are compared with those that read four times as many.
        """
        _, dependent = next(value for value in TRIGGERS.values() if value[0] == trigger)
        times = []
        for read in (unit, 4 * unit):
            launches = [
                [
                    self.launch(
                        kind, blocks, ring, read, size=read, start=i * read % self.size, trigger=trigger
                    )
                ]
                for i in range(count)
            ]
            times.append(self.bench.times(launches, REPLAYS, dependent=dependent))
        return [1e6 * (small - (large - small) / 3) for small, large in zip(*times, strict=True)]


def memory(figures: Figures, *, tiny: bool) -> None:
    """Measure rates of reads, latencies of products, and the costs of boundaries."""
    bench = PlanBench()
    size, cached, steps = (1 << 20, 1 << 18, 8) if tiny else (2 << 30, 16 << 20, 1 << 16)
    source = bench.spread_numbers(size // 2, 3)
    reader = Reader(bench, source, size, bench.alloc(4096))
    sms = bench.multiprocessors
    kinds = [kind for kind in RINGS if kind == "cp.async" or not IS_EMULATED]
    if IS_EMULATED:
        figures.skipped("bulk copies", NO_BULK)
    rings = [16] if tiny else [32, 64, 96, 128, 192]

    def read(kind: str, blocks: int, ring: int) -> None:
        text = "all multiprocessors" if blocks == sms else f"{blocks} blocks"
        figures.figure(
            f"read, {kind}, {text}, {ring} KiB", reader.rate(kind, blocks, ring << 10, size // 2), "TB/s"
        )

    # The figures that decide come first; the table of blocks and bytes is the last.
    for kind in kinds:
        read(kind, sms, rings[-1])
    latencies(bench, figures, steps)
    boundaries(reader, figures, kinds, sms, tiny=tiny)
    for kind in kinds:
        samples = reader.rate(kind, sms, rings[-1 if tiny else 3] << 10, size // 2, cached)
        figures.figure(f"second-level cache, {kind}, {cached >> 20} MiB", samples, "TB/s")
    for kind in kinds:
        for blocks in (sms, *(count for count in (128, 96, 64, 32) if count < sms)):
            for ring in rings:
                if (blocks, ring) != (sms, rings[-1]):
                    read(kind, blocks, ring)
    if not IS_EMULATED:
        samples = reader.rate(MULTICAST, sms // 2 * 2, 128 << 10, size // 4, cached)
        figures.figure(f"second-level cache, {MULTICAST}, {cached >> 20} MiB", samples, "TB/s")


def boundaries(reader: Reader, figures: Figures, kinds: list[str], blocks: int, *, tiny: bool) -> None:
    """Measure the cost of a boundary between kernels, for each trigger."""
    ring, unit, count = (16 << 10, 1 << 17, 2) if tiny else (96 << 10, 32 << 20, 16)
    for kind in reversed(kinds):
        for text, (trigger, _) in TRIGGERS.items():
            name = f"boundary, {kind}, {text}"
            if IS_EMULATED and trigger == max(trigger for trigger, _ in TRIGGERS.values()):
                figures.skipped(name, "the emulated device has no kernels that begin before the wait")
                continue
            figures.figure(name, reader.boundary(kind, trigger, blocks, ring, unit, count), "us")


def latencies(bench: PlanBench, figures: Figures, steps: int) -> None:
    """Measure the clocks of products that depend on each other."""
    clocks, out = bench.alloc(8), bench.alloc(4 * 128)
    for name, text, threads, columns in (
        ("latency_wgmma_8", "wgmma of 8 columns", 128, 8),
        ("latency_mma", "mma", 32, 0),
        ("latency_wgmma_64", "wgmma of 64 columns", 128, 64),
        ("latency_wgmma_256", "wgmma of 256 columns", 128, 256),
    ):
        shared = 1024 + 128 * (64 + columns) if columns else 0
        samples = []
        for _ in range(REPLAYS):
            bench.run(name, (1, threads, shared), Latency(clocks, out, steps))
            value = ctypes.c_uint64()
            bench.call("cuMemcpyDtoH_v2", ctypes.byref(value), clocks, 8)
            samples.append(value.value / steps)
        if IS_EMULATED:
            figures.skipped(f"dependent {text}", "the emulated device has no clock")
        else:
            figures.figure(f"dependent {text}", samples[1:], "clocks")


#: The kernels that are compiled beforehand.
KERNELS = (
    *("chain_mma", *(f"chain_wgmma_{columns}" for columns in COLUMNS), "fill_random", "compare_words"),
    *("ring_async", "ring_bulk", "ring_multicast"),
    *("latency_mma", *(f"latency_wgmma_{columns}" for columns in (8, 64, 256))),
    *(f"{name}_bf16" for name in TODAYS),
)
