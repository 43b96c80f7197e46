"""The outputs of many prompts, without an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.compat.lmdeploy.generation import GenOut, Turn
from penstock.compat.lmdeploy.response import Response
from penstock.compat.lmdeploy.streams import FAILURES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.compat.lmdeploy.generation import Ask
    from penstock.compat.lmdeploy.serve.async_engine import AsyncEngine

__all__ = ["response_of", "run"]


def response_of(item: GenOut, index: int) -> Response:
    """The `Response` of an item."""
    return Response(
        text=item.response,
        generate_token_len=item.generate_token_len,
        input_token_len=item.input_token_len,
        finish_reason=item.finish_reason,
        token_ids=item.token_ids or [],
        logprobs=item.logprobs,
        logits=item.logits,
        last_hidden_state=item.last_hidden_state,
        index=index,
        cached_tokens=item.cached_tokens,
        error_code=item.error_code,
        error_message=item.error_message,
    )


def run(engine: AsyncEngine, asks: Iterable[Ask], count: int, *, use_tqdm: bool) -> list[Response]:
    """The outputs of all prompts, in their order."""
    responses = []
    for index, ask in enumerate(asks):
        turn = Turn(engine, ask)
        try:
            prompt, params = turn.prepare()
            turn.begin(engine.engine.blocking.start_request(prompt, params))
            first, *rest = turn.read_last(turn.request.result())
            response = response_of(first, index)
            for item in rest:
                response.extend(response_of(item, index))
        except FAILURES as error:
            response = response_of(turn.failed(error), index)
        responses.append(response)
    return responses
