"""`/v1/completions`."""

from __future__ import annotations

import sys
from array import array
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import penstock
from penstock.server.calls import Call
from penstock.server.choices import answer_of, check_size, num_logprobs, send_choices
from penstock.server.disconnects import while_connected
from penstock.server.errors import invalid
from penstock.server.events import OpenAIEvents
from penstock.server.generation import begin, generate, stream
from penstock.server.logprobs import TextOffsets, Tokens, completion_logprobs, prompt_logprobs
from penstock.server.prompts import encode_text, max_bytes, text_prompts
from penstock.server.protocol.openai_completions import CompletionRequest
from penstock.server.sampling import Unsupported, beam_names, fields_named, read_request, sampling_options
from penstock.server.usage import finish_reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.server.calls import Generation
    from penstock.server.http import Exchange
    from penstock.server.prompts import Prompts
    from penstock.server.state import State

__all__ = ["completions"]

#: The sampling parameter that has another name in a request.
_NAMES = {"top_logprobs": "logprobs"}
UNSUPPORTED: Unsupported = {"suffix": (("",), "left out: the model cannot insert text")}
#: OpenAI's default of `max_tokens`.
_MAX_TOKENS = 16
#: Bytes of a token id in a response; copies of an echoed text for each choice: in a result, and in the JSON.
_ID_BYTES = 8
_TEXT_COPIES = 2


async def completions(state: State, exchange: Exchange) -> None:
    """Continue one or more texts."""
    fields, request = await read_request(state, exchange, CompletionRequest, (), UNSUPPORTED)
    names = dict(_NAMES)
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if request.prompt_logprobs is None:
        names["prompt_logprobs"] = "logprobs"
    with fields_named({**names, **beam_names(fields)}):
        params = await exchange.in_body_thread(_params, request, fields)
        prompts = await _prepared(state, exchange, request)
        call = Call(prompts, params, returns_tokens=not request.only_scores)
        generation = begin(state, exchange, "cmpl-", request.model, call, prompt="prompt")
        fields.clear()
        if request.echo or request.return_token_ids:
            await _hold_copies(state, exchange, generation, prompts, request)
        if request.stream:
            await stream(state, generation, _CompletionEvents(generation, request), exchange)
            return
        results = await generate(state, generation, exchange)
    answer = answer_of(generation, "text_completion")
    size = num_logprobs(params, results)
    await send_choices(state, exchange, answer, _choices(generation, request, results), size)


async def _prepared(state: State, exchange: Exchange, request: CompletionRequest) -> Prompts:
    """The prompts, tokenised here if the engine's own way is not the one that is asked for."""
    prompts = text_prompts("prompt", request.prompt, state.calls.max_prompts)
    limit, keeps_end = request.truncate_prompt_tokens, request.truncation_side == "left"
    model = state.models.select(request.model).model
    if limit is None and request.add_special_tokens:
        return prompts
    if limit == -1:
        limit = model.engine.info.max_model_len - 1
    elif limit is not None and limit < 1:
        raise invalid("truncate_prompt_tokens", limit, "-1, or 1 or more")

    async def tokenise() -> Prompts:
        found: Prompts = []
        for prompt in prompts:
            token_ids: Sequence[int]
            if isinstance(prompt, str):
                token_ids = await state.tokenizer_threads.run(
                    _packed_ids, model.engine, prompt, add_special_tokens=request.add_special_tokens
                )
            else:
                token_ids = prompt
            found.append(token_ids[-limit:] if limit and keeps_end else token_ids[:limit])
            exchange.hold(sys.getsizeof(found[-1]))
        return found

    return await while_connected(exchange.receive, tokenise)


async def _hold_copies(
    state: State, exchange: Exchange, generation: Generation, prompts: Prompts, request: CompletionRequest
) -> None:
    """Count the copies of the prompts that the choices have. Raises if the response would be too large."""
    params, engine = generation.call.params, generation.model.engine
    num_chars = num_bytes = 0

    def decoded(token_ids: Sequence[int]) -> str:
        with suppress(penstock.InvalidRequestError):  # the engine refuses the prompt
            return engine.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
        return ""

    for prompt in prompts:
        if request.return_token_ids:  # a byte has at most one token
            num_bytes += _ID_BYTES * (max_bytes(prompt) if isinstance(prompt, str) else len(prompt))
        if request.echo:
            if isinstance(prompt, str):
                text = prompt
            else:
                text = await state.response_threads.run(decoded, prompt)
            num_chars += len(text) * params.n
            check_size(num_chars, "echo")
            num_bytes += _TEXT_COPIES * max_bytes(text)
    exchange.hold(num_bytes * params.n)


def _packed_ids(engine: penstock.Engine, text: str, *, add_special_tokens: bool) -> array[int]:
    """The token ids of a text in 4 bytes each; a list takes up to 40."""
    return array("I", encode_text(engine, text, add_special_tokens=add_special_tokens))


