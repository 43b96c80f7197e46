"""Responses with choices, which log probabilities can make large."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.server.errors import ApiError
from penstock.server.sse import json_bytes
from penstock.server.usage import usage_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import penstock
    from penstock.server.http import Exchange
    from penstock.server.state import Generation, State

__all__ = ["MAX_INLINE", "answer_of", "num_logprobs", "send_choices"]

#: The number of log probabilities that the event loop makes: about a millisecond's work.
MAX_INLINE = 1000
_MAX_BYTES = 256 << 20


def answer_of(generation: Generation, kind: str, results: Sequence[penstock.Result]) -> dict[str, Any]:
    """A response of OpenAI's API without its choices."""
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": generation.name,
        "usage": usage_of(*(result.usage for result in results)),
        "system_fingerprint": None,
    }


async def send_choices(
    state: State,
    exchange: Exchange,
    answer: dict[str, Any],
    choices: Iterable[dict[str, Any]],
    size: int,
) -> None:
    """Send a response with these choices, which have `size` log probabilities: many are made in a thread."""

    def encode() -> bytes:
        parts: list[bytes] = []
        size = 0
        for choice in choices:
            parts.append(json_bytes(choice))
            size += len(parts[-1])
            if size > _MAX_BYTES:
                message = f"the response has more than {_MAX_BYTES} bytes: ask for fewer outputs or logprobs"
                raise ApiError(400, message, param="logprobs")
        return json_bytes(answer)[:-1] + b',"choices":[' + b",".join(parts) + b"]}"

    body = encode() if size <= MAX_INLINE else await state.response_threads.run(encode)
    await exchange.send_bytes(body, "application/json")


def num_logprobs(params: penstock.SamplingParams, results: Sequence[penstock.Result]) -> int:
    """The number of log probabilities of a response."""
    count = 0
    for result in results:
        if params.prompt_logprobs is not None:
            count += result.usage.prompt_tokens * (1 + params.prompt_logprobs) * params.n
        if params.logprobs:
            count += result.usage.completion_tokens * (1 + (params.top_logprobs or 0))
    return count
