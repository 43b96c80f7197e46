"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.server.bodies import converted
from penstock.server.errors import ApiError, invalid
from penstock.server.logprobs import Tokens
from penstock.server.prompts import encode_chat, in_tokenizer_thread, template_options
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
    engine = model.engine
    adds_special_tokens = request.add_special_tokens
    if request.messages is None:
        encode = partial(
            engine.encode, request.prompt or "", add_special_tokens=adds_special_tokens is not False
        )
    else:
        template = template_options(state.settings, request)
        encode = partial(
            encode_chat,
            engine,
            request.messages,
            request.tools,
            template,
            add_special_tokens=adds_special_tokens is True,
        )
    ids = await in_tokenizer_thread(state, encode)
    answer = {
        "count": len(ids),
        "max_model_len": engine.info.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if request.return_token_strs:
        answer["token_strs"] = await in_tokenizer_thread(state, _texts, engine, ids)
    await exchange.send_json(answer)


def _texts(engine: penstock.Engine, token_ids: list[int]) -> list[str]:
    tokens = Tokens(engine, prefix="bytes:")
    tokens.load(token_ids)
    return [tokens[token_id][0] for token_id in token_ids]


async def detokenize(state: State, exchange: Exchange) -> None:
    """The text of token ids."""
    request = converted(await exchange.read_object(), DetokenizeRequest)
    model, _ = state.model(request.model)
    size = model.engine.info.vocabulary_size
    if request.tokens and (largest := max(request.tokens)) >= size:
        raise invalid("tokens", largest, f"ids from 0 to {size - 1}")
    decode = partial(model.engine.decode, request.tokens, skip_special_tokens=False)
    text = await in_tokenizer_thread(state, decode)
    await exchange.send_json({"prompt": text})
