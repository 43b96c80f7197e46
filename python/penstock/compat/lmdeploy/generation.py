"""One request: from the arguments of a call to token ids and parameters, and from chunks to items."""

from __future__ import annotations

import operator
import secrets
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import penstock
from penstock._shown import shown
from penstock.compat.lmdeploy import sampling
from penstock.compat.lmdeploy.errors import ErrorCode, UnsupportedError, message_of
from penstock.compat.lmdeploy.outputs import Part, Reader, torch
from penstock.compat.lmdeploy.sessions import RequestFailed
from penstock.compat.prompts import PromptTooLongError, encode_prompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.compat.lmdeploy.engine_context import EngineContext
    from penstock.compat.lmdeploy.generation_config import GenerationConfig
    from penstock.compat.lmdeploy.sessions import Lease

__all__ = ["Ask", "GenOut", "Turn"]

#: Longer messages, in characters, are prepared in a worker thread by `generate`.
LONG_TEXT = 2048

_REASONS: dict[str, Literal["stop", "length", "abort"]] = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
    "cancelled": "abort",
    "interrupted": "abort",
    "unread": "abort",
}


@dataclass(slots=True)
class GenOut:
    """A part of an output. The last item has a `finish_reason`.

    - `response`: The text since the previous item.
    - `history_token_len`: Number of tokens that the session had before.
    - `input_token_len`: Number of tokens of the messages.
    - `generate_token_len`: Number of tokens that were generated, up to and including this item.
    - `finish_reason`: `stop`, `length`, `abort` (cancelled) or `error`; `None` before the end.
    - `token_ids`: The ids since the previous item.
    - `logprobs`: For each of `token_ids`, log probabilities by token id; `None` unless requested.
    - `logits`, `last_hidden_state`: The rows of `token_ids`, and in the first item those of the prompt, as a
      `torch.Tensor`; `None` unless requested.
    - `cached_tokens`: Number of tokens of history and messages that were not computed again.
    - `error_code`, `error_message`: Of an output with the reason `error`.
    """

    response: str
    history_token_len: int
    input_token_len: int
    generate_token_len: int
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    token_ids: list[int] | None = None
    logprobs: list[dict[int, float]] | None = None
    logits: Any = None
    last_hidden_state: Any = None
    cached_tokens: int = 0
    error_code: str | None = None
    error_message: str | None = None


@dataclass(slots=True)
class Ask:
    """The arguments of a call that concern one prompt."""

    messages: Any
    config: GenerationConfig
    input_ids: Sequence[int] | None = None
    template: Any = None  # in place of the engine's
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    do_preprocess: bool = True
    adapter_name: str | None = None
    start: bool = True
    end: bool = True
    step: int = 0
    streams: bool = True
    choice: int = 0  # of `config.n`

    def is_long(self) -> bool:
        """Whether to prepare the request in a worker thread."""
        if self.config.bad_words:  # the first grammar reads the whole vocabulary
            return True
        if isinstance(self.messages, str):
            return len(self.messages) > LONG_TEXT
        return self.input_ids is None


