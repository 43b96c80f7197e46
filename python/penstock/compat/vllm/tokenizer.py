"""The tokenizer that `get_tokenizer` returns: transformers' methods that programs for vLLM call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import penstock

__all__ = ["Tokenizer"]


class Tokenizer:
    """A tokenizer with the names and defaults of transformers; `model` is Penstock's."""

    def __init__(self, model: penstock.Tokenizer) -> None:
        self.model = model

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

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return self.model.encode(text, add_special_tokens=add_special_tokens)

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> dict[str, Any]:
        """The token ids of a text, or a list of them for several texts, as `input_ids`."""
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}
        return {"input_ids": [self.encode(one, add_special_tokens=add_special_tokens) for one in text]}

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.model.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them."""
        return self.model.token_names(ids)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """The token ids of a chat, or its text with `tokenize=False`; a list of them for several chats.

        Other keywords are variables of the template. Raises `penstock.InvalidRequestError` if the model has
        no template or it rejects the messages.
        """
        if conversation and not isinstance(conversation[0], Mapping):
            shared = (
                tools,
                documents,
                chat_template,
                add_generation_prompt,
                continue_final_message,
                tokenize,
            )
            return [self.apply_chat_template(one, *shared, **variables) for one in conversation]
        text = self.model.apply_chat_template(
            conversation,
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt or (None if continue_final_message else False),
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text
