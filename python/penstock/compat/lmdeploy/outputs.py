"""The outputs of a request: chunks without stop tokens and parts of characters, and tensors of torch."""

from __future__ import annotations

import codecs
import importlib
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import penstock
from penstock._install import missing_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.compat.lmdeploy.generation_config import GenerationConfig
    from penstock.compat.lmdeploy.tokenizer import Tokenizer

__all__ = ["Part", "Reader", "joined", "to_torch", "torch"]

#: Number of ids after which `Reader` begins to decode at a later one, at least `_TAIL` ids before the last.
_WINDOW = 32
_TAIL = 16
#: Most bytes of a character in UTF-8.
_MAX_CHAR_BYTES = 4


class Part(NamedTuple):
    """A part of an output, for an item."""

    text: str
    ids: list[int]
    logprobs: list[dict[int, float]] | None
    logits: Any
    hidden_states: Any


class Reader:
    """Makes LMDeploy's outputs of chunks: without the stop token and without a part of a character.

    The parts do not depend on how the tokens are divided into chunks: beside stop strings, a token is held
    until its text is returned. A token in which the stop string begins is left out.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: GenerationConfig, params: penstock.SamplingParams
    ) -> None:
        self._tokenizer = tokenizer.model
        self._decode = partial(
            self._tokenizer.decode,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._keeps_stop = config.include_stop_str_in_output
        self._has_stop_strings = bool(params.stop or params.stop_token_sequences) and not self._keeps_stop
        self._logprobs: list[dict[int, float]] | None = [] if params.logprobs else None
        self._logits: Any = None  # rows that were not returned
        self._hidden_states: Any = None
        self.ids: list[int] = []  # those that have arrived
        self.num_returned = 0
        self._num_chars = 0  # of the returned text
        self._first = 0  # where `_num_within` begins to decode
        self._num_chars_before = 0  # `_first`
        self._next_first = 0
        #: Whether a chunk that is not the last one is an item as it is.
        self.is_plain = not (
            self._has_stop_strings
            or params.logprobs
            or params.output_logits is not None
            or params.output_hidden_states is not None
        )

    def read(self, chunk: penstock.Chunk) -> Part | None:
        """The part of a chunk that is not the last one; `None` if all of it is held."""
        self._add(chunk)
        if not self._has_stop_strings:
            return self._part(chunk.text, len(self.ids))
        return self._part(chunk.text, self._num_within()) if chunk.text else None

    def read_last(self, chunk: penstock.Chunk | penstock.Result) -> tuple[Part, int]:
        """The part of the last chunk or of a complete result, and the number of ids before the stop."""
        self._add(chunk)
        text, stop, end = chunk.text, chunk.stop_reason, len(self.ids)
        if isinstance(stop, str):
            end = self._num_before(stop) if self._keeps_stop else self._num_within()
        else:
            end -= 0 if stop is None else 1 if isinstance(stop, int) else len(stop)
            end = max(end, self.num_returned)
            text = self._without_partial(text, end)
        return self._part(text, len(self.ids) if self._keeps_stop else end, is_last=True), end

    def _add(self, chunk: penstock.Chunk | penstock.Result) -> None:
        self.ids += chunk.token_ids
        self._num_chars += len(chunk.text)
        if self._logprobs is not None:
            self._logprobs += _logprobs(chunk)
        if chunk.logits is not None:
            self._logits = joined(self._logits, to_torch(chunk.logits))
        if chunk.hidden_states is not None:
            self._hidden_states = joined(self._hidden_states, to_torch(chunk.hidden_states))

    def _part(self, text: str, end: int, *, is_last: bool = False) -> Part:
        """The part with the ids up to `end`."""
        ids, num_held = self.ids[self.num_returned : end], len(self.ids) - end
        self.num_returned = end
        logprobs = self._logprobs
        if logprobs is not None:
            logprobs, self._logprobs = logprobs[: len(ids)], logprobs[len(ids) :]
        logits, self._logits = _split(self._logits, num_held)
        states, self._hidden_states = _split(self._hidden_states, num_held)
        if is_last:
            self._logits = self._hidden_states = None
        return Part(text, ids, logprobs, logits, states)

    def _num_within(self) -> int:
        """The number of ids that decode to a part of the text that has arrived."""
        num_chars = self._num_chars - self._num_chars_before
        end = _num_within(self._decode, self.ids, self._first, num_chars, self.num_returned)
        if end >= self._next_first + _WINDOW:
            self._move(end)
        return end

    def _move(self, end: int) -> None:
        """Decode later ids from `_next_first` on, and after the next move from a place before `end` on."""
        text = self._decode(self.ids[self._next_first : end])
        for place in range(end - _TAIL, end - _TAIL - _MAX_CHAR_BYTES, -1):
            if self._is_between_characters(place, end, text):
                num_chars = self._num_chars_before + len(self._decode(self.ids[self._first : end]))
                self._first, self._num_chars_before = self._next_first, num_chars - len(text)
                self._next_first = place
                return

    def _is_between_characters(self, place: int, end: int, text: str) -> bool:
        """Whether no character contains the place in `text`, that of the ids from `_next_first` to `end`.

        The text of the two parts shows it, if enough follows. A decoder can remove a space at the start.
        """
        start = self._decode(self.ids[self._next_first : place])
        rest = self._decode(self.ids[place:end])
        return (
            len(rest) >= _MAX_CHAR_BYTES
            and text.startswith(start)
            and text[len(start) :].lstrip() == rest.lstrip()
        )

    def _num_before(self, stop: str) -> int:
        """The number of ids before a stop string that is a part of the output, as without it."""
        first = len(self._decode(self.ids[:-1])) - len(stop) + 1  # the last token completes it
        start = self._decode(self.ids).find(stop, max(first, 0))
        return len(self.ids) if start < 0 else _num_within(self._decode, self.ids, 0, start, 0)

    def _without_partial(self, text: str, end: int) -> str:
        """The text without what stands for a part of a character that the first `end` ids end with."""
        if not text.endswith("\ufffd"):
            return text
        try:
            tokens = self._tokenizer.token_bytes(self.ids[max(end - 4, 0) : end])
        except penstock.InvalidRequestError:  # tokens are words, not bytes
            return text
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(tokens))
        num_bytes = len(decoder.getstate()[0])
        if not num_bytes:
            return text
        if any(len(token) != 1 for token in tokens[-num_bytes:]):
            return text[:-1]
        # With byte fallback, complete characters before the part can be U+FFFD, too.
        start = len(self._decode(self.ids[:end])) - len(text)
        return self._decode(self.ids[: end - num_bytes])[start:]


def _num_within(
    decode: Callable[[Sequence[int]], str], ids: list[int], first: int, num_chars: int, low: int
) -> int:
    """The number of ids, at least `low`, that decode to `num_chars` characters or fewer from `first` on."""
    text = decode(ids[first:])
    wanted, end = text[:num_chars], len(ids)
    while end > low:
        shorter = decode(ids[first : end - 1])
        if not shorter.startswith(wanted):
            return end if text == wanted else end - 1
        end, text = end - 1, shorter
    return end


def _logprobs(chunk: penstock.Chunk | penstock.Result) -> list[dict[int, float]]:
    """For each token the log probabilities of the most likely ones and its own."""
    logprobs = chunk.logprobs or ()
    most = chunk.top_logprobs or ((),) * len(logprobs)
    return [
        {**dict(top), token: logprob}
        for token, logprob, top in zip(chunk.token_ids, logprobs, most, strict=True)
    ]


def _split(rows: Any, num_held: int) -> tuple[Any, Any]:
    """The rows without the last ones, and these; `None` for no rows."""
    if rows is None or not num_held:
        return rows, None
    num_rows = max(len(rows) - num_held, 0)
    return (rows[:num_rows] if num_rows else None), rows[num_rows:]


def joined(rows: Any, others: Any) -> Any:
    """The rows of two tensors, each of which can be `None`."""
    if rows is None or others is None:
        return others if rows is None else rows
    return torch().cat([rows, others])


def to_torch(tensor: penstock.Tensor) -> Any:
    """The values as a float32 tensor of torch, which has memory of its own."""
    return torch().from_dlpack(_Copied(tensor))


class _Copied:
    """A tensor that is exported as a copy, which can be written to."""

    def __init__(self, tensor: penstock.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: object) -> Any:
        return self._tensor.__dlpack__(copy=True)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()


def torch() -> Any:
    """The package torch; raises `ImportError` with the command that installs it."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        message = missing_extra("a result with logits or hidden states", "torch", "lmdeploy")
        raise ImportError(message) from error
