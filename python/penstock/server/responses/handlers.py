"""The routes of responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

import penstock
from penstock.server.bodies import size_of_values
from penstock.server.calls import Call
from penstock.server.choices import MAX_INLINE, num_logprobs
from penstock.server.errors import ApiError
from penstock.server.generation import begin, generate, stream
from penstock.server.pages import read_page
from penstock.server.prompts import template_options
from penstock.server.protocol.openai_responses import Item, ResponsesRequest
from penstock.server.responses.conversion import (
    LOGPROBS,
    UNSUPPORTED,
    chat_messages,
    check_fields,
    sampling_fields,
    template_variables,
)
from penstock.server.responses.events import ResponseEvents
from penstock.server.responses.output import Answer
from penstock.server.responses.store import Items, Stored
from penstock.server.sampling import fields_named, read_request, sampling_options
from penstock.server.sse import json_bytes

if TYPE_CHECKING:
    from penstock.server.calls import Generation
    from penstock.server.http import Exchange
    from penstock.server.pages import Page
    from penstock.server.state import State

__all__ = ["cancel_response", "create_response", "delete_response", "input_items", "read_response"]

#: The sampling parameters that have another name in a request.
_NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format"}
_FIELDS = frozenset(ResponsesRequest.__struct_fields__)

_decode_item = msgspec.json.Decoder(Item).decode


class _Output(msgspec.Struct):
    output: list[msgspec.Raw]


class _Named(msgspec.Struct):
    id: str


_decode_output = msgspec.json.Decoder(_Output).decode
_decode_id = msgspec.json.Decoder(_Named).decode


async def create_response(state: State, exchange: Exchange) -> None:
    """Answer with a response."""
    fields, request = await read_request(state, exchange, ResponsesRequest, (), UNSUPPORTED)
    check_fields(request)
    previous = await _previous(state, exchange, request)
    with fields_named(_NAMES):
        call, context = await exchange.in_body_thread(_call, state, request, fields, previous)
        generation = begin(state, exchange, "resp_", request.model, call, prompt="input")
        is_stored = request.store and state.settings.store_responses
        answer = Answer(generation, request, is_stored=is_stored)
        items = Items()
        if is_stored:
            items = context + await exchange.in_body_thread(_input, answer.id, fields["input"])
        fields.clear()

        def keep(status: str, body: bytes) -> None:
            if is_stored and status != "failed":
                state.responses.add(exchange.key, answer.id, Stored(body, items))

        if request.stream:
            events = ResponseEvents(answer, generation.model.engine, keep, exchange.hold)
            await stream(state, generation, events, exchange)
            return
        results = await generate(state, generation, exchange)
    status, body = await _response(state, exchange, generation, answer, results[0])
    keep(status, body)
    await exchange.send_bytes(body, "application/json")


def _call(
    state: State, request: ResponsesRequest, fields: dict[str, Any], previous: Stored | None
) -> tuple[Call, Items]:
    """The computation of a request, and the input and the output of the responses that it continues."""
    given = request.input
    items = [Item(role="user", content=given)] if isinstance(given, str) else given
    context = Items() if previous is None else _context(previous)
    prompt = chat_messages(request.instructions, [_decode_item(text) for text in context.texts], items)
    template = template_options(state.settings, request, template_variables(request))
    return Call([prompt], _params(request, fields), template), context


def _context(stored: Stored) -> Items:
    output = _decode_output(stored.body).output
    return stored.items + Items.of([_decode_id(item).id for item in output], list(map(bytes, output)))


async def _previous(state: State, exchange: Exchange, request: ResponsesRequest) -> Stored | None:
    """The response that the request continues."""
    previous = request.previous_response_id
    if previous is None:
        return None
    stored = state.responses.get(exchange.key, previous)
    if stored is None:
        message = f"Previous response with id {previous[:64]!r} not found."
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    exchange.reads(stored.size)
    exchange.reads(await exchange.in_body_thread(_size_of_values, stored.items))
    return stored


def _size_of_values(items: Items) -> int:
    """The memory of the values that a request decodes, beyond that of the texts."""
    return sum(size_of_values(text, is_body=False) for text in items.texts)


def _params(request: ResponsesRequest, fields: dict[str, Any]) -> penstock.SamplingParams:
    others = {name: value for name, value in fields.items() if name not in _FIELDS}
    options = sampling_options({**others, **sampling_fields(request)})
    if request.top_logprobs or LOGPROBS in (request.include or ()):
        options |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return penstock.SamplingParams(**options)


async def _response(
    state: State, exchange: Exchange, generation: Generation, answer: Answer, result: penstock.Result
) -> tuple[str, bytes]:
    """The status and the text of a response; with reasoning or many log probabilities, made in a thread."""

    def make() -> tuple[str, bytes]:
        num_reasoning_tokens = 0
        if result.reasoning:
            encode = generation.model.engine.encode
            num_reasoning_tokens = len(encode(result.reasoning, add_special_tokens=False))
        response = answer.of(result, num_reasoning_tokens)
        return response["status"], json_bytes(response)

    if result.reasoning or num_logprobs(generation.call.params, [result]) > MAX_INLINE:
        status, body = await state.response_threads.run(make)
        exchange.hold(len(body))
        return status, body
    return make()


def _input(response_id: str, given: str | list[dict[str, Any]]) -> Items:
    """The items of a request as OpenAI's API lists them: with ids of the server, and messages with parts."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    label = response_id.rpartition("-")[2]
    ids, texts = [], []
    for index, fields in enumerate(items):
        kind = fields.get("type") or "message"
        ids.append(f"in_{label}_{index}")
        item = {"status": "completed"} | fields | {"id": ids[-1], "type": kind}
        if kind == "message" and isinstance(item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": part, "text": item["content"]}]
        texts.append(json_bytes(item))
    return Items.of(ids, texts)


def _stored(state: State, exchange: Exchange) -> tuple[str, Stored]:
    """The response that the path names, and its id."""
    response_id: str = exchange.scope["path_params"]["response_id"]
    stored = state.responses.get(exchange.key, response_id)
    if stored is None:
        raise ApiError(404, f"Response with id {response_id[:64]!r} not found.", param="response_id")
    return response_id, stored


async def read_response(state: State, exchange: Exchange) -> None:
    """A stored response."""
    _, stored = _stored(state, exchange)
    await exchange.send_bytes(stored.body, "application/json")


async def delete_response(state: State, exchange: Exchange) -> None:
    """Remove a stored response."""
    response_id, _ = _stored(state, exchange)
    state.responses.remove(exchange.key, response_id)
    await exchange.send_json({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(state: State, exchange: Exchange) -> None:
    """Refuse: a stored response is complete."""
    response_id, _ = _stored(state, exchange)
    message = f"the response {response_id!r} cannot be cancelled: it does not run in the background"
    raise ApiError(400, message, param="response_id")


async def input_items(state: State, exchange: Exchange) -> None:
    """The items of the input of a stored response, by default the last ones first."""
    _, stored = _stored(state, exchange)
    page = read_page(exchange)
    exchange.reads(stored.size)
    found = await exchange.in_body_thread(_listed, stored.items, page)
    await exchange.send_bytes(found, "application/json")


def _listed(items: Items, page: Page) -> bytes:
    return json_bytes(page.of(items.ids, [msgspec.Raw(text) for text in items.texts]))
