"""Compares decoding with and without n-gram speculation, on the demo model.

    .venv/bin/python benches/speculation.py [--rounds 9] [--threads 2] [--tokens 96] [--only WORKLOAD]

Two engines of the same size are open in one process; only one works at a time. Each round runs a workload on
both, in alternating order, and checks that the outputs are equal. The first round is a warm-up that fills the
prefix caches. For each workload it prints the time without speculation divided by the time with it (median,
quartiles and range over the rounds), and how many draft tokens were accepted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

import penstock
from penstock.demo import model_path

if TYPE_CHECKING:
    from collections.abc import Sequence

INVENTORY = """\
shelf 1: copper wire, 40 m, checked by Alice on Monday
shelf 2: steel bolts, 300 pieces, checked by Robert on Tuesday
shelf 3: walnut boards, 12 pieces, checked by Alice on Monday
shelf 4: linseed oil, 9 litres, checked by Miriam on Thursday
shelf 5: brass hinges, 64 pieces, checked by Robert on Friday
shelf 6: window glass, 7 panes, checked by Miriam on Thursday
"""
LETTER = """\
Dear Ms Okafor, thank you for the two boxes of seeds, which reached us on Friday. Half of them went into the
ground the same day, behind the old greenhouse, where the soil is lighter. My brother thinks that the beans
were sown too early; we shall see in May who was right. With kind regards, Jonathan Weaver.
"""

QUESTIONS = [
    "Why is the sky blue?",
    "Tell me a short story about a lighthouse keeper and a whale.",
    "How do I bake bread without an oven?",
    "What should I see on a weekend in Lisbon?",
    "Explain how a bicycle stays upright.",
    "Write a letter to a friend who has moved to another country.",
    "What were the causes of the First World War?",
    "Describe a walk through a forest in autumn.",
]


class Workload(NamedTuple):
    """Concurrent requests."""

    prompts: Sequence[Any]
    options: dict[str, Any]


def chats(count: int) -> list[Any]:
    """The first `count` questions, as messages."""
    return [[{"role": "user", "content": question}] for question in QUESTIONS[:count]]


GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 1}
WORKLOADS = {
    "copying, a list": Workload([INVENTORY * 3], GREEDY),
    "copying, a letter": Workload([LETTER * 3], GREEDY),
    "answers, greedy": Workload(chats(1), GREEDY),
    "answers, sampled": Workload(chats(1), SAMPLED),
    "story, greedy": Workload(chats(2)[1:], GREEDY),
    "story, sampled": Workload(chats(2)[1:], SAMPLED),
    "8 answers, greedy": Workload(chats(8), GREEDY),
    "8 answers, sampled": Workload(chats(8), SAMPLED),
}


class Run(NamedTuple):
    """The measurements of one engine in a round."""

    seconds: float
    token_ids: list[tuple[int, ...]]
    generated: int
    drafted: int
    accepted: int


async def run_workload(engine: penstock.Engine, workload: Workload, tokens: int) -> Run:
    """Run all requests, and measure the time until the last one has finished."""
    answers: list[tuple[int, ...]] = [()] * len(workload.prompts)

    async def ask(index: int, prompt: Any) -> None:
        result = await engine.generate(prompt, max_tokens=tokens, ignore_eos=True, **workload.options)
        answers[index] = result.token_ids

    before, start = engine.stats(), time.perf_counter()
    async with anyio.create_task_group() as group:
        for index, prompt in enumerate(workload.prompts):
            group.start_soon(ask, index, prompt)
    seconds, after = time.perf_counter() - start, engine.stats()
    return Run(
        seconds,
        answers,
        after.generation_tokens - before.generation_tokens,
        after.drafted_tokens - before.drafted_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


async def measure(engines: dict[bool, penstock.Engine], name: str, rounds: int, tokens: int) -> None:
    """Run the rounds of one workload and print the results."""
    ratios = []
    for number in range(rounds + 1):
        order = [False, True] if number % 2 else [True, False]
        runs = {kind: await run_workload(engines[kind], WORKLOADS[name], tokens) for kind in order}
        if runs[True].token_ids != runs[False].token_ids:
            raise SystemExit(f"{name}: speculation changed an output")
        if number > 0:
            ratios.append(runs[False].seconds / runs[True].seconds)
    low, middle, high = statistics.quantiles(ratios, n=4)
    plain, drafting = runs[False], runs[True]
    print(
        f"{name:18} {middle:5.2f} x  ({low:.2f} to {high:.2f}, of {min(ratios):.2f} to {max(ratios):.2f})"
        f"  {plain.generated / plain.seconds:6.1f} tokens/s without;"
        f" {drafting.accepted} of {drafting.drafted} draft tokens accepted,"
        f" {drafting.accepted / drafting.generated:.0%} of the tokens",
        flush=True,
    )


async def run(options: argparse.Namespace) -> None:
    """Run all workloads."""
    config: dict[str, Any] = {
        "threads": options.threads,
        "max_num_seqs": 8,
        "max_model_len": 2048,
        "kv_cache_bytes": 256 << 20,
    }
    async with (
        penstock.Engine(model_path(), **config) as plain,
        penstock.Engine(model_path(), speculation="ngram", **config) as drafting,
    ):
        for name in WORKLOADS:
            if options.only is None or name.startswith(options.only):
                await measure({False: plain, True: drafting}, name, options.rounds, options.tokens)


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="at least 2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96, help="tokens generated per request")
    parser.add_argument("--only", help="prefix of the names of the workloads to run")
    anyio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
