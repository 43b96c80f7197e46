"""Compares DashInfer's API with the native blocking API of the same engine, in turns.

    .venv/bin/python benches/dashinfer_overhead.py [--streams 64] [--rounds 9] [--first-tokens 200] [PATH]

PATH is a checkpoint or a GGUF file; without one, the demo model. In a round each API runs all streams once,
each in a thread of its own that reads token by token; the API that begins alternates. Prints the median and
the quartiles of the ratio of tokens per second, and of the difference of the time from the start of a lone
request to its first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import penstock
from penstock.compat.dashinfer import allspark

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAME = "model"
PROMPT, TOKENS = 16, 64
ENDS = (
    allspark.GenerateRequestStatus.GenerateFinished,
    allspark.GenerateRequestStatus.GenerateInterrupted,
)
#: Reads the stream of a prompt; returns the number of tokens, and the time to the first one.
Read = "Callable[[list[int]], tuple[int, float]]"


def facade_reader(engine: allspark.Engine, count: int) -> Read:
    """Reads `count` tokens by DashInfer's API."""
    config = {"top_k": 1, "early_stopping": False, "max_length": PROMPT + count}

    def read(prompt: list[int]) -> tuple[int, float]:
        start, first, num_tokens = time.perf_counter(), 0.0, 0
        _status, handle, queue = engine.start_request_ids(NAME, None, prompt, config)
        status = queue.GenerateStatus()
        while status not in ENDS:
            elements = queue.Get()
            if elements is not None:
                first = first or time.perf_counter() - start
                num_tokens += len(elements.ids_from_generate)
            status = queue.GenerateStatus()
        engine.release_request(NAME, handle)
        return num_tokens, first

    return read


def native_reader(engine: penstock.Engine, count: int) -> Read:
    """Reads `count` tokens by the native blocking API."""

    def read(prompt: list[int]) -> tuple[int, float]:
        start, first, num_tokens = time.perf_counter(), 0.0, 0
        request = engine.blocking.start_request(
            prompt, max_tokens=count, temperature=0.0, ignore_eos=True, unread="keep"
        )
        while (chunk := request.read()) is not None:
            first = first or time.perf_counter() - start
            num_tokens += len(chunk.token_ids)
        return num_tokens, first

    return read


def tokens_per_second(prompts: Sequence[list[int]], pool: ThreadPoolExecutor, read: Read) -> float:
    """Run all streams at once."""
    start = time.perf_counter()
    counts = [count for count, _first in pool.map(read, prompts)]
    if counts != [TOKENS] * len(prompts):
        raise SystemExit(f"streams of {counts} tokens instead of {TOKENS}")
    return sum(counts) / (time.perf_counter() - start)


def first_token(prompt: list[int], read: Read) -> float:
    """The time to the first token, in microseconds."""
    return read(prompt)[1] * 1e6


def in_turns(number: int, readers: Sequence[Read], run: Callable[[Read], float]) -> list[float]:
    """The results of both readers; the one that runs first alternates with `number`."""
    results = [run(read) for read in readers[:: -1 if number % 2 else 1]]
    return results[:: -1 if number % 2 else 1]


def quartiles(values: Sequence[float]) -> str:
    """The median, with the first and the third quartile."""
    first, median, third = statistics.quantiles(values, n=4)
    return f"{median:.3f} ({first:.3f} to {third:.3f})"


def measure(engine: allspark.Engine, native: penstock.Engine, options: argparse.Namespace) -> None:
    """Run all rounds; each has other prompts."""
    chance = random.Random(1)  # noqa: S311 - prompts
    vocabulary = range(native.info.vocabulary_size)

    def prompt() -> list[int]:
        return chance.choices(vocabulary, k=PROMPT)

    with ThreadPoolExecutor(options.streams) as pool:
        readers = facade_reader(engine, TOKENS), native_reader(native, TOKENS)
        ratios = []
        for number in range(-1, options.rounds):
            prompts = [prompt() for _ in range(options.streams)]
            facade, plain = in_turns(number, readers, partial(tokens_per_second, prompts, pool))
            if number >= 0:  # the first round is the warm-up
                ratios.append(facade / plain)
                print(f"{facade:9.1f} {plain:9.1f} tokens/s, ratio {ratios[-1]:.3f}", flush=True)
    if len(ratios) > 1:
        print(f"{options.streams} streams, ratio of tokens/s: {quartiles(ratios)}")
    readers = facade_reader(engine, 1), native_reader(native, 1)
    delays = [
        in_turns(number, readers, partial(first_token, prompt()))
        for number in range(-10, options.first_tokens)
    ][10:]
    if len(delays) > 1:
        facade, plain = (statistics.median(column) for column in zip(*delays, strict=True))
        difference = quartiles([with_facade - without for with_facade, without in delays])
        print(f"first token: {facade:.1f} and {plain:.1f} us, difference {difference} us")


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", nargs="?", metavar="PATH")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--first-tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    path = options.path or penstock.demo.model_path()
    engine = allspark.Engine()
    with tempfile.TemporaryDirectory() as directory:
        loader = allspark.HuggingFaceModel(path, NAME)
        loader.load_model().serialize_to_path(engine, directory).free_model()
        builder = loader.create_reference_runtime_config_builder(
            NAME, allspark.TargetDevice.CPU, [0], max_batch=options.streams, max_context_length=256
        )
        builder.prefill_cache(enable=False).compute_unit(
            allspark.TargetDevice.CPU, compute_thread_in_device=options.threads
        )
        engine.install_model(builder.build())
        engine.start_model(NAME)
        measure(engine, engine._models[NAME].engine, options)  # noqa: SLF001 - one engine for both
    engine.stop_model(NAME)
    engine.release_model(NAME)


if __name__ == "__main__":
    main()
