"""`/v1/completions`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.to_thread

import penstock
from penstock.server.errors import invalid
from penstock.server.events import OpenAIEvents
from penstock.server.generation import generate, stream
from penstock.server.http import converted
from penstock.server.logprobs import Tokens, completion_logprobs, prompt_logprobs
from penstock.server.protocol.openai_completions import CompletionRequest
from penstock.server.sampling import fields_named, sampling_options, warn_unknown
from penstock.server.state import Generation
from penstock.server.usage import finish_reason, usage_of

if TYPE_CHECKING:
    from penstock.server.http import Exchange
    from penstock.server.state import State

    Prompts = list[str | list[int]]

__all__ = ["completions"]

#: The sampling parameter that has another name in a request.
_NAMES = {"top_logprobs": "logprobs"}
_FIELDS = frozenset(CompletionRequest.__struct_fields__)
#: OpenAI's default of `max_tokens`.
_MAX_TOKENS = 16


async def completions(state: State, exchange: Exchange) -> None:
    """Continue one or more texts."""
    fields = await exchange.read_object()
    warn_unknown(fields, _FIELDS)
    request = converted(fields, CompletionRequest)
    model, name = state.model(request.model)
    if request.suffix:
        raise invalid("suffix", request.suffix, "left out: the model cannot insert text")
    with fields_named(_NAMES):
        await _answer(state, exchange, request, fields, Generation("cmpl", model, name))


async def _answer(
    state: State,
    exchange: Exchange,
    request: CompletionRequest,
    fields: dict[str, Any],
    generation: Generation,
) -> None:
    prompts = _prompts(request, state.settings.max_prompts)
    params = _params(request, fields)
    if len(prompts) * params.n > (limit := state.settings.max_outputs):
        raise invalid("n", params.n, f"at most {limit} divided by the number of prompts, {len(prompts)}")
    if request.stream and params.prompt_logprobs is not None:
        cause = "prompt_logprobs" if fields.get("prompt_logprobs") is not None else "echo"
        raise invalid(cause, fields[cause], "left out when stream is true and log probabilities are returned")
    prompts = await _prepared(state, generation.model.engine, request, prompts)
    if request.stream:
        events = _CompletionEvents(generation, request, params.n)
        await stream(state, generation, prompts, params, {}, events, exchange)
        return
    results = await generate(state, generation, prompts, params, {}, exchange)
    if results is not None:
        is_scoring = fields.get("max_tokens") == 0
        answer = _completion(generation, request, prompts, results, is_scoring=is_scoring)
        await exchange.send_json(answer)


def _prompts(request: CompletionRequest, limit: int) -> Prompts:
    """The prompts of a request, each a text or token ids."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("prompt", given, "a text, token ids, or a list of them that is not empty")
    if all(isinstance(item, int) for item in given):
        return [given]  # type: ignore[list-item] # as just checked
    if any(isinstance(item, int) for item in given):
        raise invalid("prompt", given, "a text, token ids, or a list of texts or of lists of token ids")
    if len(given) > limit:
        raise invalid("prompt", f"a list of {len(given)}", f"a list of at most {limit} prompts")
    return given  # type: ignore[return-value] # as just checked


def _params(request: CompletionRequest, fields: dict[str, Any]) -> penstock.SamplingParams:
    options = sampling_options(fields)
    if options.get("max_tokens") == 0 and request.echo and not request.stream:
        options["max_tokens"] = 1  # the prompt is scored; the token is left out of the response
    elif request.echo:
        options["echo"] = True
    options.setdefault("max_tokens", _MAX_TOKENS)
    if request.logprobs is not None:
        options["logprobs"] = True
        options["top_logprobs"] = request.logprobs
        if request.echo:
            options.setdefault("prompt_logprobs", request.logprobs)
    return penstock.SamplingParams(**options)


async def _prepared(
    state: State, engine: penstock.Engine, request: CompletionRequest, prompts: Prompts
) -> Prompts:
    """The prompts, tokenised here if the engine's own way is not the one that is asked for."""
    limit = request.truncate_prompt_tokens
    if limit is None and request.add_special_tokens:
        return prompts
    if limit == -1:
        limit = engine.info.max_model_len - 1
    elif limit is not None and limit < 1:
        raise invalid("truncate_prompt_tokens", limit, "-1, or 1 or more")
    encode = partial(engine.encode, add_special_tokens=request.add_special_tokens)

    def tokenise() -> Prompts:
        found = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return [token_ids if limit is None else token_ids[-limit:] for token_ids in found]

    return await anyio.to_thread.run_sync(tokenise, limiter=state.tokenizer_threads)


def _completion(
    generation: Generation,
    request: CompletionRequest,
    prompts: Prompts,
    results: list[penstock.Result],
    *,
    is_scoring: bool,
) -> dict[str, Any]:
    """The response to a request that is not streamed; with `is_scoring`, without the generated tokens."""
    engine = generation.model.engine
    tokens = Tokens(engine, as_ids=request.return_tokens_as_token_ids)
    choices: list[dict[str, Any]] = []
    for prompt, result in zip(prompts, results, strict=True):
        for choice in result.choices:
            text = choice.text
            if is_scoring:
                text = prompt if isinstance(prompt, str) else engine.decode(prompt)
            found: dict[str, Any] = {
                "index": len(choices),
                "text": text,
                "logprobs": _logprobs(tokens, request, result, choice, is_scoring=is_scoring),
                "finish_reason": finish_reason(choice.finish_reason),
                "stop_reason": choice.stop_reason,
            }
            if (positions := prompt_logprobs(tokens, result)) is not None:
                found["prompt_logprobs"] = positions
            if request.return_token_ids:
                found["token_ids"] = () if is_scoring else choice.token_ids
                found["prompt_token_ids"] = result.prompt_token_ids
            choices.append(found)
    usage = usage_of(*(result.usage for result in results))
    if is_scoring:
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
    tokens: Tokens,
    request: CompletionRequest,
    result: penstock.Result,
    choice: penstock.Choice,
    *,
    is_scoring: bool,
) -> dict[str, Any] | None:
    """The log probabilities of the generated tokens, with `echo` after those of the prompt."""
    if request.logprobs is None or choice.logprobs is None:
        return None
    token_ids: list[int] = [] if is_scoring else list(choice.token_ids)
    logprobs: list[float | None] = [] if is_scoring else list(choice.logprobs)
    tops: list[Any] = [] if is_scoring else list(choice.top_logprobs or ())
    if request.echo and result.prompt_logprobs is not None:
        token_ids = [*result.prompt_token_ids[: len(result.prompt_logprobs)], *token_ids]
        logprobs = [*result.prompt_logprobs, *logprobs]
        tops = [*(result.prompt_top_logprobs or ()), *tops]
    return completion_logprobs(tokens, token_ids, logprobs, tops)


class _CompletionEvents(OpenAIEvents):
    """The events of streamed completions."""

    def __init__(self, generation: Generation, request: CompletionRequest, n: int) -> None:
        super().__init__(
            generation,
            "text_completion",
            request.stream_options,
            before=b',"text":',
            after=b',"logprobs":null,"finish_reason":null',
        )
        self._request = request
        self._n = n
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
