"""The outputs of many prompts, without an event loop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import penstock
from penstock.compat.lmdeploy.errors import ErrorCode
from penstock.compat.lmdeploy.generation import GenOut, Turn
from penstock.compat.lmdeploy.response import Response
from penstock.compat.lmdeploy.streams import FAILURES, acquire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.compat.lmdeploy.engine_context import EngineContext
    from penstock.compat.lmdeploy.generation import Ask

__all__ = ["infer", "read", "response_of"]

_log = logging.getLogger("penstock.lmdeploy")


def response_of(item: GenOut, index: int = 0, choice: int = 0) -> Response:
    """The `Response` of an item; an error is logged, unless the engine has ended."""
    if item.error_code not in (None, ErrorCode.ENGINE_UNAVAILABLE):
        _log.warning("prompt %d failed: %s (%s)", index, item.error_message, item.error_code)
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
        choice=choice,
        cached_tokens=item.cached_tokens,
        error_code=item.error_code,
        error_message=item.error_message,
    )


class _Request:
    """The request of one prompt of a batch, as `Turn` uses it."""

    def __init__(self, batches: list[Any], index: int) -> None:
        self._batches = batches
        self._index = index
        self.usage: penstock.Usage

    def cancel(self) -> None:
        for batch in self._batches:
            batch.cancel(self._index)


def _response(turn: Turn, item: GenOut, index: int) -> Response:
    return response_of(item, index, turn.ask.choice)


def _with_choices(asks: Iterator[Ask]) -> Iterator[tuple[int, Ask]]:
    """The index of each prompt, and the prompt once for each of its choices."""
    for index, ask in enumerate(asks):
        config = ask.config
        if not isinstance(config.n, int) or config.n <= 1:
            yield index, ask
            continue
        for choice in range(config.n):
            seed = None if config.random_seed is None else config.random_seed + choice
            of_choice = dataclasses.replace(config, n=1, random_seed=seed)
            yield index, dataclasses.replace(ask, config=of_choice, choice=choice)


class _Prompts:
    """Prepares the prompts of a batch, each when the batch takes it."""

    def __init__(
        self, context: EngineContext, asks: Iterator[tuple[int, Ask]], session_ids: Sequence[int] | None
    ) -> None:
        self._context = context
        self._asks = asks
        self._session_ids = session_ids
        self._params: deque[penstock.SamplingParams] = deque()
        self.batches: list[Any] = []  # the batch, once it exists
        self.running: dict[int, tuple[int, Turn]] = {}  # by the index in the batch
        self.failed: deque[Response] = deque()

    def __iter__(self) -> Iterator[Any]:
        num_started = 0
        for index, ask in self._asks:
            turn = Turn(self._context, ask)
            try:
                if self._session_ids is not None:
                    acquire(self._context, turn, self._session_ids[index])
                prompt, params = turn.prepare()
            except FAILURES as error:
                self.failed.append(_response(turn, turn.failed(error), index))
                continue
            except BaseException:
                turn.release()
                raise
            self.running[num_started] = index, turn
            turn.begin(_Request(self.batches, num_started))
            self._params.append(params)
            num_started += 1
            yield prompt
            if self._context.is_closed():  # `end` has the other prompts
                return

    def params(self) -> Iterator[penstock.SamplingParams]:
        """The parameters of the prompts that were taken."""
        while self._params:
            yield self._params.popleft()

    def read(self, item: Any) -> Iterator[Response]:
        """The responses of an item of the batch."""
        index, turn = self.running[item.index]
        if item.error is not None:
            del self.running[item.index]
            yield _response(turn, turn.failed(item.error), index)
            return
        chunk: Any = item.result if isinstance(item, penstock.BatchItem) else item.chunk
        usage = chunk.usage if isinstance(chunk, penstock.Result) else item.usage
        turn.request.usage = usage
        if chunk.finish_reason is None:
            if (part := turn.read(chunk)) is not None:
                yield _response(turn, part, index)
            return
        del self.running[item.index]
        for last in turn.read_last(chunk):
            yield _response(turn, last, index)

    def take_failed(self) -> Iterator[Response]:
        """The responses of prompts that were not started."""
        while self.failed:
            yield self.failed.popleft()

    def end(self, error: penstock.EngineStoppedError | None) -> Iterator[Response]:
        """The responses of the prompts that the batch has no items for: the engine or the batch has ended."""
        for index, turn in self.running.values():
            yield _response(turn, turn.failed(error) if error else turn.aborted(), index)
        for index, ask in self._asks:
            turn = Turn(self._context, ask)
            yield _response(turn, turn.failed(error) if error else turn.aborted(), index)

    def release(self) -> None:
        """End the use of the sessions of what runs."""
        for _index, turn in self.running.values():
            turn.release()


def read(
    context: EngineContext,
    asks: Iterator[tuple[int, Ask]],
    *,
    streams: bool,
    session_ids: Sequence[int] | None = None,
) -> Iterator[Response]:
    """The parts of the outputs of all prompts, each with its index, as they arrive.

    Closing the iterator cancels what runs.
    """
    prompts = _Prompts(context, asks, session_ids)
    blocking = context.engine.blocking
    limit = context.max_concurrency
    batch: Any
    if streams:
        batch = blocking.stream_many(prompts, prompts.params(), concurrency=limit)
    else:
        batch = blocking.generate_many(prompts, prompts.params(), concurrency=limit, ordered=False)
    prompts.batches.append(batch)
    context.batches.add(batch)
    stopped = None
    try:
        with batch:
            try:
                for item in batch:
                    yield from prompts.take_failed()
                    yield from prompts.read(item)
            except penstock.EngineStoppedError as error:
                if not context.is_closed():  # else the prompts were cancelled
                    stopped = error
                    _log.warning("the engine has ended before its prompts: %s", error)
        yield from prompts.take_failed()
        yield from prompts.end(stopped)
    finally:
        context.batches.discard(batch)
        prompts.release()


def infer(context: EngineContext, asks: Iterator[Ask], num_asks: int, *, use_tqdm: bool) -> list[Response]:
    """The outputs of all prompts, in their order; that of the first choice has the others."""
    outputs: dict[tuple[int, int], Response] = {}
    with _progress(num_asks) if use_tqdm else contextlib.nullcontext() as progress:
        for part in read(context, _with_choices(asks), streams=False):
            place = part.index, part.choice
            outputs[place] = outputs[place].extend(part) if place in outputs else part
            if progress is not None:
                progress.update(part.finish_reason is not None and part.choice == 0)
    responses: list[Response] = []
    for _, response in sorted(outputs.items()):
        if response.choice == 0:
            responses.append(response)
        else:
            responses[-1].other_choices.append(response)
    return responses


def _progress(total: int) -> Any:
    """A progress bar. tqdm starts a thread with the first one."""
    import tqdm

    return tqdm.tqdm(total=total)
