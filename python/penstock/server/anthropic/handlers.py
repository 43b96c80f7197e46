"""The routes of Anthropic's API, and the response that is not streamed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

import penstock
from penstock.server.anthropic.conversion import (
    chat_messages,
    chat_tools,
    check_edits,
    sampling_fields,
    template_variables,
)
from penstock.server.anthropic.events import (
    MessageEvents,
    edits_of,
    is_thinking_shown,
    stop_of,
    tool_use,
    usage_of,
)
from penstock.server.calls import Call
from penstock.server.disconnects import while_connected
from penstock.server.generation import begin, generate, stream
from penstock.server.prompts import encode_chat, template_options
from penstock.server.protocol.anthropic import CountRequest, MessagesRequest
from penstock.server.protocol.template import TemplateFields
from penstock.server.sampling import ONE_OUTPUT, Unsupported, fields_named, read_request, sampling_options

if TYPE_CHECKING:
    from penstock.server.calls import Generation
    from penstock.server.http import Exchange
    from penstock.server.state import State

__all__ = ["count_tokens", "messages"]

#: The sampling parameters that have another name in a request.
_NAMES = {
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
_FIELDS = frozenset(MessagesRequest.__struct_fields__)
#: Fields of Anthropic's service that are accepted and have no effect.
LABELS = frozenset(
    {"cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"}
)
UNSUPPORTED: Unsupported = {
    **ONE_OUTPUT,
    "container": ((), "left out: the server runs no code"),
    "mcp_servers": (([],), "left out: the server runs no tools itself"),
}


async def messages(state: State, exchange: Exchange) -> None:
    """Answer with a message."""
    fields, request = await read_request(state, exchange, MessagesRequest, LABELS, UNSUPPORTED)
    check_edits(request)
    with fields_named(_NAMES):
        call = await exchange.in_body_thread(_call, state, request, fields)
        generation = begin(state, exchange, "msg_", request.model, call, prompt="messages")
        fields.clear()
        if request.stream:
            await stream(state, generation, MessageEvents(generation, request), exchange)
            return
        results = await generate(state, generation, exchange)
    await exchange.send_json(_message(generation, request, results[0]))


def _call(state: State, request: MessagesRequest, fields: dict[str, Any]) -> Call:
    return Call([chat_messages(request)], _params(request, fields), _template(state, request))


async def count_tokens(state: State, exchange: Exchange) -> None:
    """The number of tokens of a prompt."""
    _, request = await read_request(state, exchange, CountRequest, LABELS | _FIELDS, UNSUPPORTED)
    check_edits(request)
    model = state.models.select(request.model).model
    tools, template = chat_tools(request.tools), _template(state, request)
    messages = await exchange.in_body_thread(chat_messages, request)
    count = partial(state.tokenizer_threads.run, encode_chat, model.engine, messages, tools, template)
    token_ids = await while_connected(exchange.receive, count)
    count_of: dict[str, Any] = {"input_tokens": len(token_ids)}
    if request.context_management is not None:
        count_of["context_management"] = {"original_input_tokens": len(token_ids)}
    await exchange.send_json(count_of)


def _template(state: State, request: CountRequest) -> dict[str, Any]:
    """The options of the chat template. A last message of the assistant is continued."""
    is_continued = request.messages[-1].role == "assistant"
    variables = request.chat_template_kwargs
    fields = TemplateFields(chat_template_kwargs=variables, continue_final_message=is_continued)
    return template_options(state.settings, fields, template_variables(request))


def _params(request: MessagesRequest, fields: dict[str, Any]) -> penstock.SamplingParams:
    others = {name: value for name, value in fields.items() if name not in _FIELDS}
    options = sampling_options({**others, "max_tokens": request.max_tokens, **sampling_fields(request)})
    return penstock.SamplingParams(**options)


def _message(generation: Generation, request: MessagesRequest, result: penstock.Result) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if result.reasoning and is_thinking_shown(request):
        content.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
    if result.content:
        content.append({"type": "text", "text": result.content})
    calls = result.tool_calls
    content += [tool_use(call.id, call.name, _input(call.arguments)) for call in calls]
    return {
        "id": generation.id,
        "type": "message",
        "role": "assistant",
        "model": generation.name,
        "content": content,
        **stop_of(result),
        "usage": usage_of(result.usage),
        **edits_of(request),
    }


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; text that is no JSON object is in one, under Anthropic's name for it."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
