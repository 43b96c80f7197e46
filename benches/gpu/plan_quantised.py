"""Run B2 of the measuring plan: products of 4-bit weights by every kernel for their number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import test_kernels_cuda_gemm_quantised as quantised
from cases import QuantisedProduct
from plan_bench import REPLAYS, PlanBench

from kernels import FORMATS, quantised_candidates

if TYPE_CHECKING:
    from plan_rows import Figures
    from shapes import Shape

#: Weights with bf16 rows, as the engine of run C has them, and with rows of integers.
WEIGHTS = ("w4a16", "int4")


def products(figures: Figures, shape: Shape, *, tiny: bool) -> None:
    """Measure the products that are wide and narrow."""
    bench = PlanBench()
    sizes = {name: size for name, *size in shape.products}
    for weights in WEIGHTS:
        for rows in (1, 9) if tiny else (1, 8, 64, 256):
            for name in ("gate_up", "down"):
                turn = 0 if tiny else 256 << 20
                case = QuantisedProduct(f"{weights} {name}, {rows} rows", rows, *sizes[name], turn, weights)
                for launches in quantised_candidates(bench, case):
                    kernel = launches[0][0][0].partition("_code")[0]
                    samples = [1e6 * second for second in bench.times(launches, REPLAYS)]
                    note = f"{case.weight_bytes / min(samples) / 1e6:.2f} TB/s"
                    figures.figure(f"{case.name}, {kernel}", samples, "us", note)
                if not bench.is_output_written():
                    figures.skipped(case.name, "the kernels write no result")
                bench.release()


#: The kernels that are compiled beforehand.
KERNELS = tuple(
    f"{kernel}_{format_.kernels(dtype)}"
    for format_, dtype in (FORMATS[weights] for weights in WEIGHTS)
    for kernel in quantised.kernels_of(format_, dtype)
)
