"""Decoding with n-gram speculation against decoding without, on the demo model.

    .venv/bin/python benches/speculation.py [--rounds 9] [--threads 2] [--tokens 96] [--only WORKLOAD]

Two engines of the same sizes are open in one process, and only one works at a time. A round asks both for the
same answers, now one first and now the other, so that both meet the same machine, and checks that the answers
are the same. The first round is not counted: it leaves the prompts in the prefix caches. Of each workload it
prints the time without speculation over the time with it, as median, quartiles and range over the rounds, and
what became of the drafts.
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
    """Requests that are made all at once."""

    prompts: Sequence[Any]
    options: dict[str, Any]


def chats(count: int) -> list[Any]:
    """The first questions, as messages."""
    return [[{"role": "user", "content": question}] for question in QUESTIONS[:count]]


GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 1}
WORKLOADS = {
    "copying, a list": Workload([INVENTORY * 3], GREEDY),
    "copying, a letter": Workload([LETTER * 3], GREEDY),
    "answers, greedy": Workload(chats(1), GREEDY),
    "answers, drawn": Workload(chats(1), DRAWN),
    "story, greedy": Workload(chats(2)[1:], GREEDY),
    "story, drawn": Workload(chats(2)[1:], DRAWN),
    "8 answers, greedy": Workload(chats(8), GREEDY),
    "8 answers, drawn": Workload(chats(8), DRAWN),
}


class Turn(NamedTuple):
    """One engine's part of a round."""

    seconds: float
    token_ids: list[tuple[int, ...]]
    generated: int
    drafted: int
    accepted: int


async def take_turn(engine: penstock.Engine, workload: Workload, tokens: int) -> Turn:
    """All answers, and the time until the last is whole."""
    answers: list[tuple[int, ...]] = [()] * len(workload.prompts)

    async def ask(index: int, prompt: Any) -> None:
        result = await engine.generate(prompt, max_tokens=tokens, ignore_eos=True, **workload.options)
        answers[index] = result.token_ids

    before, start = engine.stats(), time.perf_counter()
    async with anyio.create_task_group() as group:
        for index, prompt in enumerate(workload.prompts):
            group.start_soon(ask, index, prompt)
    seconds, after = time.perf_counter() - start, engine.stats()
    return Turn(
        seconds,
        answers,
        after.generation_tokens - before.generation_tokens,
        after.drafted_tokens - before.drafted_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


async def measure(engines: dict[bool, penstock.Engine], name: str, rounds: int, tokens: int) -> None:
    """Rounds of one workload, and their line."""
    ratios = []
    for number in range(rounds + 1):
        order = [False, True] if number % 2 else [True, False]
        turns = {kind: await take_turn(engines[kind], WORKLOADS[name], tokens) for kind in order}
        if turns[True].token_ids != turns[False].token_ids:
            raise SystemExit(f"{name}: speculation has changed an answer")
        if number > 0:
            ratios.append(turns[False].seconds / turns[True].seconds)
    low, middle, high = statistics.quantiles(ratios, n=4)
    plain, drafting = turns[False], turns[True]
    print(
        f"{name:18} {middle:5.2f} x  ({low:.2f} to {high:.2f}, of {min(ratios):.2f} to {max(ratios):.2f})"
        f"  {plain.generated / plain.seconds:6.1f} tokens/s without;"
        f" {drafting.accepted} of {drafting.drafted} drafts confirmed,"
        f" {drafting.accepted / drafting.generated:.0%} of the tokens",
        flush=True,
    )


async def run(options: argparse.Namespace) -> None:
    """All workloads."""
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
    """Runs the rounds and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="at least 2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96, help="generated by each request")
    parser.add_argument("--only", help="how the names of the workloads to measure begin")
    anyio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
