"""Runs the engine from token ids to a result, for the parity tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

import penstock
from support import hooks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


def compute_logits(checkpoint: Path, token_ids: Sequence[int], **options: Any) -> NDArray[np.float32]:
    """`[tokens, vocabulary]`: the model's logits after each prefix of `token_ids`."""
    raw = hooks.logits(str(checkpoint), list(token_ids), **options)
    return np.frombuffer(raw, dtype="<f4").reshape(len(token_ids), -1)


def generate_greedily(
    checkpoint: Path, prompts: Sequence[Any], max_tokens: int, **config: Any
) -> list[penstock.Result]:
    """The greedy output of `max_tokens` tokens for each prompt, all prompts concurrently."""
    results: dict[int, penstock.Result] = {}

    async def generate(engine: penstock.Engine, index: int) -> None:
        results[index] = await engine.generate(
            prompts[index], max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=True
        )

    async def main() -> None:
        async with penstock.Engine(checkpoint, **config) as engine, anyio.create_task_group() as group:
            for index in range(len(prompts)):
                group.start_soon(generate, engine, index)

    anyio.run(main)
    return [results[index] for index in range(len(prompts))]


def perplexity(logits: NDArray[np.float32], token_ids: list[int]) -> float:
    """The perplexity of the tokens after the first, given their predecessors."""
    rows = logits[:-1].astype(np.float64)
    peak = rows.max(axis=1, keepdims=True)
    log_sums = peak[:, 0] + np.log(np.exp(rows - peak).sum(axis=1))
    chosen = rows[np.arange(len(rows)), token_ids[1:]]
    return float(np.exp(np.mean(log_sums - chosen)))


def random_prompt(length: int, seed: int = 0, *, vocabulary_size: int = 512) -> list[int]:
    """Random token ids."""
    ids: list[int] = np.random.default_rng(seed).integers(vocabulary_size, size=length).tolist()
    return ids
