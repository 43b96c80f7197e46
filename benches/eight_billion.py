"""Measures a model of eight billion parameters with random 4-bit weights, in the shape of Llama 3 8B.

    .venv/bin/python benches/eight_billion.py [--prompt 8000] [--threads 2] [--folder DIR] [--keep]

Writes a GGUF file of 4.5 GB and, from it, a converted model of the same size; both are deleted afterwards.
Prints the time and the peak memory of the conversion, the time to open the converted model from the page
cache, the resident memory, the decode rate as a share of the read bandwidth, and the largest gap in four
streams while a long prompt is computed beside them (`--prompt 0` leaves that out).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent / "suite"))

from machine import Probe
from models import REPOSITORY, add_metadata

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500_000.0},
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
STREAMS = 4
#: Turns of decoding, with a measurement of the limit before and after each.
ROUNDS = 9
#: Weights of a block of Q4_0, and its bytes.
BLOCK, BLOCK_BYTES = 32, 18


def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor."""
    hidden, inner, vocabulary = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    yield "token_embd.weight", (vocabulary, hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        yield f"blk.{layer}.attn_norm.weight", (hidden,)
        yield f"blk.{layer}.attn_q.weight", (hidden, hidden)
        yield f"blk.{layer}.attn_k.weight", (kv, hidden)
        yield f"blk.{layer}.attn_v.weight", (kv, hidden)
        yield f"blk.{layer}.attn_output.weight", (hidden, hidden)
        yield f"blk.{layer}.ffn_norm.weight", (hidden,)
        yield f"blk.{layer}.ffn_gate.weight", (inner, hidden)
        yield f"blk.{layer}.ffn_up.weight", (inner, hidden)
        yield f"blk.{layer}.ffn_down.weight", (hidden, inner)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (vocabulary, hidden)


def write(file: Path) -> None:
    """Write the model. All matrices start with the same random blocks: a half-precision scale, 32 codes."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, "llama")
    add_metadata(writer, CONFIG)
    most = CONFIG["vocab_size"] * CONFIG["hidden_size"] // BLOCK
    blocks = np.random.default_rng(0).integers(256, size=(most, BLOCK_BYTES), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)
    for name, shape in tensors():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            rows, columns = shape
            raw = blocks.reshape(-1)[: rows * columns // BLOCK * BLOCK_BYTES].reshape(rows, -1)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def resident(field: str = "VmRSS") -> int:
    """Bytes of resident memory; with `VmHWM` its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(range(300, CONFIG["vocab_size"] - 1), k=length)  # noqa: S311 - prompts


async def beside_streams(engine: penstock.Engine, length: int) -> tuple[float, list[float], list[int]]:
    """Compute a long prompt beside streams.

    Returns the time to its first token, and the streams' gaps until then in seconds and in engine steps.
    """
    stamps: list[list[tuple[float, int]]] = [[] for _ in range(STREAMS)]
    started = asyncio.Event()

    async def stream(index: int) -> None:
        async with engine.stream(prompt(16, index), max_tokens=4096, **GREEDY) as request:
            async for _ in request:
                stamps[index].append((time.perf_counter(), engine.stats().steps))
                if all(len(times) > 2 for times in stamps):  # noqa: PLR2004
                    started.set()

    tasks = [asyncio.create_task(stream(index)) for index in range(STREAMS)]
    await started.wait()
    start = time.perf_counter()
    await engine.generate(prompt(length, STREAMS), max_tokens=1, **GREEDY)
    end = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pairs = [
        (before, after)
        for before, after in itertools.chain.from_iterable(map(itertools.pairwise, stamps))
        if start < after[0] <= end
    ]
    gaps = [after[0] - before[0] for before, after in pairs]
    return end - start, gaps, [after[1] - before[1] for before, after in pairs]


def convert(source: Path, model: Path) -> None:
    """Convert the model and print the time and the peak memory."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the memory in use
    before, start = resident(), time.perf_counter()
    penstock.convert(source, model)
    seconds, peak = time.perf_counter() - start, resident("VmHWM") - before
    largest = CONFIG["vocab_size"] * CONFIG["hidden_size"] // BLOCK * BLOCK_BYTES
    print(
        f"converted in {seconds:.0f} s with {peak / 1e6:.0f} MB of memory; "
        f"the largest tensor has {largest / 1e6:.0f} MB"
    )


def decode(engine: penstock.Engine, read: int, probe: Probe) -> None:
    """Decode and measure the limit in turns; print the medians. A token reads `read` bytes."""
    rates, shares, limits = [], [], [probe.limits()[-1]["read"]]
    for seed in range(ROUNDS):
        timings = engine.blocking.generate(prompt(16, 101 + seed), max_tokens=13, **GREEDY).timings
        assert timings.first_token is not None  # noqa: S101
        rates.append(12 / (timings.total - timings.first_token))
        limits.append(probe.limits()[-1]["read"])
        shares.append(rates[-1] * read / statistics.mean(limits[-2:]))
    print(
        f"decode: {statistics.median(rates):.2f} tokens/s ({min(rates):.2f} to {max(rates):.2f}), "
        f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%}) of the read bandwidth of "
        f"{statistics.median(limits) / 1e9:.1f} GB/s ({min(limits) / 1e9:.1f} to {max(limits) / 1e9:.1f})"
    )


def measure(model: Path, options: argparse.Namespace) -> None:
    """Open the model and print the results."""
    start = time.perf_counter()
    engine = penstock.Engine(
        model, threads=options.threads, max_model_len=options.prompt + 4096, max_num_seqs=8
    )
    engine.blocking.start()
    opened = time.perf_counter() - start
    with engine:
        engine.blocking.generate(prompt(16, 100), max_tokens=1, **GREEDY)
        ready = time.perf_counter() - start
        print(f"opened in {opened:.2f} s; {ready:.2f} s to the first token of a prompt of {16}")
        memory = engine.info.memory
        # A token reads one row of the embedding table.
        embedding = next(
            item.bytes for item in engine.info.weight_formats if item.module == "model.embed_tokens"
        )
        decode(engine, memory.weights - embedding, Probe(options.threads))
        rest = resident() - memory.weights
        print(
            f"memory: {memory.weights / 1e6:.0f} MB of weights, {rest / 1e6:.0f} MB resident beside them; "
            f"the KV cache has {memory.kv_cache / 1e6:.0f} MB"
        )
        if not options.prompt:
            return
        seconds, gaps, steps = asyncio.run(beside_streams(engine, options.prompt))
        print(
            f"prompt of {options.prompt} beside {STREAMS} streams: {options.prompt / seconds:.1f} tokens/s; "
            f"gaps in the streams: median {statistics.median(gaps):.2f} s, at most {max(gaps):.2f} s; "
            f"at most {max(steps)} step(s)"
        )


def main() -> None:
    """Write the models, measure, delete them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "target", help="where the files are written"
    )
    parser.add_argument("--keep", action="store_true", help="keep the model for another run")
    options = parser.parse_args()
    source, model = options.folder / "eight-billion.gguf", options.folder / "eight-billion"
    try:
        if not model.exists():
            if not source.exists():
                write(source)
            convert(source, model)
            source.unlink()
        for file in model.iterdir():
            with file.open("rb") as data:  # into the page cache
                while data.read(1 << 24):
                    pass
        measure(model, options)
    finally:
        if not options.keep:
            source.unlink(missing_ok=True)
            shutil.rmtree(options.folder / "eight-billion", ignore_errors=True)


if __name__ == "__main__":
    main()
