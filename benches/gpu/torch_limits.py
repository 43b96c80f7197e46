"""The limits of the device, and the same operations by torch."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from cases import Attention, Product, QuantisedProduct
from rows import Row, Rows

try:
    import torch
except ImportError:
    torch = None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

REPEATS = 7
#: Bytes of the copy and of the sum, and rows and columns of the product, that give the limits.
COPIED, WIDTH = 1 << 32, 8192


def timed(calls: list[Callable[[], object]]) -> list[float]:
    """The time of a call, from replays of a graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return times[1:]


def random(*shape: int) -> Any:
    """Numbers of a normal distribution."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def limits() -> dict[str, float]:
    """Bytes per second of a copy, read and written, or of a sum, and operations per second of a product."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda").random_(0, 255)
    copy = timed([partial(torch.empty_like(source).copy_, source)] * 4)
    read = timed([source.view(torch.int64).sum] * 4)
    product = timed([partial(torch.matmul, random(WIDTH, WIDTH), random(WIDTH, WIDTH))] * 4)
    bandwidth = max(2 * COPIED / min(copy), COPIED / min(read))
    return {"bandwidth": bandwidth, "flops": 2 * WIDTH**3 / min(product)}


def calls_of(case: Product | Attention) -> list[Callable[[], object]]:
    """The operation with each copy of its operands."""
    if isinstance(case, Product):
        x = random(case.rows, case.inner)
        return [
            partial(torch.nn.functional.linear, x, random(case.outputs, case.inner))
            for _ in range(case.copies)
        ]
    attention = torch.nn.functional.scaled_dot_product_attention
    q = random(case.sequences, case.heads, case.queries, case.head_dim)
    # Torch's mask begins at the first position. Last queries of a prompt see all of it here.
    is_causal = case.is_prefill and not case.last_queries
    return [
        partial(
            attention,
            q,
            *(random(case.sequences, case.kv_heads, case.context, case.head_dim) for _ in range(2)),
            is_causal=is_causal,
            enable_gqa=True,
        )
        for _ in range(case.copies)
    ]


def measure(cases: list[Product | Attention], rows: Rows, path: Path) -> None:
    """Write the limits to a file, and append a row for each case that torch has."""
    if torch is None or not torch.cuda.is_available():
        print("  torch is not installed, or has no device")
        return
    found = limits()
    path.write_text(json.dumps(found))
    print(f"  bandwidth: {found['bandwidth'] / 1e12:.2f} TB/s; product: {found['flops'] / 1e12:.0f} TFLOP/s")
    measure_cases(
        [
            case
            for case in cases
            if not isinstance(case, QuantisedProduct)
            and not (isinstance(case, Attention) and case.kv != "bfloat16")
        ],
        rows,
    )


def measure_cases(cases: Iterable[Product | Attention], rows: Rows) -> None:
    """Append a row for each case."""
    for case in cases:
        calls = itertools.cycle(calls_of(case))
        times = timed(list(itertools.islice(calls, max(4, case.copies))))
        rows.add(Row(case.name, times, bytes=case.bytes, flops=case.flops))
        del calls
        torch.cuda.empty_cache()
