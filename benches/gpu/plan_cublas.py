"""Run A of the measuring plan: whether cuBLASLt without split-K computes one chain, and what that costs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cases import Product
from plan_bench import REPLAYS, PlanBench
from plan_facts import Matrices, chain, matrices

import kernels
import penstock

if TYPE_CHECKING:
    from plan_rows import Figures
    from shapes import Shape

    from emu.client import Pointer

#: CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, and the value of CUBLASLT_MATMUL_DESC_TRANSA.
COMPUTE_FLOAT32, FLOAT32, BFLOAT16, TRANSPOSED = 68, 0, 14, 1
#: Attributes of preferences: the most workspace, the ways to add parts, alignments of the four matrices.
MOST_WORKSPACE, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)
NOT_SUPPORTED = 15
#: Ways to add the parts of a product that is divided: none, and all but the one in place.
UNDIVIDED, ANY = 0, 6
WORKSPACE, ALIGNMENT = 32 << 20, 16
#: The most algorithms of a product, and of those, the ones that are measured.
MOST_ALGORITHMS, MEASURED = 32, 4
#: Attributes of an algorithm: the name, the number, and the bytes of the value.
ATTRIBUTES = {"id": (0, 4), "tile": (1, 4), "splits": (2, 4), "reduction": (3, 4), "stages": (6, 4)} | {
    "instruction": (7, 2),
    "cluster": (8, 2),
}


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for a product."""

    data: Any
    workspace: int

    def describe(self, library: ctypes.CDLL) -> dict[str, int]:
        """Its attributes, if the library tells them."""
        found = {"workspace": self.workspace}
        if hasattr(library, "cublasLtMatmulAlgoConfigGetAttribute"):
            for name, (attribute, size) in ATTRIBUTES.items():
                value, written = ctypes.c_uint32(), ctypes.c_size_t()
                status = library.cublasLtMatmulAlgoConfigGetAttribute(
                    self.data, attribute, ctypes.byref(value), ctypes.c_size_t(size), ctypes.byref(written)
                )
                if status == 0:
                    found[name] = value.value
        return found


class Cublas:
    """The library in the current context."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.handle = ctypes.c_void_p()
        self.check("cublasLtCreate", ctypes.byref(self.handle))

    def status(self, name: str, *arguments: Any) -> int:
        """Call a function; its status."""
        return int(getattr(self.library, name)(*arguments))

    def check(self, name: str, *arguments: Any) -> None:
        """Call a function that must succeed."""
        if status := self.status(name, *arguments):
            raise RuntimeError(f"{name} returned {status}")


class CublasProduct:
    """A product `out = x w'` of bf16 numbers and results of float32, as the engine has it."""

    def __init__(self, cublas: Cublas, m: Matrices) -> None:
        self.cublas, self.matrices = cublas, m
        self.description = ctypes.c_void_p()
        cublas.check("cublasLtMatmulDescCreate", ctypes.byref(self.description), COMPUTE_FLOAT32, FLOAT32)
        self._set("cublasLtMatmulDescSetAttribute", self.description, 3, ctypes.c_int(TRANSPOSED))
        # The library's matrices are stored by columns: its product is out' = w x'.
        self.layouts = [
            self._layout(BFLOAT16, m.inner, m.outputs),
            self._layout(BFLOAT16, m.inner, m.rows),
            self._layout(FLOAT32, m.outputs, m.rows),
        ]

    def _set(self, function: str, to: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self.cublas.check(function, to, attribute, ctypes.byref(value), size)

    def _layout(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        self.cublas.check("cublasLtMatrixLayoutCreate", ctypes.byref(layout), kind, *sizes)
        return layout

    def algorithms(self, reductions: int) -> list[Algorithm]:
        """The algorithms, the fastest by the library's estimate first."""
        preference = ctypes.c_void_p()
        self.cublas.check("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        function = "cublasLtMatmulPreferenceSetAttribute"
        self._set(function, preference, MOST_WORKSPACE, ctypes.c_size_t(WORKSPACE))
        self._set(function, preference, REDUCTIONS, ctypes.c_uint32(reductions))
        for attribute in ALIGNMENTS:
            self._set(function, preference, attribute, ctypes.c_uint32(ALIGNMENT))
        found, count = (Heuristic * MOST_ALGORITHMS)(), ctypes.c_int()
        w, x, out = self.layouts
        status = self.cublas.status(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self.cublas.handle, self.description, w, x, out, out, preference, MOST_ALGORITHMS),
            *(ctypes.byref(found), ctypes.byref(count)),
        )
        self.cublas.check("cublasLtMatmulPreferenceDestroy", preference)
        if status not in (0, NOT_SUPPORTED):
            raise RuntimeError(f"cublasLtMatmulAlgoGetHeuristic returned {status}")
        results = [found[i] for i in range(count.value if status == 0 else 0)]
        return [Algorithm(result.algorithm, result.workspace) for result in results if result.state == 0]

    def launch(
        self, stream: int, algorithm: Algorithm, out: Pointer, workspace: Pointer, w: Pointer | None = None
    ) -> None:
        """Launch the product, maybe with other weights."""
        alpha, beta = ctypes.c_float(1), ctypes.c_float(0)
        m, (w_layout, x_layout, out_layout) = self.matrices, self.layouts
        addresses = [ctypes.c_uint64(place) for place in (w or m.w, m.x, out, workspace)]
        self.cublas.check(
            "cublasLtMatmul",
            *(self.cublas.handle, self.description, ctypes.byref(alpha), addresses[0], w_layout),
            *(addresses[1], x_layout, ctypes.byref(beta), addresses[2], out_layout, addresses[2], out_layout),
            *(algorithm.data, addresses[3], ctypes.c_size_t(WORKSPACE), ctypes.c_void_p(stream)),
        )

    def close(self) -> None:
        """Free the descriptions."""
        for layout in self.layouts:
            self.cublas.check("cublasLtMatrixLayoutDestroy", layout)
        self.cublas.check("cublasLtMatmulDescDestroy", self.description)


