"""Requests for responses as messages, template options and sampling parameters of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.server.errors import ApiError, invalid
from penstock.server.sampling import ONE_OUTPUT, Unsupported

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from penstock.server.protocol.openai_responses import (
        FunctionTool,
        Item,
        Part,
        ResponsesRequest,
        TextFormat,
    )

__all__ = [
    "LOGPROBS",
    "UNSUPPORTED",
    "chat_messages",
    "check_fields",
    "sampling_fields",
    "template_variables",
]

#: The roles of messages, and those of the chat template.
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_PARTS = ("input_text", "output_text", "text", "refusal")
_REASONING_PARTS = ("reasoning_text", "text")
_ITEMS = "message, reasoning, function_call or function_call_output"
#: Fields of OpenAI's service that the server cannot honour, and the only values that they may have.
UNSUPPORTED: Unsupported = {
    **ONE_OUTPUT,
    "access_programs": ((), "left out: the server has none"),
    "background": ((False,), "false: a response is computed while the client is connected"),
    "background_options": ((), "left out: a response is computed while the client is connected"),
    "context_management": (([],), "left out: the server does not compact the input"),
    "conversation": ((), "left out: use previous_response_id"),
    "image": ((), "left out: the model reads text only"),
    "moderation": ((), "left out: the server does not moderate"),
    "prompt": ((), "left out: the server stores no prompts"),
    "truncation": (("disabled",), '"disabled": the server drops no items'),
}
LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)


def check_fields(request: ResponsesRequest) -> None:
    """Refuse values that the server cannot honour."""
    for name in request.include or ():
        if name not in _INCLUDABLE:
            raise invalid("include", name, f"one of {', '.join(_INCLUDABLE)}")
    for name, value in (request.stream_options or {}).items():
        if name == "include_obfuscation" and value:
            raise invalid(f"stream_options.{name}", value, "false: the server adds no random characters")
    if request.reasoning is not None and request.reasoning.mode not in (None, "standard"):
        raise invalid("reasoning.mode", request.reasoning.mode, "standard")


def chat_messages(
    instructions: str | None, context: Sequence[Item], items: Sequence[Item]
) -> list[dict[str, Any]]:
    """The messages of a chat template: the instructions, the items of former responses, and the new items.

    Successive items of the assistant are one message. Raises for a call without an output, and for an output
    without a call.
    """
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    answer = _Answer()
    calls: dict[str | None, None] = {}
    for index, item in enumerate([*context, *items], start=-len(context)):
        field = f"input[{index}]"
        if answer.add(item, field):
            if item.type == "function_call":
                calls[item.call_id] = None
            continue
        found.extend(answer.take())
        if item.type == "message":
            found.append({"role": _role(item, field), "content": _text(item.content, f"{field}.content")})
        elif item.type == "function_call_output":
            if item.call_id not in calls:
                raise invalid(f"{field}.call_id", item.call_id, "that of a function_call before it")
            del calls[item.call_id]
            content = _text(item.output, f"{field}.output")
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        else:
            raise invalid(f"{field}.type", item.type, _ITEMS)
    found.extend(answer.take())
    if calls:
        shown = str(next(iter(calls)))[:64]
        raise ApiError(400, f"input has no function_call_output for the call {shown!r}", param="input")
    return found


class _Answer:
    """Collects successive items of the assistant into one message."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._complete: list[dict[str, Any]] = []

    def add(self, item: Item, field: str) -> bool:
        """Add an item; returns whether it is one of the assistant."""
        if item.type == "reasoning":
            self._begin("reasoning_content", "content", "tool_calls")
            self._message["reasoning_content"] = _reasoning(item, field)
        elif item.type == "message" and item.role == "assistant":
            self._begin("content", "tool_calls")
            self._message["content"] = _text(item.content, f"{field}.content")
        elif item.type == "function_call":
            name, call_id = _given(item, "name", field), _given(item, "call_id", field)
            function = {"name": name, "arguments": item.arguments}
            calls = self._message.setdefault("tool_calls", [])
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            return False
        return True

    def _begin(self, *keys: str) -> None:
        """Begin another message if this one has one of these keys, which come later in a message."""
        if any(key in self._message for key in keys):
            self._complete.append(self._message)
            self._message = {}

    def take(self) -> Iterator[dict[str, Any]]:
        """The messages of the items so far, which are removed."""
        messages = [*self._complete, self._message] if self._message else self._complete
        for message in messages:
            yield {"role": "assistant", "content": "", **message}
        self._message, self._complete = {}, []


