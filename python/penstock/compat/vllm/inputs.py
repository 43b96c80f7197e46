"""vLLM's `inputs`: the forms of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict

from penstock.compat.errors import refuse

__all__ = ["PromptType", "TextPrompt", "TokensPrompt", "parse", "prompts_of"]


class _Options(TypedDict):
    multi_modal_data: NotRequired[Any]
    media_io_kwargs: NotRequired[Any]
    mm_processor_kwargs: NotRequired[Any]
    multi_modal_uuids: NotRequired[Any]
    cache_salt: NotRequired[str]


class TextPrompt(_Options):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_Options):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]
    prompt_token_offsets: NotRequired[list[tuple[int, int]] | None]


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt

_MEDIA = "images and other media are not supported yet"
#: Keys of a prompt that are refused, with the reason.
UNSUPPORTED = {
    "decoder_prompt": "encoder-decoder models are not supported",
    "encoder_prompt": "encoder-decoder models are not supported",
    "media_io_kwargs": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "multi_modal_data": _MEDIA,
    "multi_modal_uuids": _MEDIA,
    "prompt_embeds": "a prompt is text or token ids",
    "token_type_ids": "models have no types of tokens",
}


def prompts_of(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """The prompts of a call that takes one or several."""
    is_one = isinstance(prompts, (str, Mapping)) or (prompts and isinstance(prompts[0], int))
    return [prompts] if is_one else prompts  # type: ignore[list-item, return-value]


def parse(prompt: Any) -> tuple[str | None, list[int] | None, str | None]:
    """The text, the token ids and the cache salt of a prompt; one of text and ids can be `None`.

    Raises `UnsupportedError` for keys that are not supported, and `ValueError` for other forms.
    """
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, Mapping):
        for name, reason in UNSUPPORTED.items():
            if prompt.get(name):
                refuse(name, prompt[name], reason)
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None or ids is not None:
            return text, None if ids is None else list(ids), prompt.get("cache_salt")
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return None, list(prompt), None
    message = f"prompt is {prompt!r}; it must be text, token ids, a TextPrompt or a TokensPrompt"
    raise ValueError(message)
