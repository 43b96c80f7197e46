"""Selects the most likely of several continuations: `python examples/score.py [MODEL]`.

Evaluation harnesses work this way: the log likelihood of a continuation is the sum over its tokens.
"""

import sys
from collections.abc import Sequence

import anyio

import penstock
from penstock.demo import model_path

QUESTIONS = {
    "The capital of France is": (" Paris", " Rome", " Oslo"),
    "Water is made of hydrogen and": (" oxygen", " carbon", " gold"),
}


async def log_likelihood(engine: penstock.Engine, context: Sequence[int], continuation: str) -> float:
    """Log likelihood of the continuation, given the context."""
    token_ids = engine.encode(continuation, add_special_tokens=False)
    score = await engine.score([*context, *token_ids])
    return sum(logprob or 0.0 for logprob in score.logprobs[len(context) :])


async def main(model: str) -> None:
    """Scores all texts concurrently, one task each; the engine batches them."""
    likelihoods: dict[tuple[str, str], float] = {}

    async def judge(engine: penstock.Engine, question: str, answer: str) -> None:
        likelihoods[question, answer] = await log_likelihood(engine, engine.encode(question), answer)

    async with penstock.Engine(model) as engine:
        async with anyio.create_task_group() as group:
            for question, answers in QUESTIONS.items():
                for answer in answers:
                    group.start_soon(judge, engine, question, answer)
        for question, answers in QUESTIONS.items():
            best = max(answers, key=lambda answer: likelihoods[question, answer])
            print(
                f"{question}{best}", *(f"{answer}: {likelihoods[question, answer]:.2f}" for answer in answers)
            )
        print(f"perplexity {(await engine.score('The sky is blue.')).perplexity:.1f}")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if sys.argv[1:] else str(model_path()))
