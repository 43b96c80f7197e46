"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import penstock
from penstock.server.calls import Call
from penstock.server.choices import answer_of, num_logprobs, send_choices
from penstock.server.events import OpenAIEvents
from penstock.server.generation import begin, generate, stream
from penstock.server.logprobs import Tokens, chat_logprobs, prompt_logprobs
from penstock.server.messages import apply_allowed_tools, chat_messages
from penstock.server.prompts import template_options
from penstock.server.protocol.openai_chat import ChatRequest
from penstock.server.sampling import Unsupported, beam_names, fields_named, read_request, sampling_options
from penstock.server.usage import finish_reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.server.calls import Generation
    from penstock.server.http import Exchange
    from penstock.server.state import State

__all__ = ["chat_completions"]

#: The sampling parameter that has another name in a request.
_NAMES = {"max_tokens": "max_completion_tokens"}
_FOR_COMPLETIONS = "left out: it is for /v1/completions"
UNSUPPORTED: Unsupported = {
    "add_special_tokens": ((False,), "false: the chat template writes them"),
    "audio": ((), "left out: the model writes text only"),
    "do_preprocess": ((True,), "true: /v1/completions takes texts without a chat template"),
    "echo": ((False,), _FOR_COMPLETIONS),
    "function_call": (("auto", "none"), "left out: use tool_choice"),
    "functions": (([],), "left out: use tools"),
    "modalities": ((["text"],), '["text"]'),
    "moderation": ((), "left out: the server does not moderate"),
    "task": ((), "left out: a message says what to do"),
    "truncate_prompt_tokens": ((), _FOR_COMPLETIONS),
    "truncation_side": (("left", "right"), _FOR_COMPLETIONS),
    "web_search_options": ((), "left out: the server does not search"),
}


async def chat_completions(state: State, exchange: Exchange) -> None:
    """Answer a chat."""
    fields, request = await read_request(state, exchange, ChatRequest, (), UNSUPPORTED)
    names = _NAMES if request.max_completion_tokens is not None else {}
    with fields_named({**names, **beam_names(fields)}):
        call = await exchange.in_body_thread(_call, state, request, fields)
        generation = begin(state, exchange, "chatcmpl-", request.model, call, prompt="messages")
        fields.clear()
        if request.stream:
            await stream(state, generation, _ChatEvents(generation, request), exchange)
            return
        results = await generate(state, generation, exchange)
    await _send(state, exchange, generation, request, results[0])


def _call(state: State, request: ChatRequest, fields: dict[str, Any]) -> Call:
    names = ("enable_thinking", "reasoning_effort", "verbosity")
    variables = {name: getattr(request, name) for name in names}
    template = template_options(state.settings, request, variables)
    given = request.messages
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return Call([chat_messages(messages)], _params(request, fields), template)


def _params(request: ChatRequest, fields: dict[str, Any]) -> penstock.SamplingParams:
    options = sampling_options(fields)
    apply_allowed_tools(options)
    if request.max_completion_tokens is not None:
        options["max_tokens"] = request.max_completion_tokens
    if request.logprobs or request.top_logprobs:
        options["logprobs"] = request.logprobs
        options["top_logprobs"] = request.top_logprobs
    return penstock.SamplingParams(**options)


async def _send(
    state: State, exchange: Exchange, generation: Generation, request: ChatRequest, result: penstock.Result
) -> None:
    """Send a response that is not streamed."""
    answer = answer_of(generation, "chat.completion") | {"prompt_logprobs": None}
    params = generation.call.params
    if params.prompt_logprobs is not None:
        tokens = Tokens(generation.model.engine, as_ids=request.return_tokens_as_token_ids)
        answer["prompt_logprobs"] = await state.response_threads.run(
            prompt_logprobs, tokens, result, params.prompt_logprobs
        )
    if request.return_token_ids:
        answer["prompt_token_ids"] = result.prompt_token_ids
    size = num_logprobs(params, [result])
    await send_choices(state, exchange, answer, _choices(generation, request, result), size)


def _choices(
    generation: Generation, request: ChatRequest, result: penstock.Result
) -> Iterator[dict[str, Any]]:
    """The choices of a response that is not streamed."""
    tokens = Tokens(generation.model.engine, as_ids=request.return_tokens_as_token_ids)
    for choice in result.choices:
        calls = [call.to_dict() for call in choice.tool_calls]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.content if choice.content or not calls else None,
            "refusal": None,
        }
        message |= _reasoning(choice.reasoning if request.include_reasoning else None)
        if calls:
            message["tool_calls"] = calls
        found = {
            "index": choice.index,
            "message": message,
            "logprobs": _logprobs(tokens, choice),
            "finish_reason": finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }
        if request.return_token_ids:
            found["token_ids"] = choice.token_ids
        yield found


def _logprobs(tokens: Tokens, part: penstock.Choice | penstock.Chunk) -> dict[str, Any] | None:
    logprobs = part.logprobs
    if logprobs is None:
        return None
    return chat_logprobs(tokens, part.token_ids, logprobs, part.top_logprobs)


def _reasoning(text: str | None) -> dict[str, str | None]:
    """The reasoning under vLLM's name and under its former one, which other servers and clients use.

    Clients read both also where there is none: they are null then.
    """
    return dict.fromkeys(("reasoning", "reasoning_content"), text or None)


class _ChatEvents(OpenAIEvents):
    """The events of a streamed chat."""

    def __init__(self, generation: Generation, request: ChatRequest) -> None:
        super().__init__(
            generation,
            "chat.completion.chunk",
            request.stream_options,
            before=b',"delta":{"content":',
            after=b',"reasoning":null,"reasoning_content":null},"logprobs":null,"finish_reason":null',
        )
        self._request = request
        self._tokens = Tokens(generation.model.engine, as_ids=request.return_tokens_as_token_ids)
        self._is_plain = not (self.has_continuous_usage or request.return_token_ids or request.logprobs)
        self._has_prompt = False  # whether a chunk has had the prompt's token ids

    def of(self, chunk: penstock.Chunk, prompt: int, request: penstock.Request) -> bytes:
        """The events of a chunk; the first one of a choice has the role."""
        index = chunk.index
        if self.is_first(index):
            return self._role(index, request) + self.of(chunk, prompt, request)
        if self._is_plain and chunk.finish_reason is None and not chunk.reasoning and not chunk.tool_calls:
            return self.text(index, chunk.content)
        return self.chunk(self._choice(chunk), request, len(chunk.token_ids))

    def _role(self, index: int, request: penstock.Request) -> bytes:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": "", **_reasoning(None)},
            "logprobs": None,
            "finish_reason": None,
        }
        if not self._request.return_token_ids or self._has_prompt:
            return self.chunk(choice, request, 0)
        self._has_prompt = True
        return self.chunk(choice, request, 0, prompt_token_ids=request.prompt_token_ids)

    def _choice(self, chunk: penstock.Chunk) -> dict[str, Any]:
        """The choice of an event that has not only text."""
        reasoning = chunk.reasoning if self._request.include_reasoning else None
        delta: dict[str, Any] = {}
        if chunk.tool_calls:
            delta["tool_calls"] = [call.to_dict() for call in chunk.tool_calls]
        if chunk.content or not (delta or reasoning):
            delta["content"] = chunk.content
        delta |= _reasoning(reasoning)
        choice: dict[str, Any] = {
            "index": chunk.index,
            "delta": delta,
            "logprobs": _logprobs(self._tokens, chunk),
            "finish_reason": finish_reason(chunk.finish_reason),
        }
        if chunk.finish_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = chunk.token_ids
        return choice
