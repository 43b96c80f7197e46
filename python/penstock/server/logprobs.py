"""Log probabilities in the forms of OpenAI's APIs and of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import penstock

if TYPE_CHECKING:
    from collections.abc import Sequence

    Tops = Sequence[tuple[int, float]]

__all__ = ["Tokens", "chat_logprobs", "completion_logprobs", "prompt_logprobs"]

#: JSON has no infinity; vLLM writes this number, too.
_LOWEST = -9999.0


class Tokens:
    """The texts and bytes of token ids."""

    def __init__(self, engine: penstock.Engine, *, as_ids: bool = False) -> None:
        self._engine = engine
        self._as_ids = as_ids

    def bytes_of(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token."""
        try:
            return self._engine.token_bytes(token_ids)
        except penstock.InvalidRequestError:  # the tokenizer has words, which it joins with spaces
            return [
                self._engine.decode([token_id], skip_special_tokens=False).encode() for token_id in token_ids
            ]

    def text(self, token_id: int, raw: bytes) -> str:
        """The text of a token of these bytes; a part of a character is U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else raw.decode(errors="replace")


def chat_logprobs(
    tokens: Tokens, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Tops] | None
) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""
    return {
        "content": [
            {**entry, "top_logprobs": _entries(tokens, tops[index] if tops else ())}
            for index, entry in enumerate(_entries(tokens, list(zip(token_ids, logprobs, strict=True))))
        ],
        "refusal": None,
    }


def _entries(tokens: Tokens, pairs: Tops) -> list[dict[str, Any]]:
    all_bytes = tokens.bytes_of([token_id for token_id, _ in pairs])
    return [
        {"token": tokens.text(token_id, raw), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}
        for (token_id, logprob), raw in zip(pairs, all_bytes, strict=True)
    ]


def completion_logprobs(
    tokens: Tokens,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Tops | None] | None,
    offset: int = 0,
) -> dict[str, Any]:
    """The `logprobs` of a completion's choice; `offset` is the position of the first token in the text."""
    texts = [
        tokens.text(token_id, raw)
        for token_id, raw in zip(token_ids, tokens.bytes_of(token_ids), strict=True)
    ]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    values = [None if logprob is None else max(logprob, _LOWEST) for logprob in logprobs]
    maps: list[dict[str, float] | None] = []
    for index, value in enumerate(values):
        top = tops[index] if tops else ()
        if value is None or top is None:
            maps.append(None)
            continue
        found = {entry["token"]: entry["logprob"] for entry in _entries(tokens, top)}
        maps.append(found | {texts[index]: value})
    return {"text_offset": offsets, "token_logprobs": values, "tokens": texts, "top_logprobs": maps}


def prompt_logprobs(tokens: Tokens, result: penstock.Result) -> list[dict[str, Any] | None] | None:
    """The `prompt_logprobs` of vLLM: for each position of the prompt, the tokens by id."""
    if result.prompt_logprobs is None or result.prompt_top_logprobs is None:
        return None
    positions: list[dict[str, Any] | None] = []
    for token_id, logprob, top in zip(
        result.prompt_token_ids, result.prompt_logprobs, result.prompt_top_logprobs, strict=False
    ):
        if logprob is None:
            positions.append(None)
            continue
        ranks = {found: rank for rank, (found, _) in enumerate(top or (), start=1)}
        pairs = dict(top or ()) | {token_id: logprob}
        positions.append(
            {
                str(found): {
                    "logprob": entry["logprob"],
                    "rank": ranks.get(found),
                    "decoded_token": entry["token"],
                }
                for found, entry in zip(pairs, _entries(tokens, list(pairs.items())), strict=True)
            }
        )
    return positions
