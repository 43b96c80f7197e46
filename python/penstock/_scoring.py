"""Scores of texts: log probabilities and perplexity from the result of a scoring request."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock._core import Score
from penstock.errors import EngineStoppedError, GenerationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._core import Result

__all__ = ["score_of"]


def score_of(result: Result) -> Score:
    """The score of the prompt, from its log probabilities.

    Raises `EngineStoppedError` if the engine was closed before the prompt was scored, and `GenerationError`
    if only a part of the prompt was scored.
    """
    if result.finish_reason == "cancelled":
        message = "the engine was closed before the text was scored"
        raise EngineStoppedError(message)
    logprobs, num_tokens = result.prompt_logprobs or (), len(result.prompt_token_ids)
    if result.finish_reason != "length" or len(logprobs) != num_tokens:
        message = f"{result.finish_reason}: {len(logprobs)} of the text's {num_tokens} tokens were scored"
        raise GenerationError(message)
    known = [logprob for logprob in logprobs if logprob is not None]
    return Score(token_ids=result.prompt_token_ids, logprobs=logprobs, perplexity=_perplexity(known))


def _perplexity(logprobs: Sequence[float]) -> float | None:
    """The perplexity; `None` without log probabilities, as for a text of one token."""
    if not logprobs:
        return None
    try:
        return math.exp(-math.fsum(logprobs) / len(logprobs))
    except OverflowError:
        return math.inf
