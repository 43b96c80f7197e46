"""A program that runs the same requests on the emulated device in many ways, and compares their bits."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from support.api.checkpoints import write_checkpoint
from support.api.engines import bits_of, check_stats
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TOKENS = 32
SIZES: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "threads": 1,
    "prefix_cache": False,
}
#: Room for the longest of the requests, or for the prompts of a few that then grow.
PRESSURE: dict[str, Any] = {"kv_cache_blocks": 8, "max_num_batched_tokens": 64}

#: The last three have drafts: two repeat themselves, and the grammar of the last one leaves no choice.
PROMPTS: list[str | list[int]] = [
    *(random_prompt(length, seed=length) for length in (1, 15, 47, 63, 79, 95)),
    random_prompt(24) * 4,
    random_prompt(9) * 6,
    "x",
]
GREEDY = penstock.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=True)
SAMPLED = GREEDY.replace(temperature=0.9, top_p=0.9, top_k=50, seed=7)
PARAMS = [(GREEDY, SAMPLED)[index % 2] for index in range(len(PROMPTS) - 1)]
PARAMS.append(SAMPLED.replace(ignore_eos=False, regex="the very same words( and again){6}"))

#: Each way of running all requests: options of the engine, and how many run at the same time.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "batch": ({}, 8),
    "chunks": ({"max_num_batched_tokens": 16}, 8),
    "cache": ({"prefix_cache": True}, 1),
    "recompute": (PRESSURE | {"preemption_mode": "recompute"}, 8),
    "swap": (PRESSURE | {"preemption_mode": "swap", "host_cache_blocks": 64}, 8),
    "host cache": ({"prefix_cache": True, "kv_cache_blocks": 8, "host_cache_blocks": 200}, 1),
    "speculation": ({"speculation": "ngram"}, 8),
}

#: A line of the errors of `compare_architectures`, after which kernels are those of the second architecture.
END_OF_BEST = "the second architecture"

Bits = tuple[tuple[int, ...], tuple[float, ...] | None, str]


def run(engine: penstock.Engine, concurrency: int) -> list[Bits]:
    """The answers of all requests."""
    items = list(engine.blocking.generate_many(PROMPTS, PARAMS, concurrency=concurrency))
    assert all(item.result for item in items), items
    return [bits_of(item.result) for item in items if item.result is not None]


def differing(found: Sequence[Bits], expected: Sequence[Bits]) -> list[int]:
    """The requests with other bits."""
    return [index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]


def compare(config: str, options: str) -> dict[str, Any]:
    """For each way, the requests that have other bits than alone, and the counters of the engine."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), json.loads(config))
        common = {"device": "cuda"} | SIZES | json.loads(options)
        with penstock.Engine(model, **common) as engine:
            alone = run(engine, 1)
        for name, (changes, concurrency) in WAYS.items():
            with penstock.Engine(model, **common | changes) as engine:
                differences = differing(run(engine, concurrency), alone)
                if "cache" in name:  # again, from the cache
                    differences += differing(run(engine, concurrency), alone)
                stats = engine.stats()
                check_stats(engine)
                found[name] = {
                    "differing": differences,
                    "tokens": [len(bits[0]) for bits in alone],
                    "preemptions": stats.preemptions,
                    "swaps": stats.swaps,
                    "hits": stats.prefix_hit_tokens,
                    "host_hits": stats.prefix_host_hit_tokens,
                    "accepted": stats.accepted_tokens,
                }
    return found


def compare_architectures(config: str, options: str) -> dict[str, Any]:
    """The requests that have other bits without the instructions that this device alone has."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), json.loads(config))
        common = {"device": "cuda"} | SIZES | json.loads(options)
        with penstock.Engine(model, **common) as engine:
            expected, best = run(engine, 8), engine.info.isa
        print(END_OF_BEST, file=sys.stderr)
        os.environ["PENSTOCK_CUDA_ARCH"] = best.removesuffix("a")
        with penstock.Engine(model, **common) as engine:
            return {"differing": differing(run(engine, 8), expected), "isas": [best, engine.info.isa]}
