"""Chats in the chat template, the same on every route: calls, variables, continuation, tools."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from support.api.engines import make_engine
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USER: dict[str, Any] = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 1}
#: Every route that takes a chat, and a request for it.
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/tokenize": CHAT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"input": [USER], "max_output_tokens": 1},
}
#: Fails for arguments that are no mapping, and writes a variable.
TEMPLATE = (
    "{{ check_cancelled }}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% for name, value in call.function.arguments.items() %}"
    "[{{ name }}={{ value }}]{% endfor %}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL_TEMPLATE = "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}" + TEMPLATE
EMPTY = ("", " ", "null", "{", "[1]", '"x"', "7", None, [1], 7)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[penstock.Engine]:
    model = shutil.copytree(tiny_model, tmp_path_factory.mktemp("templates") / "model")
    file = model / "tokenizer_config.json"
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": templates}))
    with make_engine(model, tool_parser="hermes") as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    with serving(penstock.server.app({"tiny": engine})) as server:
        yield server


def num_tokens(server: Served, path: str, **changes: Any) -> int:
    """The length of the prompt of a request to this route."""
    status, answer, _ = server.ask(path, {**ROUTES[path], **changes})
    assert status == 200, answer
    usage = answer.get("usage", answer)
    names = ("count", "prompt_tokens", "input_tokens")
    return int(next(usage[name] for name in names if name in usage)) + int(
        usage.get("cache_read_input_tokens", 0)
    )


def turns(path: str, arguments: Any) -> dict[str, Any]:
    """The fields of a chat in which the model has called a function."""
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        return {"input": [USER, call, {"type": "function_call_output", "call_id": "c", "output": "21"}]}
    if path.startswith("/v1/messages"):
        block = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "21"}]}
        return {"messages": [USER, {"role": "assistant", "content": [block]}, result]}
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    return {"messages": [USER, answer, {"role": "tool", "tool_call_id": "c", "content": "21"}]}


@pytest.mark.parametrize("path", ROUTES)
def test_call_with_bad_arguments_does_not_end_the_chat(server: Served, path: str) -> None:
    empty = num_tokens(server, path, **turns(path, {}))
    for arguments in EMPTY:
        assert num_tokens(server, path, **turns(path, arguments)) == empty
    full = num_tokens(server, path, **turns(path, {"a": 1}))
    assert full == num_tokens(server, path, **turns(path, '{"a": 1}')) == empty + len("[a=1]")


@pytest.mark.parametrize("path", ROUTES)
def test_variable_may_have_the_name_of_a_parameter(server: Served, path: str) -> None:
    plain = num_tokens(server, path)
    for name, length in (("check_cancelled", 3), ("messages_", 0), ("template", 0), ("engine", 0)):
        assert num_tokens(server, path, chat_template_kwargs={name: "abc"}) == plain + length


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", ["self", "messages", "tools", "bos token", "range"])
def test_variable_that_no_template_can_read_is_named(server: Served, path: str, name: str) -> None:
    status, answer, _ = server.ask(path, {**ROUTES[path], "chat_template_kwargs": {name: 1}})
    assert status == 400
    assert answer["error"]["message"].startswith(f"chat_template_kwargs[{name!r}] is not allowed: ")


@pytest.mark.parametrize("content", ["", " ", "e", "<", "end", "\n", []])
def test_last_message_of_the_assistant_is_continued(server: Served, content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    expected = len("<user>Hello<end><assistant>") + len(content)
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert num_tokens(server, path, messages=messages) == expected
    for path in ("/v1/chat/completions", "/tokenize"):
        assert num_tokens(server, path, messages=messages, continue_final_message=True) == expected


@pytest.mark.parametrize("path", ROUTES)
def test_template_for_tools_is_used_on_every_route(server: Served, path: str) -> None:
    tool = {"type": "function", "function": {"name": "sun", "parameters": {"type": "object"}}}
    if path == "/v1/responses":
        tool = {"type": "function", "name": "sun"}
    elif path.startswith("/v1/messages"):
        tool = {"name": "sun"}
    shown = num_tokens(server, path) + len("<tool_call>sun")
    assert num_tokens(server, path, tools=[tool]) == shown
    required = {"type": "any"} if path.startswith("/v1/messages") else "required"
    assert num_tokens(server, path, tools=[tool], tool_choice=required) == shown
