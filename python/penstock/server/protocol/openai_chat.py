"""`/v1/chat/completions`: the fields that are not sampling parameters."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.server.protocol.template import TemplateFields

__all__ = ["ChatRequest", "StreamOptions"]


class StreamOptions(msgspec.Struct):
    """`stream_options`, with vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False


class ChatRequest(TemplateFields):
    """A chat request; `null` equals an omitted field. A text is one message of the user."""

    messages: str | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=1 << 14)]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Any = None
    logprobs: bool = False
    top_logprobs: int | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    include_reasoning: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
