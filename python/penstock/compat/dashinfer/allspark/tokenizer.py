"""The tokenizer of a loader, with the methods of a Hugging Face tokenizer that DashInfer's documents call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import penstock
from penstock._shown import shown

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["LoaderTokenizer"]

#: Keywords of Hugging Face's `apply_chat_template` that change the token ids it returns.
_TOKEN_KEYWORDS = (
    "return_tensors",
    "return_dict",
    "padding",
    "truncation",
    "max_length",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)


class _Tensor(Protocol):
    def tolist(self) -> Any: ...


class LoaderTokenizer:
    """A tokenizer with Hugging Face's method names and defaults, without transformers."""

    def __init__(self, model: str | os.PathLike[str], padding_side: str = "left") -> None:
        self._tokenizer = penstock.Tokenizer(model)
        self.padding_side = padding_side

    @property
    def eos_token_id(self) -> int | None:
        """The model's first end token."""
        return next(iter(self._tokenizer.eos_token_ids), None)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        return self._tokenizer.bos_token_id

    @property
    def eos_token(self) -> str | None:
        """The text of `eos_token_id`."""
        return None if self.eos_token_id is None else self.decode([self.eos_token_id])

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self._tokenizer.vocabulary_size

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """`input_ids` and `attention_mask` of a text, or lists of them for several texts.

        Other keywords, such as `return_tensors` and `padding`, must be `None` or `False`, else `ValueError`
        is raised: token ids are lists without padding and truncation.
        """
        _refuse_token_keywords(kwargs)
        ids: Any
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        ids = [self.encode(item, add_special_tokens) for item in text]
        return {"input_ids": ids, "attention_mask": [[1] * len(item) for item in ids]}

    def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None, **kwargs: Any
    ) -> list[int]:
        """The token ids of a text; `add_special_tokens` adds those that begin or end a prompt.

        `max_tokens` is that of `penstock.Tokenizer.encode`. Other keywords must be `None` or `False`.
        """
        _refuse_token_keywords(kwargs)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)

    def decode(
        self,
        token_ids: int | Iterable[int] | _Tensor,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """The text of token ids: one id, a sequence, or a tensor of one dimension.

        `clean_up_tokenization_spaces=True` raises `ValueError`: the text is that of the tokens.
        """
        if clean_up_tokenization_spaces:
            message = (
                f"clean_up_tokenization_spaces is {shown(clean_up_tokenization_spaces)}; "
                "it must be False or None: the text is that of the tokens"
            )
            raise ValueError(message)
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self,
        sequences: Iterable[Any],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """The text of each sequence, as `decode` returns it."""
        return [self.decode(ids, skip_special_tokens, clean_up_tokenization_spaces) for ids in sequences]

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        chat_template: str | None = ...,
        add_generation_prompt: bool = ...,
        continue_final_message: bool = ...,
        tokenize: Literal[False],
        **kwargs: Any,
    ) -> str: ...
    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        chat_template: str | None = ...,
        add_generation_prompt: bool = ...,
        continue_final_message: bool = ...,
        tokenize: Literal[True] = ...,
        **kwargs: Any,
    ) -> list[int]: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """The text of a chat with the model's template, or its token ids with `tokenize`.

        `chat_template` is the name of one of the model's templates, or a template. Other keywords are
        variables of the template, except `return_tensors`, `return_dict`, `padding`, `truncation`,
        `max_length`, `return_assistant_tokens_mask` and `tokenizer_kwargs`: with `tokenize` they must be
        `None` or `False`, else `ValueError` is raised; without it they have no effect.
        """
        token_options = {name: kwargs.pop(name) for name in _TOKEN_KEYWORDS if name in kwargs}
        if tokenize:
            _refuse_token_keywords(token_options)
        text = self._tokenizer.apply_chat_template(
            conversation,
            tools=tools,
            chat_template=chat_template or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=kwargs or None,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _refuse_token_keywords(options: Mapping[str, Any]) -> None:
    """Raise `ValueError` for keywords that would change the token ids, and for unknown ones."""
    for name, value in options.items():
        if value is not None and value is not False:
            message = (
                f"{name} is {shown(value)}; it must be None or False: "
                "the token ids are a list without padding and truncation"
            )
            raise ValueError(message)