def prepare(
    context: EngineContext, ask: Ask, lease: Lease | None
) -> tuple[Any, penstock.SamplingParams, int]:
    """The token ids and the parameters of a request, and the number of new ids. Raises `RequestFailed`."""
    context.check_sampling(ask.config)
    template = ask.template or context.template_of_adapter(ask.adapter_name)
    new = _input_ids(context, ask, template)
    past = array("i") if lease is None else lease.past
    total = len(past) + len(new)
    if total >= context.session_len:
        message = (
            f"history and input have {total} tokens; session_len is {context.session_len}, "
            "and at least one token is generated"
        )
        raise RequestFailed(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)
    room = context.session_len - total
    wanted = ask.config.max_new_tokens
    if wanted is not None and wanted < 1:
        message = f"max_new_tokens={wanted} is not allowed: it must be at least 1, or None"
        raise RequestFailed(ErrorCode.INVALID_REQUEST, message)
    try:
        options = sampling.options(
            ask.config,
            max_tokens=room if wanted is None else min(wanted, room),
            tokenizer=context.tokenizer,
            template_stop_words=template.stop_words if ask.do_preprocess else None,
            seed=_seed(ask.config, lease),
        )
        if ask.adapter_name is not None:
            options["adapter"] = ask.adapter_name
        if lease is not None and not lease.is_stateless:
            options["cache_salt"] = lease.salt
        elif not context.uses_prefix_cache:
            options["use_prefix_cache"] = False
        params = penstock.SamplingParams(**options)
        if params.output_logits or params.output_hidden_states:
            torch()  # before anything is computed
    except ImportError as error:
        raise RequestFailed(ErrorCode.UNSUPPORTED_FEATURE, str(error)) from error
    except (ValueError, TypeError, AssertionError) as error:
        raise RequestFailed(*failure(error)) from error
    if not past:
        return new, params, len(new)
    ids = past[:]
    ids.extend(new)
    return ids, params, len(new)


def _seed(config: GenerationConfig, lease: Lease | None) -> int:
    if config.random_seed is not None:
        return config.random_seed
    return secrets.randbits(63) if lease is None else lease.seed


