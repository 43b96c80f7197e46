"""`/v1/responses`: the fields that are not sampling parameters."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.server.protocol.template import TemplateFields

__all__ = ["FunctionTool", "Item", "Part", "Reasoning", "ResponsesRequest", "Text", "TextFormat"]

_MAX_ITEMS = msgspec.Meta(max_length=1 << 14)
_Label = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]


class Part(msgspec.Struct):
    """A part of the content of an item, with the fields of all types."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    """An item of the input, with the fields of all types. `arguments` can be anything that a model writes."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | Annotated[list[Part], _MAX_ITEMS] | None = None
    summary: Annotated[list[Part], _MAX_ITEMS] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    output: str | Annotated[list[Part], _MAX_ITEMS] | None = None


class FunctionTool(msgspec.Struct):
    """A tool that the client runs."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    ignore_unsupported: bool | None = None


class TextFormat(msgspec.Struct):
    """The format of the text of the output."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    ignore_unsupported: bool | None = None


class Text(msgspec.Struct):
    """The text of the output."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    """The reasoning before the output."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesRequest(TemplateFields, kw_only=True):
    """A request for a response; `null` equals an omitted field."""

    input: str | Annotated[list[Item], msgspec.Meta(min_length=1, max_length=1 << 14)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    include: Annotated[list[str], msgspec.Meta(max_length=64)] | None = None
    max_output_tokens: Any = None
    max_tool_calls: int | None = None
    metadata: Annotated[dict[_Label, _Value], msgspec.Meta(max_length=16)] | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: Text | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=128)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    truncation: str = "disabled"
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
