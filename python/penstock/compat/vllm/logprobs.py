"""vLLM's `logprobs`: `Logprob`, and the log probabilities of Penstock in that form."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import penstock

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Logprob", "LogprobsOnePosition", "positions"]


@dataclasses.dataclass
class Logprob:
    """The log probability of a token, its rank from 1, and its text.

    The rank of a token that is not one of the most likely ones that were asked for is `None`.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: The log probabilities of tokens at one position, by token id; that of the chosen token is the first.
LogprobsOnePosition = dict[int, Logprob]


def positions(
    tokenizer: penstock.Tokenizer | None,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Sequence[tuple[int, float]] | None] | None,
) -> list[LogprobsOnePosition | None]:
    """The log probabilities at each position; `None` for the first token of a prompt.

    Without a tokenizer, tokens have no texts.
    """
    found: list[LogprobsOnePosition | None] = []
    for token_id, logprob, top in zip(token_ids, logprobs, tops or [()] * len(logprobs), strict=False):
        if logprob is None:
            found.append(None)
            continue
        position: LogprobsOnePosition = {token_id: Logprob(logprob)}
        for rank, (other, value) in enumerate(top or (), start=1):
            position[other] = Logprob(value, rank)
        found.append(position)
    if tokenizer is not None:
        ids = list({token_id for entries in found for token_id in entries or ()})
        texts = dict(zip(ids, _texts(tokenizer, ids), strict=True))
        for entries in found:
            for token_id, entry in (entries or {}).items():
                entry.decoded_token = texts[token_id]
    return found


def _texts(tokenizer: penstock.Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text of each token; a part of a character is U+FFFD."""
    try:
        return [raw.decode(errors="replace") for raw in tokenizer.token_bytes(token_ids)]
    except penstock.InvalidRequestError:  # tokens are words, not bytes
        return [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids]
