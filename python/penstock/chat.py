"""Chat templates: render messages as the prompt text that a model was trained on.

A template is a Jinja program that comes with the model. Its output is the same as Hugging Face's, character
for character. It is untrusted code, so it runs in a sandbox, on plain copies of the caller's data, with
limits on time and memory.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._core import ToolCall, call_deep, has_large_stack
from penstock._json import MAX_NESTING, loads, number_of_values
from penstock._renderer import CACHED_TEMPLATES, CompileError, RenderError
from penstock._shown import shown
from penstock.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import jinja2
    from typing_extensions import TypeIs

    from penstock._options import BatchPrompt, MessageModel, Prompt
    from penstock._renderer import Renderer, Template

__all__ = ["Chat", "ChatTemplate", "checked", "has_messages", "is_large", "prompt_of", "read_template"]

MAX_TEMPLATE_CHARS = 1 << 20
"""Maximum length of a template. Real templates have up to 20,000 characters."""

MAX_SMALL = 1024
"""Maximum number of values of a chat that is copied on the event loop, which takes about a millisecond."""

MAX_ARGUMENTS = 65_536
"""Maximum number of values of the arguments of all tool calls of a chat."""

#: Characters of a key in the place that an error names.
_SHOWN = 64

#: The keywords of a request that are not sampling parameters.
CHAT_OPTIONS = (
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)

# A text that occurs in no template.
_PROBE = "\ue0a7penstock\ue0a7"

# Keys of reasoning in messages. Templates read the first one; the template of gpt-oss reads the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")

# Names that Jinja reserves: a variable of such a name could not be read.
_NO_VARIABLES = frozenset(("self", "not", "true", "false", "none", "True", "False", "None"))

# The roles of messages that may have no content: a model's message can be empty, and so can a tool's result.
_MAY_BE_SILENT = ("assistant", "tool")


class ChatTemplate:
    """A chat template, compiled here or by `renderer`.

    `special_tokens` are the template's variables `bos_token`, `eos_token` and so on.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], renderer: Renderer | None = None
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            message = f"chat_template has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARS}"
            raise InvalidRequestError(message, "chat_template", len(source), str(MAX_TEMPLATE_CHARS))
        self._template: Template = _Compiled(source) if renderer is None else renderer(source)
        self._special_tokens = dict(special_tokens)
        self._supports_parts: bool | None = None  # unknown until a message has parts
        #: Whether the last prompt with tools that was compared with one without differed; see the session.
        self.presents_tools: bool | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        check_cancelled: Callable[[], None] | None = None,
    ) -> str:
        """Render a conversation. The text contains the special tokens, so encode it without adding any.

        `variables` are passed to the template: `tools`, `documents`, `enable_thinking` and others. They
        cannot replace special tokens or the template's functions. `check_cancelled` is called at every step
        of the template and raises to stop it.

        Raises `InvalidRequestError` if a message is malformed or the template rejects the conversation.
        """
        values = self._values(messages, variables, add_generation_prompt, check_cancelled)
        return self._render_chat(values, check_cancelled)

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        check_cancelled: Callable[[], None] | None = None,
    ) -> str:
        """Render a conversation up to the end of the last message's content, which the model continues.

        The end is found by a mark behind the content, which is random so that no other text has it. White
        space that ends the content is rendered without the mark, because the template may strip it; only
        such content is rendered twice.

        Raises `InvalidRequestError` as `render` does, and if the template changes the content.
        """
        values = self._values(messages, variables, False, check_cancelled)  # noqa: FBT003
        *before, last = values["messages"]
        content = _last_text(last)
        visible = content.rstrip()
        mark = f"_{secrets.randbits(128):039d}_"
        marked = {**values, "messages": [*before, _with_last_text(last, visible + mark)]}
        head, found, rest = self._render_chat(marked, check_cancelled).rpartition(mark)
        head = head.replace(mark, "")  # of a template that writes the content more than once
        if not found or not head.endswith(visible.lstrip()):
            reason = "the chat template does not write its content unchanged"
            message = f"the last message cannot be continued: {reason}"
            limit = "False with this chat template"
            raise InvalidRequestError(message, "continue_final_message", value=True, limit=limit)
        if visible == content:
            return head
        text = self._render_chat(values, check_cancelled)
        end = len(text) - len(rest)
        # A template can leave out a message that is blank.
        return text[:end] if text.endswith(rest) and end >= len(head) else head

    def _values(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        add_generation_prompt: bool,  # noqa: FBT001 - a variable of the template
        check_cancelled: Callable[[], None] | None,
    ) -> dict[str, Any]:
        """The variables of the template, as plain copies."""
        from penstock import _chat_sandbox

        taken = self._special_tokens.keys() | _chat_sandbox.reserved_names()
        values: dict[str, Any] = {"tools": None, "documents": None}
        for name, value in (variables or {}).items():
            if name in taken:
                raise _not_a_variable(name, value, "the template reserves this name")
            if name in _NO_VARIABLES or not name.isidentifier():
                raise _not_a_variable(name, value, "no template can read a variable of this name")
            values[name] = _plain(value, name)
        values.update(self._special_tokens)
        values["messages"] = self._with_joined_parts(checked(messages), check_cancelled)
        values["add_generation_prompt"] = add_generation_prompt
        return values

    def _render_chat(self, values: dict[str, Any], check_cancelled: Callable[[], None] | None) -> str:
        try:
            return self._render(values, check_cancelled)
        except InvalidRequestError:
            # Some templates require the content of every message.
            with_content = [_with_content(message) for message in values["messages"]]
            if with_content == values["messages"]:
                raise
            return self._render({**values, "messages": with_content}, check_cancelled)

    def _render(self, values: dict[str, Any], check_cancelled: Callable[[], None] | None) -> str:
        try:
            return self._template.render(values, check_cancelled)
        except CompileError as error:
            raise _not_compiled(error) from error.__cause__
        except RenderError as error:
            message = f"the chat template rejects these messages: {error}"
            raise InvalidRequestError(message, "messages") from error.__cause__

    def _with_joined_parts(
        self, messages: list[dict[str, Any]], check_cancelled: Callable[[], None] | None
    ) -> list[dict[str, Any]]:
        """The messages, with text parts joined if the template does not support parts."""
        if not any(isinstance(message.get("content"), list) for message in messages):
            return messages
        if self._supports_parts is None:
            self._supports_parts = self._find_support_of_parts(check_cancelled)
        if self._supports_parts:
            return messages
        return [
            {**message, "content": _joined(message["content"], f"messages[{index}].content")}
            if isinstance(message.get("content"), list)
            else message
            for index, message in enumerate(messages)
        ]

    def _find_support_of_parts(self, check_cancelled: Callable[[], None] | None) -> bool:
        """Whether the template writes the text of parts. Many templates write the list instead."""
        probe = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        values = {"tools": None, "documents": None, **self._special_tokens}
        try:
            text = self._render(
                {**values, "messages": [probe], "add_generation_prompt": True}, check_cancelled
            )
        except InvalidRequestError:
            return False
        return _PROBE in text and not any(f"{quote}type{quote}" in text for quote in "'\"")


