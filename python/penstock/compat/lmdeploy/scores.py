"""`get_ppl` and `get_logits`: one pass over token ids, without generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import penstock
from penstock.compat.lmdeploy.checks import refuse
from penstock.compat.lmdeploy.outputs import to_torch, torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["logits", "mean_cross_entropy", "token_lists"]


def token_lists(input_ids: Any, min_tokens: int) -> list[list[int]]:
    """The token ids of each text; `input_ids` are those of one text or of several."""
    given = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids
    if not isinstance(given, (list, tuple)) or not given:
        refuse("input_ids", input_ids, "a list of token ids, or a list of such lists")
    lists = given if isinstance(given[0], (list, tuple)) or hasattr(given[0], "tolist") else [given]
    texts = []
    for ids in lists:
        tokens = ids.tolist() if hasattr(ids, "tolist") else ids
        is_list = isinstance(tokens, (list, tuple))
        if not is_list or not all(isinstance(token, int) for token in tokens):
            refuse("input_ids", ids, "a list of token ids, or a list of such lists")
        if len(tokens) < min_tokens:
            refuse("input_ids", ids, f"lists of at least {min_tokens} token ids")
        texts.append(list(tokens))
    return texts


def mean_cross_entropy(engine: penstock.Engine, ids: Sequence[int], width: int) -> float:
    """The mean of the negative log probabilities of all tokens but the first.

    A text longer than `width` is computed in windows of `width` tokens. Each begins half of `width` after the
    one before, and counts the tokens that no window before it had.
    """
    total, end = 0.0, 0
    for begin in range(0, len(ids), max(width // 2, 1)):
        num_counted, end = min(begin + width, len(ids)) - end, min(begin + width, len(ids))
        score = engine.blocking.score(ids[begin:end])
        total -= sum(logprob for logprob in score.logprobs[-num_counted:] if logprob is not None)
        if end == len(ids):
            break
    return total / (len(ids) - 1)


def logits(engine: penstock.Engine, texts: Sequence[Sequence[int]]) -> Any:
    """The logits of all positions: `(texts, tokens of the longest text, vocabulary)`; zeros follow a text."""
    package = torch()
    params = penstock.SamplingParams(
        max_tokens=1, temperature=0.0, output_logits="prompt", use_prefix_cache=False
    )
    rows = []
    for ids in texts:
        tensor = engine.blocking.generate(ids, params).logits
        if tensor is None:
            message = "a result has no logits; this is a bug in penstock"
            raise AssertionError(message)
        rows.append(to_torch(tensor))
    return package.nn.utils.rnn.pad_sequence(rows, batch_first=True)
