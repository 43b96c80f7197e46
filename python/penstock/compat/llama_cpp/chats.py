"""Chats: chat formats, tools and response formats of requests, and the responses for completions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.compat.errors import refuse
from penstock.compat.llama_cpp.completions import usage
from penstock.compat.llama_cpp.llama_grammar import LlamaGrammar

if TYPE_CHECKING:
    import penstock
    from penstock.compat.llama_cpp.completions import Completion

__all__ = ["CHAT_FORMATS", "Tools", "check_messages", "response_grammar"]

_CHATML = """\
{%- set start, end = '<|im_start|>', '<|im_end|>\\n' %}
{%- if messages[0].role != 'system' %}{{ start + 'system\\n' + end }}{% endif %}
{%- for message in messages %}
{{- start + message.role + '\\n' + (message.content or '') + end }}
{%- endfor %}
{{- start + 'assistant\\n' }}"""

#: ChatML with the functions in the system message.
_FUNCTIONS = """\
{%- set start, end = '<|im_start|>', '<|im_end|>\\n' %}
{%- set has_system = messages[0].role == 'system' %}
{{- start + 'system\\n' + (messages[0].content if has_system else '') }}
{%- for tool in tools or [] %}
{{- '\\n\\nfunctions.' + tool.function.name + ':\\n' + (tool.function.parameters | tojson) }}
{%- endfor %}
{{- end }}
{%- for message in (messages[1:] if has_system else messages) %}
{{- start + message.role + '\\n' + (message.content or '') + end }}
{%- endfor %}
{{- start + 'assistant\\n' }}"""

_LLAMA_2 = """\
{%- set has_system = messages[0].role == 'system' %}
{%- for message in (messages[1:] if has_system else messages) %}
{%- if message.role == 'user' %}
{{- '' if loop.first else '<s>' }}{{ '[INST] ' }}
{%- if loop.first and has_system %}{{ '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' }}{% endif %}
{{- message.content + ' [/INST]' }}
{%- else %}{{ ' ' + (message.content or '') + ' </s>' }}{% endif %}
{%- endfor %}"""

#: Jinja templates of llama-cpp-python's chat formats.
CHAT_FORMATS = {"chatml": _CHATML, "chatml-function-calling": _FUNCTIONS, "llama-2": _LLAMA_2}

_CHOICES = "a function's name in it; without chat_format, the model's template and tool_parser read calls"


def check_messages(messages: object) -> Sequence[Mapping[str, Any]]:
    """The messages of a chat. Raises `UnsupportedError` for images."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        refuse("messages", messages, "it must be a list of messages")
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, (list, tuple)) else ():
            if isinstance(part, Mapping) and part.get("type") != "text":
                refuse("messages", part.get("type"), "images are not supported yet")
    return messages


def response_grammar(
    response_format: Mapping[str, Any] | None, grammar: LlamaGrammar | None
) -> LlamaGrammar | None:
    """The grammar of a response format, which has precedence over a grammar."""
    if response_format is None or response_format.get("type") == "text":
        return grammar
    kind = response_format.get("type")
    if kind == "json_object":
        return LlamaGrammar.from_json_schema(json.dumps(response_format.get("schema", {"type": "object"})))
    if kind != "json_schema":
        refuse("response_format", response_format, 'its type must be "text", "json_object" or "json_schema"')
    return LlamaGrammar.from_response_format(response_format)


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a request, and the function that the answer calls, if the request names one."""

    tools: Sequence[Mapping[str, Any]] | None
    choice: str | Mapping[str, Any] | None

    @classmethod
    def of(cls, functions: Any, function_call: Any, tools: Any, tool_choice: Any) -> Tools:
        """The tools of the arguments; `functions` and `function_call` are older names."""
        if functions is not None:
            tools = [{"type": "function", "function": function} for function in functions]
        if isinstance(function_call, Mapping):
            tool_choice = {"type": "function", "function": function_call}
        elif function_call is not None:
            tool_choice = function_call
        return cls(tools or None, tool_choice if tools else None)

    @property
    def called(self) -> str | None:
        """The function that the request names."""
        return self.choice["function"]["name"] if isinstance(self.choice, Mapping) else None

    @property
    def are_parsed(self) -> bool:
        """Whether the model chooses the function, so that calls are found in its output."""
        return self.tools is not None and self.called is None and self.choice != "none"

    def check_format(self, chat_format: str | None) -> None:
        """Refuse calls that a chat format does not have."""
        if self.are_parsed and chat_format is not None:
            refuse("tool_choice", self.choice, f"chat_format={chat_format!r} needs {_CHOICES}")

    def grammar(self) -> LlamaGrammar | None:
        """The grammar of the arguments of the named function."""
        if self.called is None:
            return None
        for tool in self.tools or ():
            if tool["function"]["name"] == self.called:
                schema = tool["function"].get("parameters", {"type": "object"})
                return LlamaGrammar.from_json_schema(json.dumps(schema))
        message = f"tool_choice is {self.called!r}; it must be a function of tools"
        raise ValueError(message)


def chat_response(completion: Mapping[str, Any]) -> dict[str, Any]:
    """The response of a chat for that of its completion."""
    choice = completion["choices"][0]
    message = {"role": "assistant", "content": choice["text"]}
    return _response(completion, message, choice["logprobs"], choice["finish_reason"])


def function_response(name: str, completion: Mapping[str, Any]) -> dict[str, Any]:
    """The response that calls a function; the completion has its arguments."""
    choice = completion["choices"][0]
    function = {"name": name, "arguments": choice["text"]}
    call = {"id": _call_id(name, completion), "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "function_call": function, "tool_calls": [call]}
    return _response(completion, message, choice["logprobs"], "tool_calls")


def parsed_response(request: Completion, messages: Any, params: penstock.SamplingParams) -> dict[str, Any]:
    """The response of a chat in which the model chooses tools."""
    result = request.engine.blocking.generate(messages, params)
    choice = result.choices[0]
    message: dict[str, Any] = {"role": "assistant", "content": choice.content}
    if choice.tool_calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in choice.tool_calls
        ]
    body = {"id": request.id, "created": request.created, "model": request.model}
    body["usage"] = usage(result.usage.prompt_tokens, result.usage.completion_tokens)
    return _response(body, message, None, choice.finish_reason)


def chat_stream(chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The stream of a chat for that of its completion."""
    is_first = True
    for chunk in chunks:
        choice = chunk["choices"][0]
        if is_first:
            yield _part(chunk, {"role": "assistant"}, None, None)
            is_first = False
        delta = {"content": choice["text"]} if choice["finish_reason"] is None else {}
        yield _part(chunk, delta, choice["logprobs"], choice["finish_reason"])