class _Compiled:
    """A template that is rendered in this process."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _compiled(source)
        except CompileError as error:
            raise _not_compiled(error) from error.__cause__

    def render(self, values: dict[str, Any], check_cancelled: Callable[[], None] | None) -> str:
        """The text for the values of the variables."""
        from penstock import _chat_sandbox
        from penstock._chat_costs import Budget

        budget = Budget(check_cancelled)
        run = functools.partial(_chat_sandbox.render, self._template, values, budget)
        text: str = _call_deep(run, budget.end)
        return text


@functools.lru_cache(maxsize=CACHED_TEMPLATES)
def _compiled(source: str) -> jinja2.Template:
    from penstock import _chat_sandbox

    template: jinja2.Template = _call_deep(
        functools.partial(_chat_sandbox.compile_template, source), lambda: None
    )
    return template


def _call_deep(function: Callable[[], Any], interrupt: Callable[[], object]) -> Any:
    """Call a function that recurses deeply, on a new thread if this one has a small stack.

    Else no native code calls it: at the interpreter's exit, a daemon thread ends in Python code.
    """
    return function() if has_large_stack() else call_deep(function, interrupt)


class Chat:
    """Messages, copied, and how they are rendered.

    `chat_template` is a template, the name of one of the model's, or `None` for the model's choice.
    """

    def __init__(
        self,
        messages: Iterable[object],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> None:
        if chat_template is not None and not isinstance(chat_template, str):
            raise _wrong("chat_template", chat_template, "a Jinja template or the name of one of the model's")
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise _wrong("chat_template_kwargs", chat_template_kwargs, "a mapping with string keys")
        for name, flag in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if flag not in (None, True, False):
                raise _wrong(name, flag, "True or False")
        if add_generation_prompt and continue_final_message:
            expected = "left out when continue_final_message is True"
            raise _wrong("add_generation_prompt", value=True, expected=expected)
        self.messages = checked(messages)
        self.template = chat_template
        self._variables = _plain(chat_template_kwargs or {}, "chat_template_kwargs")
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            if name in self._variables:
                raise _not_a_variable(name, self._variables[name], "another argument sets it")
        if documents is not None:
            self._variables["documents"] = _plain(documents, "documents")
        self._adds_generation_prompt = add_generation_prompt in (None, True)
        self._continues = bool(continue_final_message)

    @staticmethod
    def take_options(options: dict[str, Any]) -> dict[str, Any]:
        """Remove the keywords of this class from `options` and return those that are not `None`."""
        taken = {name: options.pop(name) for name in CHAT_OPTIONS if name in options}
        return {name: value for name, value in taken.items() if value is not None}

    def render(
        self,
        template: ChatTemplate,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> str:
        """The text of the chat."""
        variables = {**self._variables, "tools": tools}
        if self._continues:
            return template.render_open(self.messages, variables, check_cancelled=check_cancelled)
        return template.render(
            self.messages,
            variables,
            add_generation_prompt=self._adds_generation_prompt,
            check_cancelled=check_cancelled,
        )


_PROMPTS = "text, a sequence of token ids or a list of messages, or a mapping with the key 'messages' only"


def prompt_of(prompt: BatchPrompt | None, options: dict[str, Any]) -> Prompt:
    """The prompt of a request, which is given as such or as `messages`, in `options` or in a mapping."""
    messages = options.pop("messages", None)
    if prompt is None and messages is None:
        raise _wrong("prompt", None, _PROMPTS)
    if prompt is not None and messages is not None:
        raise _wrong("messages", messages, "left out when there is a prompt")
    if messages is None and isinstance(prompt, Mapping):
        if prompt.keys() != {"messages"}:
            raise _wrong("prompt", prompt, _PROMPTS)
        messages = prompt["messages"]
    if messages is None:
        return prompt  # type: ignore[return-value] # neither `None` nor a mapping
    if not has_messages(messages):
        raise _wrong("messages", messages, "a list of messages that is not empty")
    return messages


def has_messages(prompt: Prompt) -> TypeIs[Sequence[Mapping[str, Any] | MessageModel]]:
    """Whether a prompt is a chat: a sequence of mappings, or of objects with `model_dump()`."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(_dumped(prompt[0]), Mapping)