def _given(item: Item, name: str, field: str) -> str:
    """A field that the type of the item requires."""
    value: str | None = getattr(item, name)
    if value is None:
        raise ApiError(400, f"{field}.{name} is missing: a {item.type} must have it", param=f"{field}.{name}")
    return value


def _role(item: Item, field: str) -> str:
    if item.role not in _ROLES:
        raise invalid(f"{field}.role", item.role, f"one of {', '.join(_ROLES)}")
    return _ROLES[item.role]


def _text(content: str | list[Part] | None, field: str, types: tuple[str, ...] = _PARTS) -> str:
    """The joined text of parts."""
    if content is None:
        raise ApiError(400, f"{field} is missing", param=field)
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type not in types:
            raise invalid(f"{field}[{index}].type", part.type, f"one of {', '.join(types)}")
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise ApiError(400, f"{field}[{index}] has no text", param=f"{field}[{index}]")
        texts.append(text)
    return "".join(texts)


def _reasoning(item: Item, field: str) -> str:
    """The text of reasoning, which is its summary if there is no content."""
    if item.content:
        return _text(item.content, f"{field}.content", _REASONING_PARTS)
    return _text(item.summary or [], f"{field}.summary", ("summary_text",))


def template_variables(request: ResponsesRequest) -> dict[str, Any]:
    """The variables of the chat template that other fields set."""
    return {
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
        "verbosity": request.text.verbosity if request.text is not None else None,
    }


def sampling_fields(request: ResponsesRequest) -> dict[str, Any]:
    """The fields that are sampling parameters under other names, as chat completions have them."""
    found: dict[str, Any] = {}
    tools = _tools(request.tools or ())
    if request.tool_choice is not None:
        found["tool_choice"], tools = _tool_choice(request.tool_choice, tools)
    found["tools"] = tools
    if request.max_output_tokens is not None:
        found["max_tokens"] = request.max_output_tokens
    if not request.parallel_tool_calls:
        found["parallel_tool_calls"] = False
    form = request.text.format if request.text is not None else None
    if form is not None and form.type != "text":
        found["response_format"] = _response_format(form)
    return found


def _tools(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """The tools in the form of chat completions."""
    found = []
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise invalid(f"tools[{index}].type", tool.type, "function: the server runs no tools itself")
        if tool.name is None:
            raise ApiError(400, f"tools[{index}].name is missing", param=f"tools[{index}].name")
        function = msgspec.to_builtins(tool)
        del function["type"]
        function = {name: value for name, value in function.items() if value is not None}
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(
    choice: str | dict[str, Any], tools: list[dict[str, Any]]
) -> tuple[object, list[dict[str, Any]]]:
    """The tool choice in the form of chat completions, and the tools that it leaves."""
    if isinstance(choice, str):
        return choice, tools
    names = {tool["function"]["name"] for tool in tools}
    if choice.get("type") == "function":
        name = _tool_name(choice, "tool_choice", names)
        return {"type": "function", "function": {"name": name}}, tools
    if choice.get("type") != "allowed_tools":
        raise invalid("tool_choice.type", choice.get("type"), "function or allowed_tools")
    if choice.get("mode") not in ("auto", "required"):
        raise invalid("tool_choice.mode", choice.get("mode"), "auto or required")
    allowed = choice.get("tools")
    if not isinstance(allowed, list) or not allowed:
        raise invalid("tool_choice.tools", allowed, "a list of tools that is not empty")
    chosen = {_tool_name(tool, f"tool_choice.tools[{index}]", names) for index, tool in enumerate(allowed)}
    return choice["mode"], [tool for tool in tools if tool["function"]["name"] in chosen]


def _tool_name(value: object, field: str, names: Collection[str]) -> str:
    """The name in an object that chooses a tool. Raises if it is none of these."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        raise invalid(f"{field}.name", name, "the name of one of the tools")
    return name


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.type != "json_schema":
        raise invalid("text.format.type", form.type, "text, json_object or json_schema")
    if form.schema is None:
        raise ApiError(400, "text.format.schema is missing", param="text.format.schema")
    schema = msgspec.to_builtins(form)
    return {
        "type": "json_schema",
        "json_schema": {
            name: value for name, value in schema.items() if name != "type" and value is not None
        },
    }