def _input_ids(context: EngineContext, ask: Ask, template: Any) -> list[int]:
    """The ids of the messages. Raises `RequestFailed`."""
    try:
        if ask.input_ids is not None:
            ids = _checked(ask.input_ids, context.engine.info.vocabulary_size)
        else:
            if ask.do_preprocess:
                text = template.messages2prompt(ask.messages, sequence_start=ask.start, **ask.variables)
            elif isinstance(ask.messages, str):
                text = ask.messages
            else:
                text = "".join(message["content"] for message in ask.messages)
            ids = encode_prompt(
                context.tokenizer.encode, text, context.session_len, name="session_len", add_bos=ask.start
            )
    except RequestFailed:
        raise
    except PromptTooLongError as error:
        raise RequestFailed(ErrorCode.CONTEXT_LENGTH_EXCEEDED, str(error)) from error
    except Exception as error:  # templates can be code of the program
        message = f"messages are not allowed: {error}"
        raise RequestFailed(ErrorCode.PREPROCESS_FAILED, message) from error
    if not ids:
        raise RequestFailed(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
    return ids


def _checked(token_ids: Sequence[int], vocabulary_size: int) -> list[int]:
    ids = list(map(operator.index, token_ids))
    for token in ids:
        if not 0 <= token < vocabulary_size:
            message = f"input_ids has {shown(token)}; a token id is below {vocabulary_size}"
            raise RequestFailed(ErrorCode.INVALID_REQUEST, message)
    return ids


_NOTHING = Part("", [], None, None, None)


class Turn:
    """The state of a request that runs: it makes items of chunks, and ends the use of its session."""

    def __init__(self, context: EngineContext, ask: Ask) -> None:
        self._context = context
        self.ask = ask
        self.lease: Lease | None = None
        self.request: Any = None
        self.is_cancelled = False
        self.is_over = False
        self.history_len = self.input_len = self.cached = 0
        self._new: Sequence[int] = ()
        self._reader: Any = None  # the `Reader`, once the request is prepared
        self._num_stored: int | None = None  # ids of the output that the session gets; all that were returned
        self._is_started = self._is_finished = False

    def cancel(self) -> None:
        """Cancel the request, in any phase and thread."""
        self.is_cancelled = True
        request = self.request
        if request is not None:
            request.cancel()

    def prepare(self) -> tuple[Any, penstock.SamplingParams]:
        """The prompt and the parameters; raises `RequestFailed`."""
        lease = self.lease
        if lease is not None:
            self.history_len = len(lease.past)
        prompt, params, self.input_len = prepare(self._context, self.ask, lease)
        self._new = prompt[self.history_len :] if self.history_len else prompt
        self._reader = Reader(self._context.tokenizer, self.ask.config, params)
        return prompt, params

    def begin(self, request: Any) -> None:
        """The engine has accepted the request."""
        self.request = request
        self._is_started = True
        if self.is_cancelled or self.is_over:
            request.cancel()

    def read(self, chunk: penstock.Chunk) -> GenOut | None:
        """The item of a chunk that is not the last one; `None` if the chunk is held for the next item."""
        # Runs once per token and stream.
        reader = self._reader
        if not reader.ids:
            self.cached = self.request.usage.cached_tokens
        if not reader.is_plain:
            part = reader.read(chunk)
            return None if part is None else self._item(None, part)
        ids = [*chunk.token_ids]
        reader.ids += ids
        reader.num_returned = count = len(reader.ids)
        return GenOut(
            chunk.text, self.history_len, self.input_len, count, None, ids, None, None, None, self.cached
        )

    def read_last(self, chunk: penstock.Chunk | penstock.Result) -> list[GenOut]:
        """The items of the last chunk, or of the complete result. Ends the use of the session."""
        self.cached = self.request.usage.cached_tokens
        part, self._num_stored = self._reader.read_last(chunk)
        self._is_finished = True
        self.release()
        reason = _REASONS[chunk.finish_reason or "cancelled"]
        if self.ask.config.include_stop_str_in_output and self.ask.streams and reason == "stop":
            return [self._item(reason, part)]
        last = self._item(reason)
        if part.text or part.ids or part.logits is not None or part.hidden_states is not None:
            return [self._item(None, part), last]
        return [last]

    def _item(self, reason: Any, part: Part = _NOTHING) -> GenOut:
        return GenOut(
            part.text,
            self.history_len,
            self.input_len,
            0 if self._reader is None else self._reader.num_returned,
            reason,
            part.ids,
            part.logprobs,
            part.logits,
            part.hidden_states,
            self.cached,
        )

    def aborted(self) -> GenOut:
        """The item of a request that was cancelled before it started."""
        self.release()
        return self._item("abort")

    def failed(self, error: BaseException) -> GenOut:
        """The item of a request that failed; raises an error that is not one of the request."""
        code, message = failure(error)
        self._is_started = False  # the session stays as it was
        self._is_finished = True
        self.release()
        item = self._item("error")
        item.error_code, item.error_message = code, message
        return item

    def release(self) -> None:
        """End the use of the session and cancel what runs."""
        self.is_over = True
        lease, self.lease = self.lease, None
        if self.request is not None and not self._is_finished:
            self.request.cancel()
        if lease is not None:
            lease.release([*self._new, *self._stored()] if self._is_started else None)

    def _stored(self) -> Sequence[int]:
        """The ids of the output that the session gets: without the stop, which templates write themselves."""
        reader = self._reader
        if reader is None:
            return []
        ids: list[int] = reader.ids
        return ids[: reader.num_returned if self._num_stored is None else self._num_stored]


def failure(error: BaseException) -> tuple[str, str]:
    """The code and the message of a failed request; raises an error that is not one of a request."""
    if isinstance(error, RequestFailed):
        return error.code, error.message
    if isinstance(error, (penstock.EngineStoppedError, penstock.OverloadedError, penstock.OutOfMemoryError)):
        return ErrorCode.ENGINE_UNAVAILABLE, message_of(error)
    if isinstance(error, penstock.GenerationError):
        return ErrorCode.INTERNAL_ERROR, message_of(error)
    if isinstance(error, penstock.InvalidRequestError):
        return ErrorCode.INVALID_REQUEST, message_of(error)
    if isinstance(error, UnsupportedError):
        return ErrorCode.UNSUPPORTED_FEATURE, str(error)
    if isinstance(error, (ValueError, TypeError, AssertionError)):
        return ErrorCode.INVALID_REQUEST, str(error)
    raise error