def cublas(figures: Figures, shape: Shape, *, tiny: bool) -> None:
    """Compare all algorithms of all shapes with one chain, and measure those that equal it."""
    info = penstock.cuda_info()
    if not info.cublas_path:
        figures.skipped("algorithms that differ from one chain", f"cuBLASLt: {info.cublas_reason}")
        return
    bench = PlanBench()
    library = Cublas(str(info.cublas_path))
    # The products of a layer before the head, which is large.
    for rows in (9, 16) if tiny else (256, 64, 16, 1024):
        for name, outputs, inner in shape.products:
            case = Product(f"{name}, {rows} rows", rows, outputs, inner, turn=0 if tiny else 256 << 20)
            try:
                compare(bench, library, figures, case, measures=rows in (9, 64, 256))
            except RuntimeError as error:
                figures.skipped(case.name, f"{error}")
            bench.release()


def compare(bench: PlanBench, library: Cublas, figures: Figures, case: Product, *, measures: bool) -> None:
    """Compare the algorithms of a product with one chain, and measure some."""
    m = matrices(bench, case.rows, case.outputs, case.inner)
    size = 4 * case.rows * case.outputs
    expected, out, workspace = bench.poisoned(size), bench.poisoned(size), bench.alloc(WORKSPACE)
    chain(bench, m, "128" if case.rows > 64 else "64", expected)  # noqa: PLR2004
    product = CublasProduct(library, m)
    undivided = product.algorithms(UNDIVIDED)
    stream, equal, found = bench.stream(), [], []
    for algorithm in undivided:
        bench.poison(out, size)
        product.launch(stream, algorithm, out, workspace)
        bench.wait(stream)
        differences = bench.differences(out, expected, size)
        found.append(algorithm.describe(library.library) | {"differences": differences})
        if not differences:
            equal.append(algorithm)
    note = f"of {len(undivided)} algorithms, {case.rows * case.outputs} sums each"
    differing = len(undivided) - len(equal)
    figures.figure(
        f"{case.name}, algorithms that differ from one chain",
        [differing] if undivided else [],
        "",
        note if undivided else "skipped: the library has no algorithm without split-K",
        found,
    )
    if measures:
        text = "cost of one chain" if equal else "cost without split-K"
        measure(bench, figures, case, product, (text, equal or undivided), (out, workspace))
    product.close()


def measure(
    bench: PlanBench,
    figures: Figures,
    case: Product,
    product: CublasProduct,
    chosen: tuple[str, list[Algorithm]],
    buffers: tuple[Pointer, Pointer],
) -> None:
    """Measure the fastest of the chosen algorithms and of all, and today's kernel."""
    cost, undivided = chosen
    weights = [bench.spread_numbers(case.outputs * case.inner, seed, 2) for seed in range(3, 3 + case.copies)]

    def fastest(algorithms: list[Algorithm]) -> list[float]:
        def launch(stream: int, algorithm: Algorithm, w: Pointer) -> None:
            product.launch(stream, algorithm, *buffers, w)

        times = []
        for algorithm in algorithms[:MEASURED]:
            calls = [lambda stream, algorithm=algorithm, w=w: launch(stream, algorithm, w) for w in weights]
            times.append(bench.timed(calls, REPLAYS))
        return min(times, key=min, default=[])

    alone, divided = fastest(undivided), fastest(product.algorithms(ANY))
    ours = bench.times(kernels.product(bench, case), REPLAYS)
    for text, seconds in (
        ("cuBLASLt", divided),
        ("cuBLASLt without split-K", alone),
        ("today's kernel", ours),
    ):
        figures.figure(f"{case.name}, {text}", [1e6 * second for second in seconds], "us")
    if alone and divided:
        best = min(divided)
        figures.figure(f"{case.name}, {cost}", [second / best for second in alone], "x")
