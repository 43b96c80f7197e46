"""`Engine`: the public asynchronous API, and the entry point of the blocking one."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload
from weakref import WeakKeyDictionary

import anyio
import anyio.from_thread
from anyio.lowlevel import RunVar

from penstock import _attributes, _core, _hub
from penstock._core import Port
from penstock._hub_files import ADAPTER_FILES, MODEL_FILES, FileSet
from penstock._pump import Pump
from penstock._session import Session, adapter_errors, check_seconds, num_chars, should_offload
from penstock._threads import run_in_thread
from penstock._workers import run_slow
from penstock.batch import Batch, BatchStream, Chunks, Results
from penstock.blocking import Blocking
from penstock.embeddings import Pooling
from penstock.kv_events import KvEventStream
from penstock.request import Request, Stream
from penstock.reranking import Documents, Reranker

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Literal, NoReturn, Self, Unpack

    from penstock._core import (
        Adapter,
        EngineConfig,
        Health,
        Host,
        ModelInfo,
        ProfileRow,
        Result,
        SamplingParams,
        Score,
        Stats,
    )
    from penstock._options import BatchPrompt, EngineOptions, MessageModel, Prompt, RequestOptions
    from penstock._session import PreparedPrompt
    from penstock._workers import Kind
    from penstock.embeddings import Embeddings
    from penstock.reranking import Ranking

__all__ = ["Engine"]

Returned = TypeVar("Returned")

#: The pumps of each event loop: one for each engine that the loop uses.
_pumps: RunVar[WeakKeyDictionary[Session, Pump]] = RunVar("penstock.pumps")


class Engine(metaclass=_attributes.Hinted):
    """A language model in this process.

        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        async with Engine("qwen3-0.6b") as engine:
            async with engine.stream(messages, max_tokens=256) as request:
                async for chunk in request:
                    print(chunk.text, end="", flush=True)

    `model` is a Hugging Face model directory, a `.gguf` file, a model of the Hugging Face hub, or a converted
    model: its directory, its `.tar` file, or the contents of that file as bytes. A model of the hub is
    `owner/name`, `owner/name:Q4_K_M` (the GGUF file of a quantisation), `owner/name/file.gguf`, or a short
    name that `penstock models` lists, such as `qwen3-0.6b`; `owner/name@revision` is a revision. It is
    downloaded when the engine is opened. A path that exists takes precedence.
    Keyword arguments are the fields of `EngineConfig`; they override those of `config`.
    `host` has the threads and the memory that engines share; by default, all engines of the process.
    `progress(done, total)` is called with byte counts while the model loads, at most about 20 times per
    second, in the loading thread. An exception raised in it stops the loading.

    The constructor only checks the configuration and raises `ConfigError`. `async with` or `await start()`
    opens the engine; leaving the block or `await aclose()` closes it. Without an event loop, use `with`, or
    `blocking.start()` and `close()`, and start requests with `blocking`.

    An open engine can be used from any number of tasks, event loops and threads at the same time. A request
    belongs to the event loop that it was started on.

    `info`, `stats()`, `profile()`, `encode()`, `decode()`, `token_bytes()`, `token_names()`,
    `apply_chat_template()` and `count_tokens()` also work on a closed engine; before the engine is opened
    they raise `EngineStoppedError`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | bytearray | memoryview,
        *,
        config: EngineConfig | None = None,
        host: Host | None = None,
        progress: Callable[[int, int], object] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._session = Session(model, config, dict(options), host, progress)

    @property
    def config(self) -> EngineConfig:
        """The configuration as given; `info` has the values in effect."""
        return self._session.config

    @property
    def host(self) -> Host:
        """The threads and the memory that the engine shares with others: `host`, or those of the process."""
        return self._session.host

    @property
    def name(self) -> str:
        """The model as given: a path or the name on the hub; empty for a model of bytes."""
        return self._session.name

    @property
    def is_running(self) -> bool:
        """Whether requests can be started: the engine is open, and has not crashed or lost its device."""
        return self._session.is_running

    @property
    def blocking(self) -> Blocking:
        """The same methods without `await`, for threads without an event loop."""
        return Blocking(self._session)

    # ---- opening and closing

    async def start(self) -> None:
        """Load the model, after downloading it if necessary. Does nothing if the engine is open.

        Raises `ConfigError`, `DeviceUnavailableError`, `ModelLoadError`, `OutOfMemoryError`, any exception
        that `progress` raises, and `EngineStoppedError` if the engine was closed before. An error or a
        cancellation closes the engine.
        """
        if self._session.must_start():
            try:
                await run_in_thread(self._session.check_device, abandon_on_cancel=False)
                path = await _find_files(self._session.model)
                load = partial(self._session.open, path, anyio.from_thread.check_cancelled)
                await run_in_thread(load, abandon_on_cancel=False)
            except BaseException:
                self._session.close()
                raise

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Cancel open requests, stop the engine's threads and free the model.

        With `drain`, open requests may finish for up to this many seconds (`math.inf`: without a limit),
        while new ones raise `EngineStoppedError`. Returns as soon as all have finished. A request whose
        output is not read does not finish.

        Can be called repeatedly, and from any task, loop or thread; a call without `drain` ends the drain of
        another. Waits for the current step. Closing cannot be cancelled: a native `asyncio` cancellation
        only ends the wait, an AnyIO cancellation has no effect. Either ends a drain: the open requests are
        cancelled, the engine is closed, and then the cancellation is raised. Raises `ConfigError` if `drain`
        is negative or not a number, and `OSError` after closing if a drain has no file descriptor left.
        """
        seconds = check_seconds("drain", drain)
        try:
            await self._drain(seconds)
        finally:
            await _wait_for_end(self._session.close())
            await self._join_publisher()

    async def sleep(self, *, drain: float = 0.0) -> None:
        """Free the weights and the KV cache until `wake`; the engine object stays the same.

        Open requests are cancelled, or may finish for up to `drain` seconds as in `aclose`. Until `wake` has
        returned, requests raise `EngineStoppedError`; `info`, `stats()`, `encode()`, `decode()` and
        `apply_chat_template()` work. Does nothing if the engine is asleep.

        A cancellation ends a drain but not the sleep, as in `aclose`. Raises `EngineStoppedError` if the
        engine is not open, `ConfigError` if `drain` is negative or not a number.
        """
        seconds = check_seconds("drain", drain)
        native = self._session.check_may_sleep()
        try:
            await self._drain(seconds)
        finally:
            await _wait_for_end(self._session.stop_to_sleep(native))

    async def wake(self) -> None:
        """Load the model again after `sleep`, from the same files and with the same configuration.

        Outputs are the same as before, bit for bit. The prefix cache is empty and the numbers of `stats()`
        start from zero. `progress` is called as in `start`. Does nothing if the engine is open. Adapters are
        loaded again, too, with other contents if their files have changed; one that cannot be loaded is an
        `AdapterLoadError`; `unload_adapter` drops it.

        Raises as `start` does; after an error or a cancellation the engine is asleep, and `wake` can be
        called again. Raises `EngineStoppedError` if the engine was never opened or is closed.
        """
        if self._session.must_wake():
            load = partial(self._session.reopen, anyio.from_thread.check_cancelled)
            try:
                await run_in_thread(load, abandon_on_cancel=False)
            except BaseException:
                self._session.stay_asleep()  # also if the thread was never started
                raise

    async def _join_publisher(self) -> None:
        """Wait until the sockets of KV events are closed."""
        publisher = self._session.publisher
        if publisher is not None:
            with anyio.CancelScope(shield=True):
                await run_in_thread(publisher.join, abandon_on_cancel=False)

    async def _drain(self, seconds: float) -> None:
        """Let open requests finish for this time; new ones are refused."""
        native = self._session.drain() if seconds > 0 else None
        if native is not None:
            port = Port()
            native.ring_at_end(port)
            with anyio.move_on_after(seconds):
                await anyio.wait_readable(port.fileno())

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

    def close(self, *, drain: float = 0.0) -> None:
        """The same as `aclose`, without an event loop: blocks the calling thread."""
        self.blocking.close(drain=drain)

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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise _attributes.missing(self, name, _attributes.ENGINE_HINTS)

    # ---- requests

    async def start_request(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Submit a request; returns once the engine has accepted it, before anything is computed.

        `prompt` is text, token ids, or messages (mappings with `role` and `content`) for the model's chat
        template; these can also be the keyword `messages`. Other keyword arguments are the fields of
        `SamplingParams`; they override those of `params`. Chat templates are rendered and long texts
        tokenised in a worker thread.

        Raises `InvalidRequestError` if the request can never run, `OverloadedError` if the waiting queue is
        full, `EngineStoppedError` if the engine is not open. Cancelling the task cancels the request.
        """
        is_large, prepared, params = await self._prepare(prompt, params, dict(options))
        submit = partial(self._session.submit, prepared, params)
        in_thread = should_offload(prepared, params)
        request = await self._start(submit, prepared, in_thread=in_thread, is_large=is_large)
        self._session.track(request)
        return request

    def abort(self, request_id: int) -> bool:
        """Cancel the request with this `Request.id`; can be called from any thread, and never waits.

        It ends as after `Request.cancel()`: its reader gets the output so far, with the finish reason
        `cancelled`. Returns whether there is such a request and it had not ended. Requests of `generate` and
        of batches have no id that a caller could know; `generate_many(...).cancel(index)` cancels those.
        """
        return self._session.abort(request_id)

    async def _prepare(
        self, prompt: Prompt | None, params: SamplingParams | None, options: dict[str, Any]
    ) -> tuple[bool, PreparedPrompt, SamplingParams]:
        """Whether the prompt is a large chat, which is copied in a thread, and `Session.prepare`."""
        is_large = self._session.is_large_chat(prompt, params, options)
        prepare = partial(self._session.prepare, prompt, params, options)
        if not is_large:
            return False, *prepare()
        self._session.check_room()
        return True, *await run_slow(lambda _: prepare(), kind="python")

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """`async with engine.stream(...) as request`: start a request, and cancel it when the block is left.

        Takes the arguments of `start_request`; entering the block raises the same errors.
        """
        return Stream(partial(self.start_request, prompt, params, **options))

    async def generate(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """Submit a request and return its complete result. Cancelling the task cancels the request.

        Takes the arguments of `start_request`, and also `best_of` and `num_beams`, which cannot be streamed.
        Raises as `start_request` does, `GenerationError` if the request fails while it runs, and
        `EngineStoppedError` if the engine is closed first.
        """
        is_large, prepared, params = await self._prepare(prompt, params, dict(options))
        in_thread = should_offload(prepared, params)
        if params.num_beams > 1:
            begin = partial(self._session.search_beams, prepared, params)
            search = await self._call(begin, prepared, in_thread=in_thread, is_large=is_large)
            try:
                while search.is_running:
                    search.advance(await self._run_step(search))
                return search.result()
            finally:
                search.close()
        submit = partial(self._session.submit, prepared, _core.candidate_params(params))
        start = partial(self._start, submit, prepared, in_thread=in_thread, is_large=is_large)
        async with Stream(start) as request:
            return _core.best_of(await request.result(), params)

    def generate_many(
        self,
        prompts: Iterable[BatchPrompt] | AsyncIterable[BatchPrompt] | None = None,
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        concurrency: int | None = None,
        ordered: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Batch:
        """The results of any number of prompts, as an async iterator of `BatchItem`s.

            async for item in engine.generate_many(prompts, max_tokens=64):
                print(item.index, item.result.text if item.result else item.error)

        A prompt is one of `generate`, or a mapping `{"messages": [...]}`.
        `params` are the parameters of all prompts, or an iterable with those of each prompt, such as a list.
        Prompts and their parameters are taken one by one, so generators of 100,000 need no more memory than
        those of 100. While the next prompt of an async iterable is awaited, no item is returned.
        `concurrency` is the number of unfinished requests, by default slightly more than the engine computes
        together. Items come in the order of the prompts, or with `ordered=False` as they finish.

        An invalid prompt or a failed request is the `error` of its item. The engine is not overloaded: a
        request that `max_waiting` refuses is started again later. Raises `InvalidRequestError` at once for
        invalid parameters of all prompts; while iterating, `EngineStoppedError`, what `prompts` and `params`
        raise, and `InvalidRequestError` if their numbers differ, at once if both have a length.

        Cancelling the task, leaving `async with`, `aclose()` or dropping the iterator cancels what runs.
        """
        jobs = Results(self._session, prompts, params, options, concurrency=concurrency, ordered=ordered)
        return Batch(jobs, self._pump, self._call)

    def stream_many(
        self,
        prompts: Iterable[BatchPrompt] | AsyncIterable[BatchPrompt] | None = None,
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        concurrency: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> BatchStream:
        """The chunks of any number of prompts as they arrive, as an async iterator of `BatchChunk`s.

            async for item in engine.stream_many(prompts, max_tokens=64):
                print(item.index, item.chunk.text if item.chunk else item.error)

        The chunks of all running requests are interleaved; each request has its turn. The last item of a
        prompt has an `error`, or a chunk with a `finish_reason`, with `n` above 1 that of the last choice.
        Requests pause while the iterator is not read, unless they have `unread="keep"`.

        Takes the arguments of `generate_many` except `ordered`, `best_of` and `num_beams`. Raises and ends as
        it does.
        """
        jobs = Chunks(self._session, prompts, params, options, concurrency=concurrency)
        return BatchStream(jobs, self._pump, self._call)

    async def score(
        self,
        text: str | Sequence[int],
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Score:
        """Log probabilities and perplexity of a text or of token ids, in one pass; nothing is generated.

        Text is tokenised with the special tokens that begin a prompt; at most `max_model_len` tokens. Every
        position is computed, so nothing is read from the prefix cache; the computed blocks are added to it.

        Raises as `start_request` does, `EngineStoppedError` if the engine is closed before the text is
        scored, `GenerationError` if the request is preempted with `preemption_mode="interrupt"`. Cancelling
        the task cancels the request.
        """
        params = self._session.prepare_scoring(text, adapter, cache_salt, priority)
        submit = partial(self._session.submit_scoring, text, params)
        start = partial(self._start, submit, text, in_thread=should_offload(text, params))
        async with Stream(start) as request:
            return _core.score(await request.result())

    async def embed(
        self,
        texts: str | Iterable[str | Sequence[int]],
        *,
        pooling: Literal["last", "mean"] | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> Embeddings:
        """The embeddings of texts: their last hidden states, pooled, as float32 of shape `(texts, size)`.

            embeddings = await engine.embed(["The sky is blue.", "Rain"])
            vectors = numpy.asarray(embeddings.tensor)

        A text is a string, which is tokenised as a prompt is, with its special tokens, or token ids. With the
        pooling `last`, an embedding is the hidden state of the last token; with `mean` it is the mean of all.
        `normalize` divides it by its length, `dimensions` keeps only its first values, before that. The
        defaults of `pooling` and `normalize` are `info.pooling` and `info.normalize`: what the model's files
        say, else `mean` and true.

        The texts are computed as by `generate_many`; `max_output_bytes` bounds the memory. Nothing is read
        from the prefix cache or added to it.

        Raises `InvalidRequestError` for an invalid argument, such as a text that is empty or longer than the
        model allows; `field` is the place of the text: `texts[3]`. Otherwise raises as `generate` does. An
        error or a cancellation of the task ends all requests.
        """
        pooled = Pooling(
            self._session.check_open().info,
            texts,
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            options={"adapter": adapter, "priority": priority},
        )
        async with self.generate_many(pooled.texts, pooled.params, ordered=False) as items:
            async for item in items:
                if pooled.is_large(item):
                    await run_in_thread(partial(pooled.add, item))
                else:
                    pooled.add(item)
        return pooled.embeddings()

    async def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
        family: Literal["qwen3"] | Mapping[str, str] | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Ranking:
        """The documents by their relevance for a query, as a reranker such as Qwen3-Reranker scores them.

            ranking = await engine.rerank("What is the capital of China?", documents, top_n=3)
            for item in ranking.items:
                print(item.score, item.document)

        The score is the probability of the answer `yes` against `no` to the question that the model was
        trained with. `instruction` is the task in one sentence, in English, by default a web search. `family`
        says how the model was trained, by a name or as a mapping that `Reranker` describes; without it, the
        name of the model has to contain `Qwen3-Reranker`.

        The prompts of the documents are computed as by `generate_many`, and share their beginning through the
        prefix cache.

        Raises `InvalidRequestError` for an invalid argument, such as a document that is too long (`field` is
        its place: `documents[3]`), and if the model is not known as a reranker. Otherwise raises as
        `generate` does. An error or a cancellation of the task ends all requests.
        """
        reranker = Reranker(self, family)
        params = reranker.params.replace(adapter=adapter, cache_salt=cache_salt, priority=priority)
        scored = Documents(reranker, query, documents, instruction=instruction, top_n=top_n)
        async with self.generate_many(scored.prompts, params, ordered=False) as items:
            async for item in items:
                scored.add(item)
        return scored.ranking()

    async def _start(
        self,
        submit: Callable[[Port, Callable[[], None]], _core.Request],
        prompt: PreparedPrompt,
        *,
        in_thread: bool,
        is_large: bool = False,
    ) -> Request:
        pump = self._pump()
        # An abandoned thread drops the native request, which cancels it.
        native = await self._call(partial(submit, pump.port), prompt, in_thread=in_thread, is_large=is_large)
        request = Request(self._session, native, pump)
        try:
            await request.admission()
        except BaseException:
            request.cancel()
            raise
        return request

    async def _call(
        self,
        function: Callable[[Callable[[], None]], Returned],
        prompt: PreparedPrompt,
        *,
        in_thread: bool,
        is_large: bool = False,
    ) -> Returned:
        """Call `function` for a prompt. It is given a callable that raises once the task is cancelled."""
        if not in_thread:
            return function(lambda: None)
        self._session.check_room()
        kind: Kind = "python" if is_large else "short"
        return await run_slow(function, kind=kind, num_chars=num_chars(prompt))

    async def _run_step(self, search: _core.BeamSearch) -> list[Result]:
        """Run one step of a beam search: all its requests concurrently."""
        pump = self._pump()
        requests = [Request(self._session, native, pump) for native in search.start_step(pump.port)]
        try:
            return [await request.result() for request in requests]
        finally:
            for request in requests:
                request.cancel()

    # ---- adapters

    async def load_adapter(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> Adapter:
        """Load a LoRA adapter; requests with `adapter=name` use it from then on.

            await engine.load_adapter("sql", "path/to/adapter")
            result = await engine.generate("Count the users.", adapter="sql")

        `path` is a directory in PEFT's layout (`adapter_config.json`, `adapter_model.safetensors`), or the id
        of one on the Hugging Face hub. The engine computes other requests meanwhile. `progress` is called as
        `progress(done, total)`, in bytes, in a worker thread; an exception ends the load.

        Loading the same files again under the same name returns the adapter that is loaded. Other files are a
        conflict, or with `replace` take the name, while open requests continue with the former adapter. No
        request uses blocks of the prefix cache that another adapter computed, nor another load of it.

        Raises `ConfigError` for an invalid name and without `max_adapters`, `AdapterLoadError` if the adapter
        cannot be read or does not fit the model or `adapter_cache_bytes`, `AdapterConflictError` if another
        adapter has the name, `AdapterLimitError` if `max_cpu_adapters` are loaded or fill
        `max_cpu_adapter_bytes`, and `EngineStoppedError`.

        A cancelled load has no effect, unless it was at its end.
        """
        self._session.check_adapter(name, path)
        directory = await _find_adapter(name, path)
        load = partial(self._session.load_adapter, name, directory, replace=replace, progress=progress)
        return await run_slow(lambda check_cancelled: load(check_cancelled=check_cancelled), kind="load")

    async def unload_adapter(self, name: str, *, force: bool = False) -> None:
        """Remove an adapter; returns when the last request with it has ended and its memory is free.

        Requests that name it raise `AdapterNotFoundError` at once, and the name can be used again. Open
        requests continue, or with `force` raise `GenerationError`, also in a second call while the first
        waits; a beam search between two steps raises `AdapterNotFoundError`. A cancellation only ends the
        wait. An engine that is asleep does not load the adapter again.

        Raises `AdapterNotFoundError` if no adapter has the name, `EngineStoppedError` if the engine is
        neither open nor asleep.
        """
        port = Port()
        self._session.unload_adapter(name, port, force=force)
        await anyio.wait_readable(port.fileno())

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The loaded adapters by name, with their use at the moment."""
        return self._session.adapters

    # ---- queries, which a closed engine answers too

    @property
    def info(self) -> ModelInfo:
        """The model's properties and the engine's settings in effect, memory in bytes."""
        return self._session.native.info

    def stats(self) -> Stats:
        """A snapshot of the engine's counters, gauges and histograms; cheap and lock-free."""
        return self._session.native.stats()

    def health(self) -> Health:
        """The state of a working engine and the age of its current step; never waits.

        Raises `EngineStoppedError` if the engine is not open, was closed, crashed, or lost its device.
        """
        return self._session.health()

    def profile(self) -> list[ProfileRow]:
        """Number of calls, time and work of each operation of the device since the engine was opened.

        In the order of a step; operations that were not called are omitted. Raises `RuntimeError` unless the
        engine was created with `profile=True`.
        """
        return self._session.native.profile()

    def reset_prefix_cache(self, *, cache_salt: str | None = None) -> None:
        """Remove all blocks from the prefix cache, or with `cache_salt` those of requests with this salt.

        Running requests are not affected. Takes effect before any request that is started afterwards. Not
        needed to free memory: unused blocks are evicted on demand. Raises `EngineStoppedError` if the engine
        is not open, `InvalidRequestError` for an invalid salt.
        """
        self._session.check_open().reset_prefix_cache(cache_salt=cache_salt)

    def kv_events(self) -> KvEventStream:
        """The changes of the prefix cache from now on, as an async iterator, for routing by prefixes.

            async for event in engine.kv_events():
                match event:
                    case penstock.BlockStored(): ...
                    case penstock.BlockRemoved(): ...
                    case penstock.AllBlocksCleared(): ...

        The first event is `AllBlocksCleared`, followed by the blocks in the cache. A reader that is too slow
        loses events: then the stream begins in the same way again. It ends with `AllBlocksCleared` when the
        engine is closed or falls asleep. Several streams are independent; without any, blocks are not hashed
        for events. `EngineOptions.kv_events` publishes the same events on a socket.

        Raises `EngineStoppedError` if the engine is not open, `ConfigError` without a prefix cache, `OSError`
        without a file descriptor.
        """
        return KvEventStream(self._session.check_open())

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """The token ids of a text; see `Tokenizer.encode`."""
        return self._session.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; see `Tokenizer.decode`."""
        return self._session.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; see `Tokenizer.token_bytes`."""
        return self._session.tokenizer.token_bytes(token_ids)

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them; see `Tokenizer.token_names`."""
        return self._session.tokenizer.token_names(token_ids)

    def apply_chat_template(
        self,
        messages: Iterable[object],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Render messages and tools as the text of a prompt; see `Tokenizer.apply_chat_template`."""
        return self._session.tokenizer.apply_chat_template(
            messages,
            chat_template=chat_template,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def count_tokens(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Mapping[str, Any] | MessageModel] | None = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> int:
        """The number of tokens of text, token ids or messages as a prompt; see `Tokenizer.count_tokens`."""
        return self._session.tokenizer.count_tokens(
            prompt,
            messages=messages,
            chat_template=chat_template,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def _pump(self) -> Pump:
        """The engine's pump on the running event loop."""
        try:
            pumps = _pumps.get()
        except LookupError:
            pumps = WeakKeyDictionary()
            _pumps.set(pumps)
        pump = pumps.get(self._session)
        if pump is None:
            pump = pumps[self._session] = Pump()
        return pump


@overload
async def _find_files(model: str, files: FileSet = ...) -> str: ...
@overload
async def _find_files(model: str | bytes, files: FileSet = ...) -> str | bytes: ...
async def _find_files(model: str | bytes, files: FileSet = MODEL_FILES) -> str | bytes:
    """The files of a model or an adapter, downloaded if necessary."""
    port = Port()
    lookup = _hub.Lookup(model, port, files)
    try:
        await anyio.wait_readable(port.fileno())
    except BaseException:
        lookup.abandon()
        raise
    return lookup.result()


async def _find_adapter(name: str, path: str | os.PathLike[str]) -> str:
    """The directory of an adapter, downloaded if necessary."""
    with adapter_errors(name):
        return await _find_files(os.fspath(path), ADAPTER_FILES)


async def _wait_for_end(native: _core.Engine | None) -> None:
    """Wait until the threads of an engine that was told to stop have ended."""
    if native is None:
        return
    try:
        port = Port()
    except OSError:  # no file descriptor is left: wait for the current step without the event loop
        native.shutdown()
        return
    native.ring_at_end(port)
    with anyio.CancelScope(shield=True):
        await anyio.wait_readable(port.fileno())
    native.shutdown()
