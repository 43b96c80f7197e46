"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from penstock._renderer import is_source
from penstock.server.bodies import converted
from penstock.server.disconnects import while_connected
from penstock.server.errors import ApiError, invalid
from penstock.server.messages import chat_messages
from penstock.server.prompts import encode_text, render_chat, template_options
from penstock.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from penstock.server.sse import json_bytes

if TYPE_CHECKING:
    import penstock
    from penstock.server.http import Exchange
    from penstock.server.state import State

__all__ = ["detokenize", "tokenize"]


async def tokenize(state: State, exchange: Exchange) -> None:
    """The token ids of a text or a chat, with the limit of the model."""
    fields = await exchange.read_object()
    request = converted(fields, TokenizeRequest)
    model = state.models.select(request.model).model
    if (request.prompt is None) == (request.messages is None):
        unknown = next((name for name in fields if name not in TokenizeRequest.__struct_fields__), None)
        hint = "" if unknown is None else f"; the field {unknown[:64]!r} is unknown"
        raise ApiError(400, f"either prompt or messages must be given{hint}", param="prompt")
    template = template_options(state.settings, request)
    work = partial(_answer, state, model.engine, request, template)
    await exchange.send_bytes(await while_connected(exchange.receive, work), "application/json")


async def _answer(
    state: State, engine: penstock.Engine, request: TokenizeRequest, template: dict[str, Any]
) -> bytes:
    """The response. No thread that tokenises waits for the rendering of a template of the request."""
    if request.messages is None or not is_source(request.chat_template or ""):
        return await state.tokenizer_threads.run(_tokenized, engine, request, template)
    text = await state.template_threads.run(_rendered, engine, request, template)
    return await state.tokenizer_threads.run(_tokenized, engine, request, template, text)


def _rendered(engine: penstock.Engine, request: TokenizeRequest, template: dict[str, Any]) -> str:
    """The text of the chat; runs in a thread."""
    return render_chat(engine, chat_messages(request.messages or []), request.tools, template)


def _tokenized(
    engine: penstock.Engine, request: TokenizeRequest, template: dict[str, Any], text: str | None = None
) -> bytes:
    """The response; runs in a thread. `text` is the rendered chat, if there is one."""
    adds_special_tokens = request.add_special_tokens
    if request.messages is None:
        adds_special_tokens = adds_special_tokens is not False
        ids = encode_text(engine, request.prompt or "", add_special_tokens=adds_special_tokens)
    else:
        if text is None:
            text = _rendered(engine, request, template)
        adds_special_tokens = adds_special_tokens is True
        ids = encode_text(engine, text, add_special_tokens=adds_special_tokens, field="messages")
    names = engine.token_names(ids) if request.return_token_strs else None
    max_model_len = engine.info.max_model_len
    answer = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": names}
    return json_bytes(answer)


async def detokenize(state: State, exchange: Exchange) -> None:
    """The text of token ids."""
    request = converted(await exchange.read_object(), DetokenizeRequest)
    model = state.models.select(request.model).model
    work = partial(state.tokenizer_threads.run, _detokenized, model.engine, request.tokens)
    await exchange.send_bytes(await while_connected(exchange.receive, work), "application/json")


def _detokenized(engine: penstock.Engine, token_ids: list[int]) -> bytes:
    """The response; runs in a thread."""
    size = engine.info.vocabulary_size
    if token_ids and (largest := max(token_ids)) >= size:
        raise invalid("tokens", largest, f"ids from 0 to {size - 1}")
    return json_bytes({"prompt": engine.decode(token_ids, skip_special_tokens=False)})