def is_large(*containers: object) -> bool:
    """Whether these lists and dicts have many values, those of inner ones included."""
    found, count = list(containers), 0
    while found:
        container = found.pop()
        if isinstance(container, dict):
            values = list(container.values())
            if isinstance(arguments := container.get("arguments"), str):  # JSON, which is decoded
                count += len(arguments) // 16
        elif isinstance(container, (list, tuple)):
            values = list(container[: MAX_SMALL + 1])
        else:
            continue
        count += len(values)
        if count > MAX_SMALL:
            return True
        found += values
    return False


def _dumped(value: object) -> object:
    """The mapping of a pydantic model; other values unchanged."""
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) and not isinstance(value, (Mapping, type)) else value


def _not_compiled(error: CompileError) -> InvalidRequestError:
    return InvalidRequestError(f"chat_template: {error}", "chat_template")


def read_template(path: str) -> str:
    """The text of a file with a chat template, which can be compiled.

    Raises `ConfigError` for the field `chat_template`; if the template cannot be compiled, it names the line.
    """
    path = os.path.expanduser(path)  # noqa: PTH111 - never raises
    try:
        source = Path(path).read_text(encoding="utf-8")
        ChatTemplate(source, {})
    except (OSError, ValueError) as error:  # an `InvalidRequestError` is a `ValueError`
        reason = str(error).removeprefix("chat_template: ")
        limit = "the path of a file with a Jinja template"
        message = f"chat_template={path!r} is not allowed: {reason}; it must be {limit}"
        raise ConfigError(message, "chat_template", path, limit) from error
    return source


