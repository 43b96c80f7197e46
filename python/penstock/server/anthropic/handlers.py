"""The routes of Anthropic's API, and the response that is not streamed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import msgspec

import penstock
from penstock.server.anthropic.conversion import chat_messages, chat_options, chat_tools, sampling_fields
from penstock.server.anthropic.events import MessageEvents, is_thinking_shown, stop_of, usage_of
from penstock.server.errors import invalid
from penstock.server.generation import generate, stream
from penstock.server.http import converted
from penstock.server.protocol.anthropic import CountRequest, MessagesRequest
from penstock.server.sampling import fields_named, sampling_options, warn_unknown
from penstock.server.state import Generation

if TYPE_CHECKING:
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
_KNOWN = _FIELDS | {"cache_control", "inference_geo"}
#: Sampling parameters for outputs that a message does not have.
_UNUSED = ("best_of", "n", "num_beams", "prompt_logprobs")


async def messages(state: State, exchange: Exchange) -> None:
    """Answer with a message."""
    fields = await exchange.read_object()
    warn_unknown(fields, _KNOWN)
    request = converted(fields, MessagesRequest)
    model, name = state.model(request.model)
    options = chat_options(request)
    prompt = chat_messages(request)
    with fields_named(_NAMES):
        params = _params(request, fields)
        generation = Generation("msg", model, name)
        if request.stream:
            events = MessageEvents(generation, request)
            await stream(state, generation, [prompt], params, options, events, exchange)
            return
        results = await generate(state, generation, [prompt], params, options, exchange)
    if results is not None:
        await exchange.send_json(_message(generation, request, results[0]))


async def count_tokens(state: State, exchange: Exchange) -> None:
    """The number of tokens of a prompt."""
    fields = await exchange.read_object()
    warn_unknown(fields, _KNOWN)
    request = converted(fields, CountRequest)
    model, _ = state.model(request.model)
    options = chat_options(request)
    count = partial(_count, model.engine, chat_messages(request), chat_tools(request.tools), options)
    tokens = await anyio.to_thread.run_sync(count, limiter=state.tokenizer_threads)
    await exchange.send_json({"input_tokens": tokens})


def _count(
    engine: penstock.Engine,
    prompt: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    options: dict[str, Any],
) -> int:
    text = engine.apply_chat_template(prompt, tools=tools or None, **options)
    return len(engine.encode(text, add_special_tokens=False))


def _params(request: MessagesRequest, fields: dict[str, Any]) -> penstock.SamplingParams:
    others = {name: value for name, value in fields.items() if name not in _FIELDS}
    options = sampling_options({**others, "max_tokens": request.max_tokens, **sampling_fields(request)})
    for name in _UNUSED:
        if options.get(name) not in (None, 1):
            raise invalid(name, options[name], "left out: a message is one output")
    return penstock.SamplingParams(**options)


def _message(generation: Generation, request: MessagesRequest, result: penstock.Result) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if result.reasoning and is_thinking_shown(request):
        content.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
    if result.content:
        content.append({"type": "text", "text": result.content})
    for call in result.tool_calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
        content.append(block)
    return {
        "id": generation.id,
        "type": "message",
        "role": "assistant",
        "model": generation.name,
        "content": content,
        **stop_of(result.finish_reason, result.stop_reason),
        "usage": usage_of(result.usage),
    }


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; text that is no JSON object is in one, under Anthropic's name for it."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