def function_stream(name: str, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The stream that calls a function; the completion has its arguments."""
    empty = {"role": None, "content": None, "function_call": None, "tool_calls": None}
    is_first = True
    for chunk in chunks:
        choice = chunk["choices"][0]
        if is_first:
            yield _part(chunk, empty | {"role": "assistant"}, None, None)
            is_first = False
        if choice["finish_reason"] is not None:
            yield _part(chunk, empty, None, "tool_calls")
            continue
        function = {"name": name, "arguments": choice["text"]}
        call = {"index": 0, "id": _call_id(name, chunk), "type": "function", "function": function}
        yield _part(
            chunk, empty | {"function_call": function, "tool_calls": [call]}, choice["logprobs"], None
        )


def parsed_stream(
    request: Completion, messages: Any, params: penstock.SamplingParams
) -> Iterator[dict[str, Any]]:
    """The stream of a chat in which the model chooses tools."""
    body = {"id": request.id, "created": request.created, "model": request.model}
    with request.engine.blocking.stream(messages, params) as chunks:
        yield _part(body, {"role": "assistant"}, None, None)
        for chunk in chunks:
            if chunk.content:
                yield _part(body, {"content": chunk.content}, None, None)
            for call in chunk.tool_calls:
                function = {"name": call.name, "arguments": call.arguments}
                delta: dict[str, Any] = {"index": call.index, "type": "function", "function": function}
                if call.id is not None:
                    delta["id"] = call.id
                yield _part(body, {"tool_calls": [delta]}, None, None)
            if chunk.finish_reason is not None:
                yield _part(body, {}, None, chunk.finish_reason)


def _response(
    completion: Mapping[str, Any],
    message: dict[str, Any],
    logprobs: Mapping[str, Any] | None,
    reason: str | None,
) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "logprobs": _logprobs(logprobs), "finish_reason": reason}
    return {
        "id": "chat" + completion["id"],
        "object": "chat.completion",
        "created": completion["created"],
        "model": completion["model"],
        "choices": [choice],
        "usage": completion["usage"],
    }


def _part(
    chunk: Mapping[str, Any],
    delta: Mapping[str, Any],
    logprobs: Mapping[str, Any] | None,
    reason: str | None,
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": _logprobs(logprobs), "finish_reason": reason}
    return {
        "id": "chat" + chunk["id"],
        "object": "chat.completion.chunk",
        "created": chunk["created"],
        "model": chunk["model"],
        "choices": [choice],
    }


def _call_id(name: str, completion: Mapping[str, Any]) -> str:
    return f"call__0_{name}_{completion['id']}"


def _logprobs(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The log probabilities of a chat for those of its completion."""
    if found is None:
        return None

    def entry(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "bytes": None, "logprob": logprob}

    content = [
        entry(token, logprob) | {"top_logprobs": [entry(*other) for other in top.items()]}
        for token, logprob, top in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        )
    ]
    return {"content": content, "refusal": None}
