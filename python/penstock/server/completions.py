"""`/v1/completions`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import penstock
from penstock.server.errors import invalid
from penstock.server.events import OpenAIEvents
from penstock.server.generation import begin, generate, stream
from penstock.server.logprobs import Tokens, completion_logprobs, prompt_logprobs
from penstock.server.prompts import in_tokenizer_thread, text_prompts
from penstock.server.protocol.openai_completions import CompletionRequest
from penstock.server.sampling import fields_named, read_request, sampling_options
from penstock.server.state import Call
from penstock.server.usage import finish_reason, usage_of

if TYPE_CHECKING:
    from penstock.server.http import Exchange
    from penstock.server.prompts import Prompts
    from penstock.server.state import Generation, State

__all__ = ["completions"]

#: The sampling parameter that has another name in a request.
_NAMES = {"top_logprobs": "logprobs"}
#: OpenAI's default of `max_tokens`.
_MAX_TOKENS = 16


async def completions(state: State, exchange: Exchange) -> None:
    """Continue one or more texts."""
    fields, request = await read_request(state, exchange, CompletionRequest)
    if request.suffix:
        raise invalid("suffix", request.suffix, "left out: the model cannot insert text")
    with fields_named(_NAMES):
        params = _params(request, fields)
        call = Call(await _prepared(state, request), params)
        generation = begin(state, exchange, "cmpl", request.model, call)
        if request.stream:
            await stream(state, generation, _CompletionEvents(generation, request), exchange)
            return
        results = await generate(state, generation, exchange)
    if results is not None:
        await exchange.send_json(_completion(generation, request, results))


async def _prepared(state: State, request: CompletionRequest) -> Prompts:
    """The prompts, tokenised here if the engine's own way is not the one that is asked for."""
    prompts = text_prompts("prompt", request.prompt, state.settings.max_prompts)
    limit = request.truncate_prompt_tokens
    model, _ = state.model(request.model)
    if limit is None and request.add_special_tokens:
        return prompts
    if limit == -1:
        limit = model.engine.info.max_model_len - 1
    elif limit is not None and limit < 1:
        raise invalid("truncate_prompt_tokens", limit, "-1, or 1 or more")
    encode = partial(model.engine.encode, add_special_tokens=request.add_special_tokens)

    def tokenise() -> Prompts:
        found = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return [token_ids if limit is None else token_ids[-limit:] for token_ids in found]

    return await in_tokenizer_thread(state, tokenise)


def _params(request: CompletionRequest, fields: dict[str, Any]) -> penstock.SamplingParams:
    options = sampling_options(fields)
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
            options.setdefault("prompt_logprobs", request.logprobs)
    return penstock.SamplingParams(**options)


def _completion(
    generation: Generation, request: CompletionRequest, results: list[penstock.Result]
) -> dict[str, Any]:
    """The response to a request that is not streamed; one that only scores has no generated tokens."""
    engine = generation.model.engine
    tokens = Tokens(engine, as_ids=request.return_tokens_as_token_ids)
    choices: list[dict[str, Any]] = []
    for prompt, result in zip(generation.call.prompts, results, strict=True):
        for choice in result.choices:
            text = choice.text
            if request.only_scores:
                text = prompt if isinstance(prompt, str) else engine.decode(prompt)  # type: ignore[arg-type] # token ids
            found: dict[str, Any] = {
                "index": len(choices),
                "text": text,
                "logprobs": _logprobs(tokens, request, result, choice),
                "finish_reason": finish_reason(choice.finish_reason),
                "stop_reason": choice.stop_reason,
            }
            if (positions := prompt_logprobs(tokens, result)) is not None:
                found["prompt_logprobs"] = positions
            if request.return_token_ids:
                found["token_ids"] = () if request.only_scores else choice.token_ids
                found["prompt_token_ids"] = result.prompt_token_ids
            choices.append(found)
    usage = usage_of(*(result.usage for result in results))
    if request.only_scores:
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return {
        "id": generation.id,
        "object": "text_completion",
        "created": generation.created,
        "model": generation.name,
        "choices": choices,
        "usage": usage,
        "system_fingerprint": None,
    }


def _logprobs(
    tokens: Tokens, request: CompletionRequest, result: penstock.Result, choice: penstock.Choice
) -> dict[str, Any] | None:
    """The log probabilities of the generated tokens, with `echo` after those of the prompt."""
    if request.logprobs is None or choice.logprobs is None:
        return None
    token_ids: list[int] = [] if request.only_scores else list(choice.token_ids)
    logprobs: list[float | None] = [] if request.only_scores else list(choice.logprobs)
    tops: list[Any] = [] if request.only_scores else list(choice.top_logprobs or ())
    if request.echo and result.prompt_logprobs is not None:
        token_ids = [*result.prompt_token_ids[: len(result.prompt_logprobs)], *token_ids]
        logprobs = [*result.prompt_logprobs, *logprobs]
        tops = [*(result.prompt_top_logprobs or ()), *tops]
    return completion_logprobs(tokens, token_ids, logprobs, tops)


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
        self._tokens = Tokens(generation.model.engine, as_ids=request.return_tokens_as_token_ids)
        #: The length of the tokens' texts so far, by index.
        self._offsets: dict[int, int] = {}
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
        return self.chunk(choice, request)

    def _logprobs(self, index: int, chunk: penstock.Chunk) -> dict[str, Any] | None:
        if self._request.logprobs is None or chunk.logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        found = completion_logprobs(self._tokens, chunk.token_ids, chunk.logprobs, chunk.top_logprobs, offset)
        self._offsets[index] = offset + sum(map(len, found["tokens"]))
        return found
