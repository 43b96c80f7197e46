"""The engine, as the user of an event loop holds it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import anyio
import anyio.from_thread
import anyio.to_thread
from anyio.lowlevel import RunVar

from penstock import _hub
from penstock._pump import Pump
from penstock._scoring import score_of
from penstock._selection import best_of, with_candidates
from penstock._session import Session, takes_long
from penstock.blocking import Blocking
from penstock.request import Request, Stream

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self, Unpack

    from penstock import _core
    from penstock._core import EngineConfig, ModelInfo, Port, Result, SamplingParams, Score, Stats
    from penstock._options import EngineOptions, Prompt, SamplingOptions
    from penstock._selection import BeamSearch

__all__ = ["Engine"]

Returned = TypeVar("Returned")

#: Each event loop's waiting rooms, one per engine in use there.
_pumps: RunVar[WeakKeyDictionary[Session, Pump]] = RunVar("penstock.pumps")


class Engine:
    """A language model in this process.

        async with Engine("Qwen/Qwen2.5-0.5B-Instruct") as engine:
            request = await engine.start_request("Why is the sky blue?", max_tokens=64)
            async for chunk in request:
                print(chunk.text, end="", flush=True)

    `model` is a Hugging Face directory, a `.gguf` file, or else the id of a model on the Hugging Face hub.
    Keywords are the fields of `EngineConfig`; `config` is such an object, and keywords win over it.
    `progress` is called while the model loads, at most about 20 times a second and in the thread that loads,
    with the bytes loaded so far and altogether; raising there stops the loading.

    Making the object checks the configuration and nothing else. `async with`, or `await start()`, opens it;
    leaving the block, or `await aclose()`, closes it. Without an event loop: `with`, or `blocking.start()`
    and `close()`, and requests by `blocking`.

    An open engine may be used from any number of tasks, event loops and threads at once, whichever of them
    opened it. A request stays on the event loop it was started on.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        config: EngineConfig | None = None,
        progress: Callable[[int, int], object] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._session = Session(model, config, dict(options), progress)

    @property
    def config(self) -> EngineConfig:
        """What was asked for; `info` has what came of it."""
        return self._session.config

    @property
    def blocking(self) -> Blocking:
        """The same words without await, for plain threads."""
        return Blocking(self._session)

    # ---- opening and closing

    async def start(self) -> None:
        """Loads the model, fetching it first if need be. Does nothing when the engine is open.

        Cancelling stops the loading and closes the engine, and so does an error: `ConfigError`,
        `ModelLoadError`, `OutOfMemoryError`, or whatever `progress` raises. Raises `EngineStoppedError` when it was
        closed before.
        """
        if self._session.must_start():
            try:
                path = await anyio.to_thread.run_sync(
                    _hub.resolve, self._session.model, abandon_on_cancel=True
                )
                await anyio.to_thread.run_sync(self._session.open, path, anyio.from_thread.check_cancelled)
            except BaseException:
                self._session.close()
                raise

    async def aclose(self) -> None:
        """Ends open requests as cancelled and frees the model.

        May be called any number of times, from anywhere. Takes as long as the step that runs now. Closing
        cannot be cancelled: a native `asyncio` cancellation ends the waiting, other ones not even that.
        """
        native = self._session.close()
        if native is not None:
            # A limiter of its own: worker threads that wait for this very engine may use up the default one.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(native.shutdown, limiter=anyio.CapacityLimiter(1))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def close(self) -> None:
        """As `aclose`, without an event loop."""
        self.blocking.close()

    def __enter__(self) -> Self:
        self.blocking.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._session)

    # ---- requests

    async def start_request(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> Request:
        """Hands a request to the engine and returns when it is admitted, not when it is computed.

        `prompt` is text, token ids, or messages (mappings with `role` and `content`) for the model's chat
        template. Keywords are the fields of `SamplingParams`; `params` is such an object, and keywords win
        over it. Templates are rendered and long texts tokenised in a worker thread.

        Raises `InvalidRequestError` for what can never work, `OverloadedError` when too many requests wait,
        `EngineStoppedError` when the engine is not open. If the task is cancelled here, so is the request.
        """
        prompt, params = self._session.prepare(prompt, params, dict(options))
        return await self._start(
            partial(self._session.submit, prompt, params), is_long=takes_long(prompt, params)
        )

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> Stream:
        """`async with engine.stream(...) as request`: as `start_request`, and cancelled on the way out."""
        return Stream(partial(self.start_request, prompt, params, **options))

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> Result:
        """The whole answer, or the `n` best. If the task is cancelled, so is the request.

        What cannot be streamed is for this alone: `best_of` and `num_beams`.
        """
        prompt, params = self._session.prepare(prompt, params, dict(options))
        is_long = takes_long(prompt, params)
        if params.num_beams > 1:
            search = await _call(lambda _: self._session.search(prompt, params), is_long=is_long)
            while search.is_running:
                search.advance(await self._ask(search))
            return search.result()
        submit = partial(self._session.submit, prompt, with_candidates(params))
        async with Stream(partial(self._start, submit, is_long=is_long)) as request:
            return best_of(await request.result(), params)

    async def score(
        self, text: str | Sequence[int], *, cache_salt: str | None = None, priority: int = 0
    ) -> Score:
        """How likely the model finds a text, or token ids: one pass over it, nothing is generated.

        Text gets the special tokens that begin a prompt. At most `max_model_len` tokens. Nothing is taken
        from the prefix cache, for every position is computed; what was computed is left there.

        Raises as `start_request`, `EngineStoppedError` where the engine is closed before the whole text is scored,
        `GenerationError` where it had to give way (`preemption_mode="interrupt"`). If the task is cancelled, so
        is the request.
        """
        params = self._session.prepare_scoring(text, cache_salt, priority)
        submit = partial(self._session.submit_scoring, text, params)
        async with Stream(partial(self._start, submit, is_long=takes_long(text, params))) as request:
            return score_of(await request.result())

    async def _start(
        self, submit: Callable[[Port, Callable[[], None]], _core.Request], *, is_long: bool
    ) -> Request:
        pump = self._pump()
        # A thread that is abandoned drops the native request, which is a cancel.
        request = Request(self._session, await _call(partial(submit, pump.port), is_long=is_long), pump)
        try:
            await request.admission()
        except BaseException:
            request.cancel()
            raise
        return request

    async def _ask(self, search: BeamSearch) -> list[Result]:
        """One step of a beam search: all its requests side by side."""
        pump = self._pump()
        requests: list[Request] = []
        try:
            requests.extend(Request(self._session, native, pump) for native in search.requests(pump.port))
            return [await request.result() for request in requests]
        finally:
            for request in requests:
                request.cancel()

    # ---- questions, which a closed engine answers too

    @property
    def info(self) -> ModelInfo:
        """The model and the sizes it runs with."""
        return self._session.native.info

    def stats(self) -> Stats:
        """What the engine is doing now; costs next to nothing."""
        return self._session.native.stats()

    def reset_prefix_cache(self) -> None:
        """Forgets every block that is kept for reuse; requests that run go on undisturbed.

        For when what the cache keeps should be kept no longer; memory needs no such help. Takes effect
        before any request that is started afterwards. Raises `EngineStoppedError` when the engine is not open.
        """
        self._session.check_open().reset_prefix_cache()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; `add_special_tokens` adds those that begin or end a prompt.

        In the calling thread, about a second for a million characters; the interpreter is released.
        """
        return self._session.native.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._session.native.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str = "default",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text that the model's chat template makes of messages and tools, ready to be answered.

        Some models have several, such as `tool_use`; a request's messages go through `default`. To ask with
        another, encode its text with `add_special_tokens=False`: templates write special tokens themselves.

        Rendered in the calling thread, which a request's messages are not: a template may take its time, at
        most ten seconds.

        Raises `InvalidRequestError` where the model has no such template or it does not take these messages.
        """
        return self._session.apply_chat_template(messages, template, tools)

    def _pump(self) -> Pump:
        """The waiting room of the event loop that runs this."""
        try:
            pumps = _pumps.get()
        except LookupError:
            pumps = WeakKeyDictionary()
            _pumps.set(pumps)
        pump = pumps.get(self._session)
        if pump is None:
            pump = pumps[self._session] = Pump()
        return pump


class _Abandoned(Exception):  # noqa: N818 - nobody sees it
    """Ends what a thread does for a task that is gone."""


async def _call(function: Callable[[Callable[[], None]], Returned], *, is_long: bool) -> Returned:
    """Calls it, where it takes long in a worker thread, which a cancellation abandons.

    It gets what raises then, for AnyIO's own `check_cancelled` knows nothing of threads that are abandoned.
    """
    is_abandoned = False

    def check_cancelled() -> None:
        if is_abandoned:
            raise _Abandoned

    if not is_long:
        return function(check_cancelled)
    try:
        return await anyio.to_thread.run_sync(function, check_cancelled, abandon_on_cancel=True)
    finally:
        is_abandoned = True
