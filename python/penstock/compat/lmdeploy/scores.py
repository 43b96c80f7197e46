"""`get_ppl` and `get_logits`: one pass over token ids, without generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import penstock
from penstock.compat.lmdeploy.checks import check_arguments, refuse, token_ids
from penstock.compat.lmdeploy.outputs import to_torch, torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.compat.lmdeploy.engine_context import EngineContext

__all__ = ["logits", "mean_cross_entropies"]


def _token_lists(input_ids: Any, min_tokens: int, vocab_size: int) -> list[list[int]]:
    """The token ids of each text; `input_ids` are those of one text or of several."""
    given = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids
    if not isinstance(given, (list, tuple)) or not given:
        refuse("input_ids", input_ids, "a list of token ids, or a list of such lists")
    is_single = not isinstance(given[0], (list, tuple)) and not hasattr(given[0], "tolist")
    texts = []
    for index, ids in enumerate([given] if is_single else given):
        name = "input_ids" if is_single else f"input_ids[{index}]"
        tokens = token_ids(name, ids)
        for position, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                refuse(f"{name}[{position}]", token, f"a token id from 0 to {vocab_size - 1}")
        if len(tokens) < min_tokens:
            refuse(name, ids, f"a list of at least {min_tokens} token ids")
        texts.append(tokens)
    return texts


def mean_cross_entropies(context: EngineContext, input_ids: Any, adapter: str | None = None) -> list[float]:
    """For each text the mean of the negative log probabilities of all tokens but the first.

    A text longer than `session_len` is computed in windows of this width. Each begins half of it after the
    one before, and counts the tokens that no window before it had.
    """
    context.check_open()
    check_arguments(adapter_name=adapter)
    engine, width = context.engine, context.session_len
    texts = _token_lists(input_ids, 2, engine.info.vocabulary_size)
    windows = [
        (index, num_counted, ids[begin:end])
        for index, ids in enumerate(texts)
        for begin, end, num_counted in _windows(len(ids), width)
    ]
    totals = [0.0] * len(texts)
    for (index, num_counted, _), logprobs in zip(
        windows, _scores(engine, [ids for *_, ids in windows], width, adapter), strict=True
    ):
        totals[index] -= sum(logprob for logprob in logprobs[-num_counted:] if logprob is not None)
    return [total / (len(ids) - 1) for total, ids in zip(totals, texts, strict=True)]


def _windows(length: int, width: int) -> Iterator[tuple[int, int, int]]:
    """The begin, the end and the number of counted tokens of each window."""
    end = 0
    for begin in range(0, length, max(width // 2, 1)):
        num_counted, end = min(begin + width, length) - end, min(begin + width, length)
        yield begin, end, num_counted
        if end == length:
            break


def _scores(
    engine: penstock.Engine, texts: Sequence[Sequence[int]], width: int, adapter: str | None
) -> list[Sequence[float | None]]:
    """The log probabilities of the tokens of each text. Texts below `width` are computed together."""
    found: list[Any] = [None] * len(texts)
    short = [index for index, ids in enumerate(texts) if len(ids) < width]
    params = penstock.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, adapter=adapter)
    for index, result in zip(short, _results(engine, [texts[index] for index in short], params), strict=True):
        found[index] = result.prompt_logprobs
    for index, ids in enumerate(texts):
        if found[index] is None:  # no token can be generated after a text of `width` tokens
            found[index] = engine.blocking.score(ids, adapter=adapter).logprobs
    return found


def logits(context: EngineContext, input_ids: Any, adapter: str | None = None) -> Any:
    """The logits of all positions: `(texts, tokens of the longest text, vocabulary)`; zeros follow a text."""
    context.check_open()
    check_arguments(adapter_name=adapter)
    texts = _token_lists(input_ids, 1, context.engine.info.vocabulary_size)
    package = torch()
    params = penstock.SamplingParams(
        max_tokens=1, temperature=0.0, output_logits="prompt", use_prefix_cache=False, adapter=adapter
    )
    rows = []
    for result in _results(context.engine, texts, params):
        if result.logits is None:
            message = "a result has no logits; this is a bug in penstock"
            raise AssertionError(message)
        rows.append(to_torch(result.logits))
    return package.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _results(
    engine: penstock.Engine, texts: Sequence[Sequence[int]], params: penstock.SamplingParams
) -> Iterator[penstock.Result]:
    """The results of all texts, which are computed together. Raises the error of the first that fails."""
    with engine.blocking.generate_many(texts, params) as batch:
        for item in batch:
            if item.result is None:
                raise item.error or AssertionError("a prompt has no result; this is a bug in penstock")
            yield item.result
