"""`lmdeploy.tokenizer`: LMDeploy's methods of a tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING

import penstock

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

__all__ = ["DetokenizeState", "Encoding", "Tokenizer"]

logger = logging.getLogger("penstock.lmdeploy")

_MAX_INDEXES = 5
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass
class DetokenizeState:
    """The state of `Tokenizer.detokenize_incrementally`: positions in the token ids.

    `ids_offset` is the number of ids before the output, or of ids that were passed; the text of the ids
    before `read_offset` has been returned, and decoding begins at `prefix_offset`.
    """

    ids_offset: int = 0
    prev_tokens: list[str] | None = None
    prefix_offset: int = 0
    read_offset: int = 0

    def as_tuple(self) -> tuple[int, list[str] | None, int, int]:
        """The fields."""
        return self.ids_offset, self.prev_tokens, self.prefix_offset, self.read_offset


class Encoding(dict[str, "list[int] | list[list[int]]"]):
    """The token ids of a text, or of several: `input_ids`."""

    @property
    def input_ids(self) -> list[int] | list[list[int]]:
        """The token ids of the text, or a list for each text."""
        return self["input_ids"]


class Tokenizer:
    """The tokenizer of a model.

        tokenizer = Tokenizer("internlm/internlm-chat-7b")
        token_ids = tokenizer.encode("Hi, pls intro yourself")

    `model_path` is a model as `pipeline` takes it, or a `penstock.Tokenizer`, which is the attribute `model`.
    Raises `penstock.ModelLoadError` if the model does not exist or has no tokenizer.
    """

    def __init__(
        self, model_path: str | os.PathLike[str] | penstock.Tokenizer, trust_remote_code: bool = False
    ) -> None:
        if not isinstance(model_path, penstock.Tokenizer):
            model_path = penstock.Tokenizer(model_path)
        self.model = model_path

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, or `None`."""
        return self.model.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The first of the model's end tokens, or `None`."""
        return next(iter(self.model.eos_token_ids), None)

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.model.vocabulary_size

    def get_vocab(self) -> dict[str, int]:
        """The smallest id of each text of a token; bytes that are not UTF-8 are escaped."""
        texts = self.model.token_bytes(range(self.vocab_size))
        vocabulary: dict[str, int] = {}
        for token, text in enumerate(texts):
            vocabulary.setdefault(text.decode(errors="backslashreplace"), token)
        return vocabulary

    def encode(
        self,
        s: str,
        add_bos: bool = True,
        add_special_tokens: bool = True,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The token ids of a text.

        `add_special_tokens` adds the tokens that begin or end a text. With `add_bos=False`, which continues
        a text, there is no token that begins one. If `s` begins with that token, it is not added.
        `max_tokens` is that of `penstock.Tokenizer.encode`.
        """
        ids = self.model.encode(s, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        bos = self.bos_token_id
        if bos is None:
            return ids
        if ids[:2] == [bos, bos] or (not add_bos and ids[:1] == [bos]):
            del ids[0]
        return ids

    def decode(self, t: Sequence[int], offset: int | None = None, skip_special_tokens: bool = True) -> str:
        """The text of the token ids from position `offset`."""
        return self.model.decode(_integers(t)[offset:], skip_special_tokens=skip_special_tokens)

    def detokenize_incrementally(
        self,
        all_input_ids: Sequence[int],
        state: DetokenizeState,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> tuple[str, DetokenizeState]:
        """The text of the ids after those of the last call, and the state for the next call.

        `all_input_ids` are the ids of the last call and the new ones; in the first call, the first
        `state.ids_offset` ids are a prompt; its text is not returned. A part of a character at the end is
        withheld until the character is complete. Special tokens are not separated by spaces.
        """
        ids = _integers(all_input_ids)
        offset, started, prefix, read = state.as_tuple()
        if started is None:
            read = offset
        known = self.model.decode(ids[prefix:read], skip_special_tokens=skip_special_tokens)
        text = self.model.decode(ids[prefix:], skip_special_tokens=skip_special_tokens)
        if len(text) <= len(known) or text.endswith(_REPLACEMENT):
            return "", DetokenizeState(len(ids), [], prefix, read)
        return text[len(known) :], DetokenizeState(len(ids), [], read, len(ids))

    def __call__(self, s: str | Iterable[str]) -> Encoding:
        """The token ids of a text, or of several, without special tokens that begin or end them."""
        if isinstance(s, str):
            return Encoding(input_ids=self.model.encode(s, add_special_tokens=False))
        return Encoding(input_ids=[self.model.encode(text, add_special_tokens=False) for text in s])

    def indexes_containing_token(self, token: str) -> list[int]:
        """The ids of the tokens with `token` in their text.

        If there are more than 5, those with exactly this text, at most 5. Empty for a text of several tokens.
        """
        if len(self.encode(token, add_bos=False)) > 1:
            logger.warning("the text %r has several tokens; no token contains it", token)
            return []
        indexes = [index for index, text in enumerate(self._texts) if token in text]
        if len(indexes) > _MAX_INDEXES:
            indexes = [index for index in indexes if self._texts[index] == token][:_MAX_INDEXES]
        return indexes

    @functools.cached_property
    def special_token_ids(self) -> tuple[int, ...]:
        """The ids of all special tokens."""
        return tuple(token for token in range(self.vocab_size) if self.is_special(token))

    def is_special(self, token: int) -> bool:
        """Whether a token is not part of texts, such as an end token."""
        return not self.model.decode([token]) and bool(self.model.decode([token], skip_special_tokens=False))

    @functools.cached_property
    def _texts(self) -> list[str]:
        decode = self.model.decode
        return [decode([token], skip_special_tokens=False) for token in range(self.vocab_size)]


def _integers(token_ids: Iterable[int]) -> list[int]:
    """Token ids as integers; elements of a tensor are objects."""
    return [int(token) for token in token_ids]
