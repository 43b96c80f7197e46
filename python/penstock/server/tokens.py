"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread

from penstock.server.errors import ApiError, invalid
from penstock.server.http import converted
from penstock.server.logprobs import Tokens
from penstock.server.protocol.tokens import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    import penstock
    from penstock.server.http import Exchange
    from penstock.server.state import State

__all__ = ["detokenize", "tokenize"]


async def tokenize(state: State, exchange: Exchange) -> None:
    """The token ids of a text or a chat, with the limit of the model."""
    request = converted(await exchange.read_object(), TokenizeRequest)
    model, _ = state.model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "either prompt or messages must be given", param="prompt")
    if request.chat_template is not None and not state.settings.request_templates:
        raise invalid(
            "chat_template", request.chat_template, "left out: this server accepts none in requests"
        )
    engine = model.engine
    ids = await anyio.to_thread.run_sync(partial(_encode, engine, request), limiter=state.tokenizer_threads)
    answer = {
        "count": len(ids),
        "max_model_len": engine.info.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if request.return_token_strs:
        tokens = Tokens(engine)
        answer["token_strs"] = [
            tokens.text(token_id, raw) for token_id, raw in zip(ids, tokens.bytes_of(ids), strict=True)
        ]
    await exchange.send_json(answer)


def _encode(engine: penstock.Engine, request: TokenizeRequest) -> list[int]:
    text = request.prompt
    if request.messages is not None:
        text = engine.apply_chat_template(
            request.messages,
            chat_template=request.chat_template or "default",
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
    is_special = request.add_special_tokens
    adds_special_tokens = request.messages is None if is_special is None else is_special
    return engine.encode(text or "", add_special_tokens=adds_special_tokens)


async def detokenize(state: State, exchange: Exchange) -> None:
    """The text of token ids."""
    request = converted(await exchange.read_object(), DetokenizeRequest)
    model, _ = state.model(request.model)
    size = model.engine.info.vocabulary_size
    if request.tokens and (largest := max(request.tokens)) >= size:
        raise invalid("tokens", largest, f"ids from 0 to {size - 1}")
    decode = partial(model.engine.decode, request.tokens, skip_special_tokens=False)
    text = await anyio.to_thread.run_sync(decode, limiter=state.tokenizer_threads)
    await exchange.send_json({"prompt": text})
