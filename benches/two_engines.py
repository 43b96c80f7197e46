"""Throughput of two engines in one process, relative to one engine.

    python benches/two_engines.py [--model PATH] [--streams 4] [--tokens 64] [--rounds 5]

Each round runs one engine; two engines that share a host, and so take turns; two engines on separate hosts,
with threads that compete. Each engine serves the same number of streams. The table has tokens per second,
and the ratio to one engine: median and range of the rounds. The goal with a shared host is a ratio of at
least 0.95.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import penstock


def run(engine: penstock.Engine, streams: int, tokens: int) -> float:
    """The duration of the streams, in seconds."""
    started = time.perf_counter()
    prompts = [[index + 1, 2, 3, 4] for index in range(streams)]
    options = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    for item in engine.blocking.generate_many(prompts, concurrency=streams, **options):  # type: ignore[arg-type]
        if item.error is not None:
            raise item.error
    return time.perf_counter() - started


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=None, help="a model directory or file; default: the demo model")
    parser.add_argument("--streams", type=int, default=4, help="streams of an engine")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a stream")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = arguments.model or penstock.demo.model_path()
    streams, tokens = arguments.streams, arguments.tokens
    ways = {"one engine": [0], "two engines, one host": [0, 1], "two engines, two hosts": [0, 2]}
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    slower = []
    hosts = [None, None, penstock.Host()]
    engines = [penstock.Engine(model, host=host, kv_cache_bytes=256 << 20) for host in hosts]
    with engines[0], engines[1], engines[2], ThreadPoolExecutor(2) as threads:
        for _ in range(arguments.rounds):
            for way, used in ways.items():
                started = time.perf_counter()
                times = list(threads.map(lambda index: run(engines[index], streams, tokens), used))
                seconds = time.perf_counter() - started
                speeds[way].append(len(used) * streams * tokens / seconds)
                if way == "two engines, one host":
                    slower.append(max(times) / min(times))
    print("| | tokens/s | ratio to one engine |\n|---|---|---|")
    for way, values in speeds.items():
        ratios = [value / one for value, one in zip(values, speeds["one engine"], strict=True)]
        print(
            f"| {way} | {statistics.median(values):.0f} | {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}) |"
        )
    print(
        f"\nTime of the slower engine of one host relative to the faster one: {statistics.median(slower):.2f}"
    )


if __name__ == "__main__":
    main()
