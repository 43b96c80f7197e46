"""How likely a model finds a text: the log probability of each of its tokens after those before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from penstock._core import Result

__all__ = ["Score"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A text as the model sees it, and how likely it is.

    - `token_ids`: its tokens.
    - `logprobs`: the natural logarithm of each token's probability after those before it, under the model
      itself; `None` for the first, which follows nothing. To the bit what `logprobs=True` reports where the
      model has generated these tokens.
    - `perplexity`: the exponential of the negated mean of the logprobs; `None` for a single token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    perplexity: float | None

    @classmethod
    def of(cls, result: Result) -> Self:
        """The score of the prompt of a request that generated nothing."""
        logprobs = result.prompt_logprobs or ()
        known = [logprob for logprob in logprobs if logprob is not None]
        perplexity = _perplexity(known) if known else None
        return cls(token_ids=result.prompt_token_ids, logprobs=logprobs, perplexity=perplexity)


def _perplexity(logprobs: list[float]) -> float:
    try:
        return math.exp(-math.fsum(logprobs) / len(logprobs))
    except OverflowError:
        return math.inf
