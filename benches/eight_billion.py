"""Measures a model of eight billion parameters with random 4-bit weights, in the shape of Llama 3 8B.

    .venv/bin/python benches/eight_billion.py [--prompt 8192] [--threads 2] [--folder DIR] [--keep]

Writes a GGUF file of 4.5 GB and, from it, a converted model of the same size; both are deleted afterwards.
Prints the time to open the converted model from the page cache, the resident memory, the decode rate as a
share of the read bandwidth, and the largest gap in four streams while a long prompt is computed beside
them.
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
    most = CONFIG["vocab_size"] * CONFIG["hidden_size"] // 32
    blocks = np.random.default_rng(0).integers(256, size=(most, 18), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)
    for name, shape in tensors():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            rows, columns = shape
            raw = blocks.reshape(-1)[: rows * columns // 32 * 18].reshape(rows, -1)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def resident() -> int:
    """Bytes of resident memory."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(range(300, CONFIG["vocab_size"] - 1), k=length)  # noqa: S311 - prompts


async def beside_streams(engine: penstock.Engine, length: int) -> tuple[float, list[float]]:
    """Compute a long prompt beside streams: its time to the first token, and the streams' gaps until then."""
    stamps: list[list[float]] = [[] for _ in range(STREAMS)]
    started = asyncio.Event()

    async def stream(index: int) -> None:
        async with engine.stream(prompt(16, index), max_tokens=4096, **GREEDY) as request:
            async for _ in request:
                stamps[index].append(time.perf_counter())
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
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, stamps))
    return end - start, [after - before for before, after in pairs if start < after <= end]


def measure(model: Path, options: argparse.Namespace) -> None:
    """Open the model and print the results."""
    probe = Probe(options.threads)
    before = probe.limits()[-1]["read"]
    start = time.perf_counter()
    engine = penstock.Engine(
        model, threads=options.threads, max_model_len=options.prompt + 4096, max_num_seqs=8
    )
    engine.blocking.start()
    opened = time.perf_counter() - start
    with engine:
        first = engine.blocking.generate(prompt(16, 100), max_tokens=1, **GREEDY)
        ready = time.perf_counter() - start
        print(f"opened in {opened:.2f} s; {ready:.2f} s to the first token of a prompt of {16}")
        timings = engine.blocking.generate(prompt(16, 101), max_tokens=25, **GREEDY).timings
        assert first.timings and timings.first_token is not None  # noqa: S101, PT018
        rate = 24 / (timings.total - timings.first_token)
        memory, read = engine.info.memory, (before + probe.limits()[-1]["read"]) / 2
        share = rate * memory.weights / read
        print(f"decode: {rate:.2f} tokens/s, {share:.0%} of the read bandwidth of {read / 1e9:.1f} GB/s")
        rest = resident() - memory.weights
        print(f"memory: {memory.weights / 1e6:.0f} MB of weights, {rest / 1e6:.0f} MB resident beside them")
        seconds, gaps = asyncio.run(beside_streams(engine, options.prompt))
        middle = statistics.median(gaps)
        print(
            f"prompt of {options.prompt} beside {STREAMS} streams: {options.prompt / seconds:.1f} tokens/s; "
            f"gaps in the streams: median {middle:.2f} s, at most {max(gaps):.2f} s "
            f"= {max(gaps) / middle:.2f} steps"
        )


def main() -> None:
    """Write the models, measure, delete them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "target", help="where the files are written"
    )
    parser.add_argument("--keep", action="store_true", help="keep the model for another run")
    options = parser.parse_args()
    source, model = options.folder / "eight-billion.gguf", options.folder / "eight-billion"
    convert: Any = getattr(penstock, "convert", None)
    try:
        if not model.exists() and not source.exists():
            write(source)
        if convert is None:
            model = source
        elif not model.exists():
            start = time.perf_counter()
            convert(source, model)
            print(f"converted in {time.perf_counter() - start:.0f} s")
            source.unlink()
        for file in model.iterdir() if model.is_dir() else [model]:
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
