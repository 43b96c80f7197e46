"""Responses with choices, which log probabilities can make large."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import penstock
from penstock.server.errors import ApiError
from penstock.server.sse import json_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.server.calls import Call, Generation
    from penstock.server.http import Exchange
    from penstock.server.state import State

__all__ = ["MAX_INLINE", "LogprobCount", "answer_of", "check_size", "num_logprobs", "send_choices"]

#: The number of log probabilities that the event loop makes: about a millisecond's work.
MAX_INLINE = 1000
_MAX_BYTES = 128 << 20
#: About the memory of a log probability in a result, and that in the JSON of a response.
_LOGPROB_BYTES = 64


class LogprobCount:
    """The number of log probabilities of a request, which has a limit. Their memory counts as a body."""

    def __init__(self, state: State, exchange: Exchange, call: Call, max_model_len: int) -> None:
        """Raises if the token ids among the prompts have too many."""
        self._exchange = exchange
        self._params = params = call.params
        self._limit = state.settings.max_logprobs_per_request
        self._num_prompt = self._num_output = 0
        self._by_prompt_token, self._by_token = _numbers_by_token(params)
        length = min(params.max_tokens or max_model_len, max_model_len)
        self._max_output = call.num_outputs * length * self._by_token
        if self._by_prompt_token:
            self._check(self._by_prompt_token * sum(map(_num_ids, call.prompts)))

    @property
    def has_many(self) -> bool:
        """Whether the tokens of the outputs are to be counted."""
        return self._max_output > MAX_INLINE

    def add_prompt(self, num_tokens: int) -> None:
        """Count those of a prompt, before it is computed."""
        if self._by_prompt_token:
            self._num_prompt += (count := num_tokens * self._by_prompt_token)
            self._add(count)

    def add_output(self, num_tokens: int) -> None:
        """Count those of tokens that were generated."""
        self._num_output += (count := num_tokens * self._by_token)
        self._add(count)

    def add_all_outputs(self) -> None:
        """Count those of outputs of the greatest length, before they are computed."""
        self._num_output = self._max_output
        self._add(self._max_output)

    def _add(self, count: int) -> None:
        self._check(self._num_prompt + self._num_output)
        self._exchange.hold(count * _LOGPROB_BYTES)

    def _check(self, count: int) -> None:
        if count <= self._limit:
            return
        field = "top_logprobs" if self._params.top_logprobs else "logprobs"
        if self._num_output <= count // 2:
            field = "prompt_logprobs"
        value = getattr(self._params, field)
        message = f"{field}={value} is not allowed: the request asks for {count} log probabilities"
        message = f"{message} or more; the limit is {self._limit}"
        raise penstock.InvalidRequestError(message, field, value, f"at most {self._limit} in all")


def _num_ids(prompt: penstock.Prompt) -> int:
    """The number of tokens of a prompt of token ids; 0 for others."""
    has_ids = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], int)
    return len(prompt) if has_ids else 0


def _numbers_by_token(params: penstock.SamplingParams) -> tuple[int, int]:
    """The numbers of log probabilities of a response for each token of the prompt, and of an output."""
    by_prompt_token = 0 if params.prompt_logprobs is None else (1 + params.prompt_logprobs) * params.n
    return by_prompt_token, (1 + (params.top_logprobs or 0) if params.logprobs else 0)


def answer_of(generation: Generation, kind: str) -> dict[str, Any]:
    """The response of OpenAI's API for a generation that has ended, without its choices."""
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": generation.name,
        "usage": generation.usage(),
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
            check_size(size, "logprobs")
        return json_bytes(answer)[:-1] + b',"choices":[' + b",".join(parts) + b"]}"

    if size <= MAX_INLINE:
        body = encode()
    else:
        body = await state.response_threads.run(encode)
        exchange.hold(len(body))
    await exchange.send_bytes(body, "application/json")


def check_size(size: int, field: str) -> None:
    """Raise if a response of this many bytes is too large. `field` is the one that makes it large."""
    if size > _MAX_BYTES:
        message = f"the response has more than {_MAX_BYTES} bytes: ask for fewer outputs or logprobs"
        raise ApiError(400, message, param=field)


def num_logprobs(params: penstock.SamplingParams, results: Sequence[penstock.Result]) -> int:
    """The number of log probabilities of a response."""
    by_prompt_token, by_token = _numbers_by_token(params)
    return sum(
        result.usage.prompt_tokens * by_prompt_token + result.usage.completion_tokens * by_token
        for result in results
    )