def _params(request: CompletionRequest, fields: dict[str, Any]) -> penstock.SamplingParams:
    options = sampling_options(fields)
    if request.max_completion_tokens is not None:
        options["max_tokens"] = request.max_completion_tokens
    if request.only_scores:
        options["max_tokens"] = 1  # the prompt is scored; the token is left out of the response
    elif request.echo:
        options["echo"] = True
    options.setdefault("max_tokens", _MAX_TOKENS)
    if request.logprobs is not None:
        options["logprobs"] = True
        options["top_logprobs"] = request.logprobs
        if request.echo:
            if request.stream:
                raise invalid(
                    "echo", request.echo, "left out when stream is true and log probabilities are returned"
                )
            options["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return penstock.SamplingParams(**options)


def _choices(
    generation: Generation, request: CompletionRequest, results: Sequence[penstock.Result]
) -> Iterator[dict[str, Any]]:
    """The choices of a response that is not streamed; one that only scores has no generated tokens."""
    engine, call = generation.model.engine, generation.call
    tokens = Tokens(engine, prefix="bytes:", as_ids=request.return_tokens_as_token_ids)
    indices = count()
    for prompt, result in zip(call.prompts, results, strict=True):
        shared: dict[str, Any] = {"prompt_logprobs": None}
        if request.prompt_logprobs is not None:
            shared["prompt_logprobs"] = prompt_logprobs(tokens, result, request.prompt_logprobs)
        if request.return_token_ids:
            shared["prompt_token_ids"] = result.prompt_token_ids
        text = prompt if isinstance(prompt, str) else ""
        if request.echo and not isinstance(prompt, str):
            skips = call.params.skip_special_tokens
            text = engine.decode(result.prompt_token_ids, skip_special_tokens=skips)
        echoed = _echoed_logprobs(tokens, request, call.params, result, text)
        for choice in result.choices:
            logprobs = echoed
            if not request.only_scores:
                offsets = TextOffsets(tokens, call.params, len(text) if request.echo else 0)
                logprobs = _joined(echoed, _choice_logprobs(tokens, offsets, choice))
            found = {
                "index": next(indices),
                "text": text if request.only_scores else choice.text,
                "logprobs": logprobs,
                "finish_reason": finish_reason(choice.finish_reason),
                "stop_reason": choice.stop_reason,
                **shared,
            }
            if request.return_token_ids:
                found["token_ids"] = () if request.only_scores else choice.token_ids
            yield found


def _echoed_logprobs(
    tokens: Tokens,
    request: CompletionRequest,
    params: penstock.SamplingParams,
    result: penstock.Result,
    text: str,
) -> dict[str, list[Any]] | None:
    """The log probabilities of a prompt with this text, if a response has them."""
    logprobs = result.prompt_logprobs
    if not request.echo or request.logprobs is None or logprobs is None:
        return None
    token_ids = result.prompt_token_ids[: len(logprobs)]
    offsets = TextOffsets(tokens, params, prompt=text)
    tops = [top and top[: request.logprobs] for top in result.prompt_top_logprobs or ()]
    return completion_logprobs(tokens, offsets, token_ids, logprobs, tops)


def _choice_logprobs(
    tokens: Tokens, offsets: TextOffsets, part: penstock.Choice | penstock.Chunk
) -> dict[str, list[Any]] | None:
    logprobs = part.logprobs
    if logprobs is None:
        return None
    return completion_logprobs(tokens, offsets, part.token_ids, logprobs, part.top_logprobs)


def _joined(
    first: dict[str, list[Any]] | None, second: dict[str, list[Any]] | None
) -> dict[str, list[Any]] | None:
    if first is None or second is None:
        return first or second
    return {name: first[name] + values for name, values in second.items()}


class _CompletionEvents(OpenAIEvents):
    """The events of streamed completions."""

    def __init__(self, generation: Generation, request: CompletionRequest) -> None:
        super().__init__(
            generation,
            "text_completion",
            request.stream_options,
            before=b',"text":',
            after=b',"logprobs":null,"finish_reason":null',
        )
        self._request = request
        self._n = generation.call.params.n
        self._tokens = Tokens(
            generation.model.engine, prefix="bytes:", as_ids=request.return_tokens_as_token_ids
        )
        self._params = generation.call.params
        self._offsets: dict[int, TextOffsets] = {}
        self._is_plain = not (
            self.has_continuous_usage or request.return_token_ids or request.logprobs is not None
        )

    def of(self, chunk: penstock.Chunk, prompt: int, request: penstock.Request) -> bytes:
        """The event of a chunk."""
        index = prompt * self._n + chunk.index
        is_first = self.is_first(index)
        if self._is_plain and chunk.finish_reason is None:
            return self.text(index, chunk.text)
        choice: dict[str, Any] = {
            "index": index,
            "text": chunk.text,
            "logprobs": self._logprobs(index, chunk),
            "finish_reason": finish_reason(chunk.finish_reason),
        }
        if chunk.finish_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = chunk.token_ids
            if is_first:
                choice["prompt_token_ids"] = request.prompt_token_ids
        return self.chunk(choice, request, len(chunk.token_ids))

    def _logprobs(self, index: int, chunk: penstock.Chunk) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = TextOffsets(self._tokens, self._params)
        return _choice_logprobs(self._tokens, offsets, chunk)
