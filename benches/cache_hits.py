"""Measures the processor time of requests beside a full prefix cache.

    .venv/bin/python benches/cache_hits.py [--blocks 0 100000 300000] [--requests 200] [--rounds 5]

The model is tiny and random, so the time is that of the engine. For each number of cached blocks, the table
has the processor time of the whole process per request: of requests with a prompt of 64 tokens, all but the
last block of which is in the cache, one after the other, so the engine is idle after each. The ratios are to
the first number of blocks, by round.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import penstock

LENGTH = 4096
BLOCK = 16
OPTIONS: dict[str, Any] = {"block_size": BLOCK, "prefix_cache_ttl": 1e6, "threads": 1}
TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
}


def write_model(folder: Path) -> Path:
    """Write the tiny model."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    support = importlib.import_module("support.api.checkpoints")
    return Path(support.write_checkpoint(folder, support.make_config("llama", **TINY)))


def fill(engine: penstock.Engine, blocks: int) -> None:
    """Put random prompts into the cache until it has at least this number of blocks."""
    chance = random.Random(0)  # noqa: S311 - prompts
    while engine.stats().blocks_cached < blocks:
        prompts = [chance.choices(range(256), k=LENGTH - 1) for _ in range(16)]
        for item in engine.blocking.generate_many(prompts, max_tokens=1):
            if item.error is not None:
                raise item.error


def cost(engine: penstock.Engine, requests: int, seed: int) -> float:
    """The processor time of a request, in milliseconds."""
    prompt = random.Random(seed).choices(range(256), k=4 * BLOCK)  # noqa: S311 - a prompt
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
    engine.blocking.generate(prompt, **options)
    started = time.process_time()
    for _ in range(requests):
        cached = engine.blocking.generate(prompt, **options).usage.cached_tokens
        if cached != 3 * BLOCK:
            raise SystemExit(f"{cached} tokens are from the cache, not {3 * BLOCK}")
    return 1e3 * (time.process_time() - started) / requests


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 100_000, 300_000])
    parser.add_argument("--requests", type=int, default=200, help="requests of a round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    costs: dict[int, list[float]] = {blocks: [] for blocks in arguments.blocks}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        engines = {
            blocks: penstock.Engine(model, kv_cache_blocks=blocks + 1024, **OPTIONS)
            for blocks in arguments.blocks
        }
        for blocks, engine in engines.items():
            engine.blocking.start()
            fill(engine, blocks)
        for number in range(arguments.rounds):
            for blocks, engine in engines.items():
                costs[blocks].append(cost(engine, arguments.requests, number))
        for engine in engines.values():
            engine.blocking.close()
    print("| cached blocks | ms per request | ratio |\n|---|---|---|")
    for blocks, values in costs.items():
        ratios = [value / first for value, first in zip(values, costs[arguments.blocks[0]], strict=True)]
        print(
            f"| {blocks} | {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}) "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
