"""Run B2 of the measuring plan: attention by every kernel, its bits, and torch beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch_limits
from cases import KV_BITS, Attention
from plan_bench import REPLAYS, PlanBench

from emu.client import DriverError, Pointer
from kernels import KV_NAMES, AttentionOperands

if TYPE_CHECKING:
    from plan_rows import Figures
    from shapes import Shape


def cases(shape: Shape, *, tiny: bool) -> list[Attention]:
    """The cases: those of the prompt first, and types of caches in the order of their use."""
    heads = shape.heads, shape.kv_heads, shape.head_dim
    prompts = [(1, 8192, 0), (4, 2048, 0), (1, 8704, 512)]
    batches = [(256, 1024), (1, 1024), (256, 4096), (1, 4096), (64, 1024), (8, 1024), (64, 4096), (8, 4096)]
    if tiny:
        prompts, batches = [(2, 40, 0), (1, 290, 20)], [(2, 270)]
    turn = 0 if tiny else 256 << 20
    found = []
    for kv in KV_BITS:
        for sequences, context, last in prompts:
            size = f"{last} behind {context - last}" if last else f"{sequences} x {context}"
            name = f"prefill, {kv}, {size}"
            found.append(
                Attention(name, kv, sequences, context, *heads, True, turn, last)  # noqa: FBT003
            )
    for kv in KV_BITS:
        for sequences, context in batches:
            name = f"decode, {kv}, {sequences} x {context}"
            found.append(Attention(name, kv, sequences, context, *heads, turn=turn))
    return found


def attention(figures: Figures, shape: Shape, *, tiny: bool) -> None:
    """Measure every kernel of every case, and compare their bits."""
    bench = PlanBench()
    for case in cases(shape, tiny=tiny):
        try:
            operands = AttentionOperands(bench, case)
            compare(bench, figures, operands)
            for kernel in operands.kernels:
                launches = [operands.launches(kernel, pages) for pages in operands.copies]
                samples = [1e6 * second for second in bench.times(launches, REPLAYS)]
                rate = case.flops if case.is_prefill else case.bytes
                best = rate / min(samples) / 1e6
                note = f"{best:.0f} TFLOP/s" if case.is_prefill else f"{best:.2f} TB/s"
                figures.figure(f"{case.name}, {kernel}", samples, "us", note)
        except DriverError as error:
            figures.skipped(case.name, f"{error}")
            bench.owned.clear()
            bench.reset()
        except RuntimeError as error:
            figures.skipped(case.name, f"{error}")
        bench.release()


def compare(bench: PlanBench, figures: Figures, operands: AttentionOperands) -> None:
    """Compare the bits of the kernels of a case; for a prompt, also those of its last query by decode."""
    case, pages, size = operands.case, operands.copies[0], bench.output_size
    expected = bench.poisoned(size)
    first, *others = operands.kernels
    result = bench.output_buffer

    def run(kernel: str, to: Pointer, *, of_last: bool = False) -> None:
        bench.output_buffer = to
        for name, shape, call in operands.launches(kernel, pages, of_last=of_last):
            bench.run(name, shape, call)
        bench.output_buffer = result

    run(first, expected)
    for kernel in others:
        bench.poison(result, size)
        run(kernel, result)
        different = bench.differences(result, expected, size)
        figures.figure(f"{case.name}, {kernel}, words that differ from {first}", [different], "words")
    if case.is_prefill:
        bench.poison(result, size)
        run("decode", result, of_last=True)
        row = size // (case.sequences * case.queries)
        different = sum(
            bench.differences(Pointer(result + place), Pointer(expected + place), row)
            for place in ((i * case.queries - 1) * row for i in range(1, case.sequences + 1))
        )
        figures.figure(
            f"{case.name}, decode of the last query, words that differ from {first}", [different], "words"
        )


def torch(figures: Figures, shape: Shape, *, tiny: bool) -> None:
    """Measure the limits of the device, and torch's attention."""
    if torch_limits.torch is None or not torch_limits.torch.cuda.is_available():
        figures.skipped("attention", "torch is not installed, or has no device")
        return
    found = torch_limits.limits()
    figures.figure("bandwidth of a copy or a sum", [found["bandwidth"] / 1e12], "TB/s")
    figures.figure("product of 8192 x 8192 x 8192", [found["flops"] / 1e12], "TFLOP/s")
    torch_limits.measure_cases([case for case in cases(shape, tiny=tiny) if case.kv == "bfloat16"], figures)


#: The kernels that are compiled beforehand.
KERNELS = tuple(
    f"attention_{kernel}_bf16_{KV_NAMES[kv]}_128"
    for kv in KV_BITS
    for kernel in ("decode", "decode_wide", "combine", "prefill", *["prefill_warpgroup"] * (kv != "uint4"))
)
