"""Chat templates: messages to the text that a model was trained to answer.

A template is a small program in Jinja that comes with the model. It runs as Hugging Face runs it, so that its
text is the same to the letter, and as the untrusted code that it is: sandboxed, on plain copies of the
caller's data, with limits on its time and on the text it makes.
"""

from __future__ import annotations

import functools
import json
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock._core import ToolCall
from penstock.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jinja2

__all__ = ["ChatTemplate", "checked"]

MAX_TEMPLATE_CHARS = 1 << 20
"""Longest source of a template; real ones have up to 20,000 characters."""

MAX_NESTING = 100
"""Deepest nesting of a message or a variable."""

CACHED_TEMPLATES = 32
"""Compiled templates kept, the least recently used one dropped first."""

# A text that no template has.
_PROBE = "\ue0a7penstock\ue0a7"

# Names under which reasoning is passed. Templates read the first; gpt-oss's reads the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A chat template, ready to render conversations.

    `special_tokens` are the texts that the template knows as `bos_token`, `eos_token` and so on.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            message = f"chat_template has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARS}"
            raise InvalidRequestError(message, "chat_template", len(source), str(MAX_TEMPLATE_CHARS))
        self._template = _compiled(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation, special tokens included: encode it without adding any.

        `variables` reach the template by their names: `tools`, `documents`, `enable_thinking` and what else
        it knows. They cannot replace special tokens or the template's functions.

        Raises `InvalidRequestError` if a message is malformed or the template refuses the conversation.
        """
        taken = self._special_tokens.keys() | self._template.environment.globals.keys()
        if clash := sorted(taken & variables.keys()):
            message = f"chat template variable {clash[0]!r} is the template's own"
            raise InvalidRequestError(message, clash[0], variables[clash[0]], "another name")
        values: dict[str, Any] = {"tools": None, "documents": None}
        values.update({name: _plain(value, name) for name, value in variables.items()})
        values.update(self._special_tokens)
        values["messages"] = checked(messages)
        values["add_generation_prompt"] = add_generation_prompt
        if any(isinstance(message.get("content"), list) for message in values["messages"]):
            values["messages"] = self._with_content_as_known(values["messages"])
        try:
            return self._render(values)
        except InvalidRequestError:
            # A message that calls has no content, which a template may want to add to.
            with_content = [_with_content(message) for message in values["messages"]]
            if with_content == values["messages"]:
                raise
            return self._render({**values, "messages": with_content})

    def _render(self, values: dict[str, Any]) -> str:
        from penstock import _chat_sandbox

        try:
            return _chat_sandbox.render(self._template, values)
        except _chat_sandbox.TemplateFailure as error:
            message = f"the chat template refuses these messages: {error}"
            raise InvalidRequestError(message, "messages") from error.__cause__

    def _with_content_as_known(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages; where the template knows no parts, with those of text joined."""
        if self._knows_parts:
            return messages
        return [
            {**message, "content": _joined(message["content"], f"messages[{index}].content")}
            if isinstance(message.get("content"), list)
            else message
            for index, message in enumerate(messages)
        ]

    @functools.cached_property
    def _knows_parts(self) -> bool:
        """Whether the text of a part is written as text; many templates would write the whole list."""
        probe = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        values = {"tools": None, "documents": None, **self._special_tokens}
        try:
            text = self._render({**values, "messages": [probe], "add_generation_prompt": True})
        except InvalidRequestError:
            return False
        return _PROBE in text and not any(f"{quote}type{quote}" in text for quote in "'\"")


@functools.lru_cache(maxsize=CACHED_TEMPLATES)
def _compiled(source: str) -> jinja2.Template:
    from penstock import _chat_sandbox

    try:
        return _chat_sandbox.compile_template(source)
    except _chat_sandbox.TemplateFailure as error:
        raise InvalidRequestError(f"chat_template: {error}", "chat_template") from error.__cause__


def checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plain copies of the messages, with what templates rely on made sure of.

    `tool_calls` may be those of a result.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__iter__"):
        raise _wrong("messages", messages, "a list of messages, each a mapping with role and content")
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not checked:
        raise _wrong("messages", messages, "at least one message")
    return checked


def _message(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(field, message, "a mapping with role and content")
    # A key without a value is left out: templates ask whether a key is there.
    plain = {key: value for key, value in _plain(message, field).items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{field}.role", role, "a string such as 'user', 'assistant' or 'system'")
    content = plain.get("content", "")
    if isinstance(content, list):
        for index, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise _wrong(f"{field}.content[{index}]", part, "a mapping with a string 'type'")
    elif not isinstance(content, str):
        raise _wrong(f"{field}.content", content, "a string or a list of parts")
    if isinstance(calls := plain.pop("tool_calls", None), list):
        # An empty list is left out, too.
        plain |= {"tool_calls": [_tool_call(call) for call in calls]} if calls else {}
    elif calls is not None:
        raise _wrong(f"{field}.tool_calls", calls, "a list of calls")
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """The message; where it calls and says nothing, with the content that says nothing."""
    return {"content": "", **message} if "tool_calls" in message else message


def _joined(parts: list[dict[str, Any]], field: str) -> str:
    """The text of parts that are nothing but text."""
    for index, part in enumerate(parts):
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise _wrong(f"{field}[{index}]", part, "a text: the model's chat template takes no other parts")
    return "".join(part["text"] for part in parts)


def _tool_call(call: Any) -> Any:
    """A call as templates expect it: its arguments, which OpenAI's interface writes as JSON, are a mapping.

    Arguments that are no JSON object stay the text that they are.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": _plain(arguments, "arguments")}}


def _plain(value: object, field: str, depth: int = 0) -> Any:
    """A copy made of JSON's types: no object of the caller's, with methods of its own, reaches a template."""
    if depth > MAX_NESTING:
        raise InvalidRequestError(
            f"{field} is nested deeper than {MAX_NESTING}", field, None, str(MAX_NESTING)
        )
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = (
                f"{field} has a lone surrogate, U+{ord(text[error.start]):04X}, at position {error.start}"
            )
            raise InvalidRequestError(message, field, value, "text that UTF-8 can encode") from None
        return text
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        plain = {}
        for key, inner in value.items():
            if not isinstance(key, str):
                raise _wrong(f"a key of {field}", key, "a string")
            plain[_plain(key, f"a key of {field}")] = _plain(inner, f"{field}.{key}", depth + 1)
        return plain
    if isinstance(value, ToolCall):
        function = {"name": value.name, "arguments": value.arguments}
        return {"id": value.id, "type": "function", "function": function}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{field}[{index}]", depth + 1) for index, inner in enumerate(value)]
    raise _wrong(field, value, "a value that JSON knows: a string, number, boolean, list, mapping or None")


def _wrong(field: str, value: object, wanted: str) -> InvalidRequestError:
    given = "is missing" if value is None else f"is {reprlib.repr(value)}"
    return InvalidRequestError(f"{field} {given}; it must be {wanted}", field, value, wanted)
