"""Measures many concurrent streams in one event loop.

    .venv/bin/python benches/streams.py [--streams 1 16 64 256] [--rounds 5] [--threads 2] [PATH]

PATH is a checkpoint; without one, the demo model. Each stream is read chunk by chunk, with greedy sampling
and a random prompt of its own. For each number of streams it prints the medians of the rounds after a
warm-up: tokens per second, the time to the first token, and the CPU time per token of each kind of thread.
`python` is the event loop with the delivery of results.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

import penstock

if TYPE_CHECKING:
    from collections.abc import Mapping

PROMPT, TOKENS = 16, 128


def cpu_seconds() -> dict[str, float]:
    """CPU seconds of each kind of thread of this process."""
    seconds: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip().rstrip("-0123456789")
        seconds[name] = seconds.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) * 1e-9
    return seconds


async def read(engine: penstock.Engine, prompt: list[int], delays: list[float]) -> None:
    """Read one stream; append the time to its first token."""
    start = time.perf_counter()
    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": TOKENS}
    count = 0
    async with engine.stream(prompt, **options) as request:
        async for chunk in request:
            if count == 0 and chunk.token_ids:
                delays.append(time.perf_counter() - start)
            count += len(chunk.token_ids)
    if count != TOKENS:
        raise SystemExit(f"a stream of {count} tokens instead of {TOKENS}")


async def measure(engine: penstock.Engine, streams: int, number: int) -> Mapping[str, float]:
    """Run one round. Every round has other prompts, so the prefix cache has none of them."""
    chance = random.Random(number)  # noqa: S311 - prompts
    vocabulary = range(engine.info.vocabulary_size)
    delays: list[float] = []
    before, start = cpu_seconds(), time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(streams):
            group.start_soon(read, engine, chance.choices(vocabulary, k=PROMPT), delays)
    seconds, tokens = time.perf_counter() - start, streams * TOKENS
    threads = {name: (after - before.get(name, 0.0)) / tokens for name, after in cpu_seconds().items()}
    return {"tokens/s": tokens / seconds, "first token, ms": statistics.median(delays) * 1e3} | {
        f"{name}, us": cpu * 1e6 for name, cpu in threads.items() if cpu > 0.0
    }


async def run(options: argparse.Namespace) -> None:
    """Run all numbers of streams."""
    for streams in options.streams:
        config = {"threads": options.threads, "max_num_seqs": streams, "kv_cache_bytes": 1 << 28}
        async with penstock.Engine(options.path, **config) as engine:
            rounds = [await measure(engine, streams, number) for number in range(1 + options.rounds)][1:]
        names = dict.fromkeys(name for measured in rounds for name in measured)
        medians = {name: statistics.median(measured.get(name, 0.0) for measured in rounds) for name in names}
        print(f"{streams:4} streams:", ", ".join(f"{name} {value:.1f}" for name, value in medians.items()))


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", nargs="?", metavar="PATH")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.path is None:
        from penstock.demo import model_path

        options.path = model_path()
    anyio.run(run, options)


if __name__ == "__main__":
    main()
