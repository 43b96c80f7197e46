"""`/v1/completions`: the fields that are not sampling parameters."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.server.protocol.openai_chat import StreamOptions  # noqa: TC001 - read at run time

__all__ = ["CompletionRequest"]


class CompletionRequest(msgspec.Struct):
    """A completion request; `null` equals an omitted field."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def only_scores(self) -> bool:
        """Whether the response has the prompt and no output."""
        return self.echo and not self.stream and type(self.max_tokens) is int and self.max_tokens == 0
