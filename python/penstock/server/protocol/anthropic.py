"""`/v1/messages` and `/v1/messages/count_tokens`: the fields that are not sampling parameters."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

__all__ = [
    "Block",
    "ContextManagement",
    "CountRequest",
    "Edit",
    "Message",
    "MessagesRequest",
    "OutputConfig",
    "Thinking",
    "Tool",
    "ToolChoice",
]

_MAX_ITEMS = msgspec.Meta(max_length=65536)


class Block(msgspec.Struct):
    """A content block, with the fields of all types. `input` can be anything that a model writes."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], _MAX_ITEMS] | None = None
    is_error: bool | None = None


class Message(msgspec.Struct):
    """A message of the user, the assistant or the system."""

    role: str
    content: str | Annotated[list[Block], _MAX_ITEMS]


class Tool(msgspec.Struct):
    """A tool that the client runs."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    ignore_unsupported: bool | None = None


class ToolChoice(msgspec.Struct):
    """Tools that the model must or can call."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model thinks before it answers, and whether the message shows it."""

    type: str
    display: str | None = None


class OutputConfig(msgspec.Struct):
    """The format of the output, and the effort of the model."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class Threshold(msgspec.Struct):
    """A number of tokens, tool uses or turns."""

    type: str
    value: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Edit(msgspec.Struct):
    """An edit of the context, with the fields of all types."""

    type: str
    keep: str | Threshold | None = None
    trigger: Threshold | None = None
    clear_at_least: Threshold | None = None
    clear_tool_inputs: bool | list[str] | None = None
    exclude_tools: list[str] | None = None
    instructions: str | None = None
    pause_after_compaction: bool | None = None


class ContextManagement(msgspec.Struct):
    """Edits that a server may make before the model reads the messages."""

    edits: Annotated[list[Edit], msgspec.Meta(max_length=64)] | None = None


class CountRequest(msgspec.Struct):
    """The fields that make the prompt; `null` equals an omitted field."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=65536)]
    model: str | None = None
    system: str | Annotated[list[Block], _MAX_ITEMS] | None = None
    tools: Annotated[list[Tool], _MAX_ITEMS] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """A request for a message."""

    max_tokens: Any
    stop_sequences: list[str] | None = None
    #: The former name of the format in `output_config`.
    output_format: dict[str, Any] | None = None
    stream: bool = False
