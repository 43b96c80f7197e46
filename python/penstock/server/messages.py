"""The messages and tools of chat completions in the form of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.server.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["apply_allowed_tools", "chat_messages"]

#: The engine copies this many parts in about 60 ms, on the event loop.
_MAX_PARTS = 1 << 14
#: Keys of messages that the server cannot honour, and the reason.
_UNSUPPORTED = {"audio": "the model reads text only", "function_call": "use tool_calls"}


def chat_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the form of chat templates, which the engine checks further.

    A developer is the system for templates, and a refusal is text. Parts must be text: a template could write
    the place of an image, which the model would not see.
    """
    contents = [message.get("content") for message in messages]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > _MAX_PARTS:
        raise invalid("messages", f"messages with {num_parts} parts", f"messages with at most {_MAX_PARTS}")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], field: str) -> dict[str, Any]:
    for name, reason in _UNSUPPORTED.items():
        if message.get(name) is not None:
            raise invalid(f"{field}.{name}", message[name], f"left out: {reason}")
    role, content = message.get("role"), message.get("content")
    if role == "function":
        raise invalid(f"{field}.role", role, "tool, with a tool_call_id")
    changes: dict[str, Any] = {"role": "system"} if role == "developer" else {}
    if isinstance(content, list):
        changes["content"] = [_part(part, f"{field}.content[{index}]") for index, part in enumerate(content)]
    elif content is None and isinstance(message.get("refusal"), str):
        changes["content"] = message["refusal"]
    return {**message, **changes} if changes else message


def _part(part: Any, field: str) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if kind not in ("text", None):
        raise invalid(f"{field}.type", kind, "text: the model reads text only")
    return part


def apply_allowed_tools(options: dict[str, Any]) -> None:
    """Replace a `tool_choice` of the type `allowed_tools` by its mode, and the tools by the allowed ones."""
    choice = options.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return
    found = choice.get("allowed_tools")
    given: dict[str, Any] = found if isinstance(found, dict) else {}
    mode = given.get("mode")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice.allowed_tools.mode", mode, "auto or required")
    tools = {_name(tool): tool for tool in _listed(options.get("tools"))}
    names = [_name(tool) for tool in _listed(given.get("tools"))]
    if not names or not tools.keys() >= set(names):
        limit = f"some of the names of the tools: {', '.join(map(str, list(tools)[:16]))}"
        raise invalid("tool_choice.allowed_tools.tools", names[:16], limit)
    options["tools"] = [tools[name] for name in dict.fromkeys(names)]
    options["tool_choice"] = mode


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