def checked(messages: Iterable[object]) -> list[dict[str, Any]]:
    """Return plain copies of the messages in the form that templates expect.

    `tool_calls` may be the `ToolCall` objects of a result.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__iter__"):
        raise _wrong("messages", messages, "a list of messages, each a mapping with role and content")
    arguments = _Arguments()
    checked = [_message(message, f"messages[{index}]", arguments) for index, message in enumerate(messages)]
    if not checked:
        raise _wrong("messages", messages, "at least one message")
    return checked


def _message(message: object, field: str, arguments: _Arguments) -> dict[str, Any]:
    message = _dumped(message)
    if not isinstance(message, Mapping):
        raise _wrong(field, message, "a mapping with role and content")
    # Keys with the value None are removed, because templates test whether a key exists.
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
        # An empty list is removed, too.
        plain |= {"tool_calls": [_tool_call(call, arguments) for call in calls]} if calls else {}
    elif calls is not None:
        raise _wrong(f"{field}.tool_calls", calls, "a list of calls")
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """The message, with empty content if it has none and may have none."""
    return {"content": "", **message} if message["role"] in _MAY_BE_SILENT else message


def _last_text(message: dict[str, Any]) -> str:
    """The text that ends the content of a message; empty if no text does."""
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    text = content[-1].get("text") if content else None
    return text if isinstance(text, str) else ""


def _with_last_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    """The message, with another text at the end of its content."""
    content = message.get("content", "")
    if isinstance(content, str):
        return {**message, "content": text}
    has_text = content and isinstance(content[-1].get("text"), str)
    last = content[-1] if has_text else {"type": "text"}
    return {**message, "content": [*(content[:-1] if has_text else content), {**last, "text": text}]}


def _joined(parts: list[dict[str, Any]], field: str) -> str:
    """The joined text of parts, which must all be text."""
    for index, part in enumerate(parts):
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise _wrong(f"{field}[{index}]", part, "a text: the model reads text only")
    return "".join(part["text"] for part in parts)


class _Arguments:
    """The JSON texts of the arguments of all tool calls of a chat."""

    def __init__(self) -> None:
        self._num_values = 0

    def check(self, text: str) -> None:
        """Count the values of a text. Raises `InvalidRequestError` if all have too many."""
        self._num_values += number_of_values(text)
        if (number := self._num_values) > MAX_ARGUMENTS:
            message = f"the arguments of the tool calls have {number} values; the limit is {MAX_ARGUMENTS}"
            raise InvalidRequestError(message, "messages", number, str(MAX_ARGUMENTS))


def _tool_call(call: Any, arguments: _Arguments) -> Any:
    """A call in the form that templates expect, in which the arguments are a mapping."""
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _with_arguments(function, arguments)}
    return _with_arguments(call, arguments) if "name" in call else call


def _with_arguments(function: dict[str, Any], all_arguments: _Arguments) -> dict[str, Any]:
    """The function of a call, with its arguments as a mapping.

    OpenAI's JSON text of an object is decoded. Other arguments become empty: a model can make them, and the
    caller repeats them in every later turn.
    """
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        all_arguments.check(arguments)
        try:
            given, arguments = arguments, loads(arguments)
            if "\\u" in given:  # perhaps a lone surrogate, which becomes U+FFFD
                text = json.dumps(arguments, ensure_ascii=False).encode("utf-16", "surrogatepass")
                arguments = loads(text.decode("utf-16", "replace"))
            arguments = _plain(arguments, "arguments")
        except ValueError:
            arguments = None
    return {**function, "arguments": arguments if isinstance(arguments, dict) else {}}


class _NotPlain(Exception):  # noqa: N818 - becomes an `InvalidRequestError` once its place is known
    """A value that JSON does not have. Its place is made only for the error, since it has long keys."""

    def __init__(self, reason: str, value: object, limit: str, *, is_key: bool = False) -> None:
        super().__init__(reason)
        self.value = value
        self.limit = limit
        self.is_key = is_key
        #: The keys and indices of the value, the innermost first.
        self.path: list[str | int] = []

    def at(self, field: str) -> InvalidRequestError:
        parts = [f"[{part}]" if isinstance(part, int) else f".{_shown(part)}" for part in self.path]
        place = field + "".join(reversed(parts))
        place = f"a key of {place}" if self.is_key else place
        return InvalidRequestError(f"{place} {self}", place, self.value, self.limit)


def _plain(value: object, field: str) -> Any:
    """A copy made of JSON's types, so that no object of the caller reaches a template."""
    try:
        return _copy(value, 0)
    except _NotPlain as error:
        raise error.at(field) from None


