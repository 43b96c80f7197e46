"""`Instance`: what `AsyncEngine.get_generator` returns, with requests of token ids."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.compat.lmdeploy import scores
from penstock.compat.lmdeploy.checks import check_arguments, token_ids
from penstock.compat.lmdeploy.errors import ErrorCode
from penstock.compat.lmdeploy.generation import Ask, GenOut
from penstock.compat.lmdeploy.prompts import check_step, config_of
from penstock.compat.lmdeploy.streams import AsyncStream, read_blocking

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.compat.lmdeploy.engine_context import EngineContext
    from penstock.compat.lmdeploy.generation_config import GenerationConfig

__all__ = ["EngineOutput", "Instance", "ResponseType"]


class ResponseType(enum.Enum):
    """The state of a request."""

    SUCCESS = enum.auto()
    FINISH = enum.auto()
    ENGINE_STOP_ERROR = enum.auto()
    SESSION_REPEAT = enum.auto()
    SESSION_NOT_EXIST = enum.auto()
    HANDLER_NOT_EXIST = enum.auto()
    INPUT_LENGTH_ERROR = enum.auto()
    INTERNAL_ENGINE_ERROR = enum.auto()
    CANCEL = enum.auto()
    PREFIX_CACHE_CONFLICT = enum.auto()
    NO_QUEUE = enum.auto()
    NOT_SUPPORTED = enum.auto()
    OUT_OF_MEMORY = enum.auto()


_ERRORS: dict[str | None, ResponseType] = {
    ErrorCode.REQUEST_CONFLICT: ResponseType.SESSION_REPEAT,
    ErrorCode.SESSION_NOT_EXIST: ResponseType.SESSION_NOT_EXIST,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: ResponseType.INPUT_LENGTH_ERROR,
    ErrorCode.ENGINE_UNAVAILABLE: ResponseType.ENGINE_STOP_ERROR,
    ErrorCode.UNSUPPORTED_FEATURE: ResponseType.NOT_SUPPORTED,
}


class EngineOutput(NamedTuple):
    """The output of a request of `Instance` so far.

    - `status`: `SUCCESS` before the last one, then `FINISH`, `CANCEL` or an error.
    - `token_ids`: All ids so far.
    - `num_token`: Their number.
    """

    status: ResponseType
    token_ids: list[int]
    num_token: int


class Instance:
    """Requests of token ids, for any number of sessions at the same time.

    `async_stream_infer` and `stream_infer` return tuples, `EngineOutput`. `sequence_start`, `sequence_end`,
    `step` and `stop` are those of `AsyncEngine.generate`.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def async_stream_infer(
        self,
        session_id: int,
        input_ids: Sequence[int],
        gen_config: GenerationConfig | None = None,
        *,
        sequence_start: bool = True,
        sequence_end: bool = False,
        step: int = 0,
        stop: bool = False,
        stream_output: bool = True,
        adapter_name: str | None = None,
    ) -> AsyncGenerator[EngineOutput, None]:
        """The output of a request, as an async generator."""
        ask = self._ask(
            input_ids, gen_config, sequence_start, sequence_end, step, stream_output, adapter_name
        )
        stream = AsyncStream(self._context, session_id, ask)
        if stop:
            self.cancel(session_id)
            stream.set_items([GenOut("", 0, 0, 0, "abort")])
        return _Outputs(stream)

    def stream_infer(
        self,
        session_id: int,
        input_ids: Sequence[int],
        gen_config: GenerationConfig | None = None,
        *,
        sequence_start: bool = True,
        sequence_end: bool = False,
        step: int = 0,
        stop: bool = False,
        stream_output: bool = True,
        adapter_name: str | None = None,
    ) -> Iterator[EngineOutput]:
        """The output of a request, without an event loop."""
        if stop:
            self.cancel(session_id)
            yield EngineOutput(ResponseType.CANCEL, [], 0)
            return
        ask = self._ask(
            input_ids, gen_config, sequence_start, sequence_end, step, stream_output, adapter_name
        )
        ids: list[int] = []
        for item in read_blocking(self._context, session_id, ask):
            yield _output(item, ids)

    def infer(
        self,
        session_id: int,
        prompt_token_ids: Sequence[int],
        gen_config: GenerationConfig | None = None,
        **options: Any,
    ) -> EngineOutput:
        """The last output of `stream_infer`."""
        *_, last = self.stream_infer(session_id, prompt_token_ids, gen_config, **options)
        return last

    def _ask(
        self,
        input_ids: Sequence[int],
        gen_config: GenerationConfig | None,
        start: bool,
        end: bool,
        step: int,
        streams: bool,
        adapter_name: str | None,
    ) -> Ask:
        self._context.check_open()
        check_arguments(
            sequence_start=start, sequence_end=end, stream_output=streams, adapter_name=adapter_name
        )
        check_step(step)
        return Ask(
            None,
            config_of(gen_config, {}),
            token_ids("input_ids", input_ids),
            adapter_name=adapter_name,
            start=start,
            end=end,
            step=step,
            streams=streams,
        )

    def decode(self, input_ids: Any) -> Any:
        """The logits of all positions; see `AsyncEngine.get_logits`."""
        return scores.logits(self._context, input_ids)

    def get_ppl(self, input_ids: Any) -> list[float]:
        """The mean cross entropy of each text; see `AsyncEngine.get_ppl`."""
        return scores.mean_cross_entropies(self._context, input_ids)

    def cancel(self, session_id: int) -> None:
        """Cancel the session's request, if there is one."""
        self._context.sessions.stop(self._context.sessions.id_of(session_id))

    def end(self, session_id: int) -> None:
        """Forget the session."""
        self._context.sessions.end(self._context.sessions.id_of(session_id))

    async def async_cancel(self, session_id: int) -> None:
        """The same as `cancel`."""
        self.cancel(session_id)

    async def async_end(self, session_id: int) -> None:
        """The same as `end`."""
        self.end(session_id)


class _Outputs(AsyncGenerator[EngineOutput, None]):
    """The outputs of a stream. Dropping it drops the stream, which cancels the request."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self._ids: list[int] = []

    async def __anext__(self) -> EngineOutput:
        return _output(await anext(self._stream), self._ids)

    async def asend(self, value: None) -> EngineOutput:
        return await anext(self)

    async def athrow(self, typ: Any, val: Any = None, tb: Any = None) -> EngineOutput:
        await self.aclose()
        return await super().athrow(typ, val, tb)

    async def aclose(self) -> None:
        self._stream.close()


def _output(item: GenOut, ids: list[int]) -> EngineOutput:
    """The output after this item, which is added to `ids`."""
    ids += item.token_ids or []
    if item.finish_reason is None:
        state = ResponseType.SUCCESS
    elif item.error_code is not None:
        state = _ERRORS.get(item.error_code, ResponseType.INTERNAL_ENGINE_ERROR)
    else:
        state = ResponseType.CANCEL if item.finish_reason == "abort" else ResponseType.FINISH
    return EngineOutput(state, [*ids], len(ids))
