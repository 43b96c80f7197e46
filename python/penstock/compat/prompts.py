"""Text prompts of interfaces that tokenise them before the engine reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable

#: Multiple of the longest sequence up to which the tokens of a text are counted, for the message.
_COUNTED_LENGTHS = 2


class PromptTooLongError(ValueError):
    """The text has far more tokens than a sequence can have. Only a part of it was tokenised."""


def encode_prompt(
    encode: Callable[..., list[int]], text: str, longest: int, *, name: str, **options: Any
) -> list[int]:
    """The tokens of a text, by `encode` of a tokenizer; `name` is that of the limit `longest`.

    A text that is only a little too long is tokenised. Raises `PromptTooLongError` for a longer one.
    """
    limit = _COUNTED_LENGTHS * longest
    try:
        return encode(text, max_tokens=limit, **options)
    except penstock.InvalidRequestError as error:
        if error.limit != f"at most {limit} tokens":
            raise
        message = f"the prompt has more than {limit} tokens; {name} is {longest}"
        raise PromptTooLongError(message) from error
