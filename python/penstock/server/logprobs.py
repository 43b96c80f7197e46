"""Log probabilities in the forms of OpenAI's APIs and of vLLM."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

import msgspec

import penstock
from penstock.server.choices import check_size
from penstock.server.sse import json_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Tops = Sequence[tuple[int, float]]

__all__ = [
    "TextOffsets",
    "Tokens",
    "chat_logprobs",
    "completion_logprobs",
    "prompt_logprobs",
]

#: JSON has no infinity; vLLM writes this number, too.
_LOWEST = -9999.0


class Tokens:
    """The texts and bytes of token ids.

    If a token is not UTF-8, such as a part of a character, its text is `prefix` and its bytes in hexadecimal.
    The prefix of OpenAI's completions is `bytes:`, their chats have none.
    """

    def __init__(self, engine: penstock.Engine, *, prefix: str = "", as_ids: bool = False) -> None:
        self._engine = engine
        self._prefix = prefix
        self._as_ids = as_ids
        self._found: dict[int, tuple[str, bytes]] = {}
        self._are_special: dict[int, bool] = {}

    def load(self, token_ids: Iterable[int]) -> None:
        """Find all of these at once."""
        missing = list(set(token_ids).difference(self._found))
        try:
            all_bytes = self._engine.token_bytes(missing)
        except penstock.InvalidRequestError:  # the tokenizer has words, which it joins with spaces
            decode = self._engine.decode
            all_bytes = [decode([token_id], skip_special_tokens=False).encode() for token_id in missing]
        for token_id, raw in zip(missing, all_bytes, strict=True):
            self._found[token_id] = (self._text(token_id, raw), raw)

    def _text(self, token_id: int, raw: bytes) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return self._prefix + "".join(f"\\x{byte:02x}" for byte in raw)

    def __getitem__(self, token_id: int) -> tuple[str, bytes]:
        return self._found[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether texts can omit this token."""
        found = self._are_special.get(token_id)
        if found is None:
            decode = self._engine.decode
            found = not decode([token_id]) and decode([token_id], skip_special_tokens=False) != ""
            self._are_special[token_id] = found
        return found

    def loses_space(self, token_id: int) -> bool:
        """Whether a text that begins with this token omits its first space."""
        return self[token_id][1].startswith(b" ") and not self._engine.decode([token_id]).startswith(" ")


class TextOffsets:
    """The positions of tokens in a text: for each, that of the character that it begins or continues.

    `start` is the position of the first token. The parameters decide which special tokens the text has,
    unless it is the text of a prompt.
    """

    def __init__(
        self, tokens: Tokens, params: penstock.SamplingParams, start: int = 0, prompt: str | None = None
    ) -> None:
        self._tokens = tokens
        self._skips_special_tokens = params.skip_special_tokens
        self._prompt = prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._start = self._position = start
        self._is_first = True

    def of(self, token_id: int) -> int:
        """The position of the next token."""
        raw = self._tokens[token_id][1]
        position = max(self._position, self._start)
        if self._tokens.is_special(token_id):
            is_omitted = self._skips_special_tokens
            if self._prompt is not None:
                is_omitted = not self._prompt.startswith(raw.decode(), position)
            if is_omitted:
                return position
        elif self._is_first and self._tokens.loses_space(token_id):
            self._position -= 1
        self._is_first = False
        self._position += len(self._decoder.decode(raw))
        return position


def chat_logprobs(
    tokens: Tokens, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Tops] | None
) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""
    tops = tops or [()] * len(token_ids)
    _load(tokens, token_ids, tops)
    content = (
        {**_entry(tokens, token_id, logprob), "top_logprobs": [_entry(tokens, *pair) for pair in top]}
        for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True)
    )
    return {"content": _texts(content), "refusal": None}


def _texts(values: Iterable[object]) -> list[msgspec.Raw]:
    """The JSON texts of values, which take less memory than these. Raises if they are too long."""
    texts, size = [], 0
    for value in values:
        texts.append(msgspec.Raw(json_bytes(value)))
        size += len(texts[-1])
        check_size(size, "logprobs")
    return texts


def _entry(tokens: Tokens, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = tokens[token_id]
    return {"token": text, "logprob": max(logprob, _LOWEST), "bytes": list(raw)}


def _load(tokens: Tokens, token_ids: Iterable[int], tops: Iterable[Tops | None]) -> None:
    tokens.load([*token_ids, *(token_id for top in tops for token_id, _ in top or ())])


def completion_logprobs(
    tokens: Tokens,
    offsets: TextOffsets,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Tops | None] | None,
) -> dict[str, list[Any]]:
    """The `logprobs` of a completion's choice; the first token of a text has none."""
    tops = tops or [()] * len(token_ids)
    _load(tokens, token_ids, tops)
    values = [None if logprob is None else max(logprob, _LOWEST) for logprob in logprobs]
    texts = [tokens[token_id][0] for token_id in token_ids]
    return {
        "text_offset": [offsets.of(token_id) for token_id in token_ids],
        "token_logprobs": values,
        "tokens": texts,
        "top_logprobs": _texts(
            None if value is None or top is None else {**_by_text(tokens, top), text: value}
            for text, value, top in zip(texts, values, tops, strict=True)
        ),
    }


def _by_text(tokens: Tokens, top: Tops) -> dict[str, float]:
    """The values of these tokens. If several have the same text, that of the most likely one."""
    return {tokens[token_id][0]: max(logprob, _LOWEST) for token_id, logprob in reversed(top)}


def prompt_logprobs(tokens: Tokens, result: penstock.Result, count: int) -> list[msgspec.Raw]:
    """The `prompt_logprobs` of vLLM: for each position of the prompt, the `count` best tokens by id."""
    return _texts(_positions(tokens, result, count))


def _positions(tokens: Tokens, result: penstock.Result, count: int) -> Iterator[dict[str, Any] | None]:
    known = result.prompt_top_logprobs or [None] * len(result.prompt_token_ids)  # none without top tokens
    tops = [top and top[:count] for top in known]
    _load(tokens, result.prompt_token_ids, tops)
    given = zip(result.prompt_token_ids, result.prompt_logprobs or (), tops, strict=False)
    for token_id, logprob, top in given:
        if logprob is None:
            yield None
            continue
        found: dict[int, tuple[float, int | None]]
        found = {other: (value, rank) for rank, (other, value) in enumerate(top or (), start=1)}
        found.setdefault(token_id, (logprob, None))
        yield {
            str(other): {
                "logprob": max(value, _LOWEST),
                "rank": rank,
                "decoded_token": tokens[other][0],
            }
            for other, (value, rank) in found.items()
        }
