"""`Tokenizer`: LMDeploy's methods of a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import penstock

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

__all__ = ["Tokenizer"]


class Tokenizer:
    """The tokenizer of a model.

        tokenizer = Tokenizer("internlm/internlm-chat-7b")
        token_ids = tokenizer.encode("Hi, pls intro yourself")

    `model_path` is a model as `pipeline` takes it, or a `penstock.Tokenizer`. Raises
    `penstock.ModelLoadError` if the model does not exist or has no tokenizer.
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

    def encode(self, s: str, add_bos: bool = True, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; with `add_bos=False` without the token that begins a text."""
        ids = self.model.encode(s, add_special_tokens=add_special_tokens)
        if not add_bos and ids and ids[0] == self.bos_token_id:
            return ids[1:]
        return ids

    def decode(self, t: Sequence[int], offset: int | None = None, skip_special_tokens: bool = True) -> str:
        """The text of token ids, from position `offset`."""
        return self.model.decode(list(t)[offset:], skip_special_tokens=skip_special_tokens)

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token with this text, or `None`."""
        ids = self.model.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and not self.model.decode(ids) else None