def _copy(value: object, depth: int) -> Any:
    if depth > MAX_NESTING:
        raise _NotPlain(f"is nested deeper than {MAX_NESTING}", None, str(MAX_NESTING))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _copy_text(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        plain = {}
        for key, inner in value.items():
            if not isinstance(key, str):
                raise _NotPlain(_reason(key, "a string"), key, "a string", is_key=True)
            text = _copy_text(key, is_key=True)
            try:
                plain[text] = _copy(inner, depth + 1)
            except _NotPlain as error:
                error.path.append(text)
                raise
        return plain
    if isinstance(value, ToolCall):
        function = {"name": value.name, "arguments": value.arguments}
        return {"id": value.id, "type": "function", "function": function}
    if (dumped := _dumped(value)) is not value:
        return _copy(dumped, depth + 1)
    if isinstance(value, (list, tuple)):
        copies: list[Any] = []
        try:
            for inner in value:
                copies.append(_copy(inner, depth + 1))  # noqa: PERF401 - their number is the index
        except _NotPlain as error:
            error.path.append(len(copies))
            raise
        return copies
    limit = "a JSON value: a string, number, boolean, list, mapping or None"
    raise _NotPlain(_reason(value, limit), value, limit)


def _copy_text(value: str, *, is_key: bool = False) -> str:
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"has a lone surrogate, U+{ord(text[error.start]):04X}, at position {error.start}"
        raise _NotPlain(reason, value, "text that UTF-8 can encode", is_key=is_key) from None
    return text


def _shown(key: str) -> str:
    return key if len(key) <= _SHOWN else f"{key[:_SHOWN]}..."


def _not_a_variable(name: str, value: object, reason: str) -> InvalidRequestError:
    field = f"chat_template_kwargs[{shown(name)}]"
    return InvalidRequestError(f"{field} is not allowed: {reason}", field, value, "left out")


def _wrong(field: str, value: object, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} {_reason(value, expected)}", field, value, expected)


def _reason(value: object, expected: str) -> str:
    given = "is missing" if value is None else f"is {shown(value)}"
    return f"{given}; it must be {expected}"
