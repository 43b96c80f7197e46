"""Compares LMDeploy's API with the native API of the same engine, in turns.

    .venv/bin/python benches/lmdeploy_overhead.py [--streams 64] [--rounds 9] [--prompts 0] [PATH]

PATH is a checkpoint or a GGUF file; without one, the demo model. In a round each API runs all streams once
and reads them token by token; the API that begins alternates. Prints the median and the quartiles of the
ratio of tokens per second: of `AsyncEngine.generate` and `Engine.start_request` with one task for each
stream, and of `stream_infer` and `stream_many`. With `--prompts N`, also runs a list of N prompts and prints
the memory that it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import time
from typing import TYPE_CHECKING, Any

import penstock
from penstock.compat.lmdeploy import GenerationConfig, Pipeline, TurbomindEngineConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

PROMPT, TOKENS = 16, 64
CONFIG = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)
PARAMS = penstock.SamplingParams(
    max_tokens=TOKENS, temperature=0.0, ignore_eos=True, use_prefix_cache=False, seed=1
)


async def facade_stream(pipe: Pipeline, prompt: list[int]) -> int:
    """Read a stream by `generate`; returns its number of tokens."""
    count = 0
    async for item in pipe.generate(None, None, CONFIG, input_ids=prompt):
        count = item.generate_token_len
    return count


async def native_stream(pipe: Pipeline, prompt: list[int]) -> int:
    """Read a stream by `start_request`."""
    count = 0
    async for chunk in await pipe.engine.start_request(prompt, PARAMS):
        count += len(chunk.token_ids)
    return count


def tasks(
    read: Callable[[Pipeline, list[int]], Awaitable[int]], pipe: Pipeline, prompts: Sequence[list[int]]
) -> int:
    """Run one task for each stream."""

    async def run() -> list[int]:
        return await asyncio.gather(*(read(pipe, prompt) for prompt in prompts))

    return sum(asyncio.run(run()))


def facade_tasks(pipe: Pipeline, prompts: Sequence[list[int]]) -> int:
    """`generate` in one task for each stream."""
    return tasks(facade_stream, pipe, prompts)


def native_tasks(pipe: Pipeline, prompts: Sequence[list[int]]) -> int:
    """`start_request` in one task for each stream."""
    return tasks(native_stream, pipe, prompts)


def facade_list(pipe: Pipeline, prompts: Sequence[list[int]]) -> int:
    """`stream_infer` with all prompts."""
    texts = [pipe.tokenizer.decode(prompt) for prompt in prompts]
    counts: dict[int, int] = {}
    for part in pipe.stream_infer(texts, gen_config=CONFIG, do_preprocess=False):
        counts[part.index] = part.generate_token_len
    return sum(counts.values())


def native_list(pipe: Pipeline, prompts: Sequence[list[int]]) -> int:
    """`stream_many` with all prompts."""
    texts = [pipe.tokenizer.decode(prompt) for prompt in prompts]
    count = 0
    for item in pipe.engine.blocking.stream_many(texts, PARAMS, concurrency=len(texts)):
        if item.chunk is not None:
            count += len(item.chunk.token_ids)
    return count


def quartiles(values: Sequence[float]) -> str:
    """The median, with the first and the third quartile."""
    first, median, third = statistics.quantiles(values, n=4)
    return f"{median:.3f} ({first:.3f} to {third:.3f})"


def compare(pipe: Pipeline, options: argparse.Namespace, name: str, sides: Sequence[Any]) -> None:
    """Run all rounds; each has other prompts."""
    chance = random.Random(1)  # noqa: S311 - prompts
    vocabulary = range(1000, pipe.engine.info.vocabulary_size - 1000)
    ratios = []
    for number in range(-1, options.rounds):
        prompts = [chance.choices(vocabulary, k=PROMPT) for _ in range(options.streams)]
        speeds = {}
        for side in sides[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            count = side(pipe, prompts)
            speeds[side] = count / (time.perf_counter() - start)
            if count != TOKENS * options.streams:
                raise SystemExit(f"{count} tokens instead of {TOKENS * options.streams}")
        if number >= 0:  # the first round is the warm-up
            ratios.append(speeds[sides[0]] / speeds[sides[1]])
    print(f"{name}, {options.streams} streams, ratio of tokens/s: {quartiles(ratios)}", flush=True)


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", nargs="?", metavar="PATH")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=0)
    options = parser.parse_args()
    config = TurbomindEngineConfig(max_batch_size=options.streams, session_len=512)
    with Pipeline(options.path or penstock.demo.model_path(), backend_config=config) as pipe:
        if options.rounds:
            compare(pipe, options, "generate", (facade_tasks, native_tasks))
            compare(pipe, options, "stream_infer", (facade_list, native_list))
        if options.prompts:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            start = time.perf_counter()
            prompts = [f"Prompt {number}" for number in range(options.prompts)]
            config = GenerationConfig(max_new_tokens=4)
            responses = pipe(prompts, gen_config=config, do_preprocess=False)
            seconds = time.perf_counter() - start
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            ends = {response.finish_reason for response in responses}
            print(f"{len(responses)} prompts, {ends}: {seconds:.1f} s, {grown} KiB more memory")


if __name__ == "__main__":
    main()
