"""Anthropic's requests as messages, template options and sampling parameters of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.server.errors import ApiError, invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.server.protocol.anthropic import Block, CountRequest, MessagesRequest, Tool, ToolChoice

__all__ = ["chat_messages", "chat_tools", "check_edits", "sampling_fields", "template_variables"]

#: The block types of each role. Blocks of redacted thinking are accepted and have no effect.
_TYPES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_THINKING = ("adaptive", "between_tools", "disabled", "enabled")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_messages(request: CountRequest) -> list[dict[str, Any]]:
    """The messages in the form of chat templates, with the system prompt as the first one."""
    found: list[dict[str, Any]] = []
    if request.system is not None:
        found.append({"role": "system", "content": _text(request.system, "system")})
    for index, message in enumerate(request.messages):
        field = f"messages[{index}]"
        if message.role not in _TYPES:
            raise invalid(f"{field}.role", message.role, "user, assistant or system")
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
            continue
        blocks = message.content
        _check_types(blocks, f"{field}.content", _TYPES[message.role])
        if message.role == "assistant":
            found.append(_assistant(blocks, f"{field}.content"))
        elif message.role == "system":
            found.append({"role": "system", "content": _text(blocks, f"{field}.content")})
        else:
            found.extend(_user(blocks, f"{field}.content"))
    if "tool_calls" in found[-1]:
        last = f"messages[{len(request.messages) - 1}]"
        raise ApiError(400, f"{last} has a tool_use block without its tool_result", param="messages")
    return found


def _check_types(blocks: Sequence[Block], field: str, types: tuple[str, ...]) -> None:
    for index, block in enumerate(blocks):
        if block.type not in types:
            raise invalid(f"{field}[{index}].type", block.type, f"one of {', '.join(types)}")


def _given(block: Block, name: str, field: str) -> Any:
    """A field that the type of the block requires."""
    value = getattr(block, name)
    if value is None:
        raise ApiError(400, f"{field}.{name} is missing: a {block.type} block must have it", param=field)
    return value


def _text(content: str | list[Block] | None, field: str) -> str:
    """The joined text of blocks, which must all be text."""
    if content is None or isinstance(content, str):
        return content or ""
    _check_types(content, field, ("text",))
    return "".join(_given(block, "text", f"{field}[{index}]") for index, block in enumerate(content))


def _user(blocks: Sequence[Block], field: str) -> Iterator[dict[str, Any]]:
    """The tool results and the texts between them, each a message."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{field}[{index}]"
        if block.type == "text":
            texts.append(_given(block, "text", place))
            continue
        if texts:
            yield {"role": "user", "content": "".join(texts)}
            texts = []
        result: dict[str, Any] = {
            "role": "tool",
            "tool_call_id": _given(block, "tool_use_id", place),
            "content": _text(block.content, f"{place}.content"),
        }
        if block.is_error:
            result["is_error"] = True
        yield result
    if texts or not blocks:
        yield {"role": "user", "content": "".join(texts)}


def _assistant(blocks: Sequence[Block], field: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{field}[{index}]"
        if block.type == "text":
            texts.append(_given(block, "text", place))
        elif block.type == "thinking":
            thoughts.append(_given(block, "thinking", place))
        elif block.type == "tool_use":
            function = {"name": _given(block, "name", place), "arguments": block.input}
            calls.append({"id": _given(block, "id", place), "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def chat_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """The tools in the form of OpenAI's API."""
    found = []
    for index, tool in enumerate(tools or ()):
        if tool.type not in (None, "custom"):
            raise invalid(f"tools[{index}].type", tool.type, "custom: the server runs no tools itself")
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.input_schema is not None:
            function["parameters"] = tool.input_schema
        for name in ("strict", "ignore_unsupported"):
            if (value := getattr(tool, name)) is not None:
                function[name] = value
        found.append({"type": "function", "function": function})
    return found


def check_edits(request: CountRequest) -> None:
    """Refuse edits of the context that are malformed. The server makes none of the others."""
    edits = request.context_management.edits if request.context_management is not None else None
    for index, edit in enumerate(edits or ()):
        if isinstance(edit.keep, str) and edit.keep != "all":
            raise invalid(f"context_management.edits[{index}].keep", edit.keep, '"all" or an object')


def template_variables(request: CountRequest) -> dict[str, Any]:
    """The variables of the chat template that fields of the request set."""
    variables: dict[str, Any] = {}
    if request.thinking is not None:
        if request.thinking.type not in _THINKING:
            raise invalid("thinking.type", request.thinking.type, f"one of {', '.join(_THINKING)}")
        variables["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    return variables


def sampling_fields(request: MessagesRequest) -> dict[str, Any]:
    """The fields that are sampling parameters under other names, as chat completions have them."""
    found: dict[str, Any] = {"tools": chat_tools(request.tools)}
    if request.stop_sequences:
        found["stop"] = request.stop_sequences
    choice = request.tool_choice
    if choice is not None:
        found["tool_choice"] = _tool_choice(choice, [tool.name for tool in request.tools or ()])
        if choice.disable_parallel_tool_use is not None:
            found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    form = request.output_config.format if request.output_config is not None else None
    field = "output_format" if form is None else "output_config.format"
    if form is not None and request.output_format is not None:
        raise invalid("output_format", request.output_format, f"left out beside {field}")
    form = form or request.output_format
    if form is not None:
        if form.get("type") != "json_schema":
            raise invalid(f"{field}.type", form.get("type"), "json_schema")
        schema = {"schema": form.get("schema")}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    return found


def _tool_choice(choice: ToolChoice, names: Sequence[str]) -> Any:
    kind, name = choice.type, choice.name
    if kind in ("any", "tool") and not names:
        raise invalid("tool_choice.type", kind, "auto or none, because there are no tools")
    if kind == "tool":
        if name not in names:
            raise invalid("tool_choice.name", name, f"the name of one of the tools: {', '.join(names[:16])}")
        return {"type": "function", "function": {"name": name}}
    if kind not in _TOOL_CHOICES:
        raise invalid("tool_choice.type", kind, "auto, any, tool or none")
    return _TOOL_CHOICES[kind]
