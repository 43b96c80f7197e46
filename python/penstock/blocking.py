"""`engine.blocking`: the engine for threads without an event loop; none is created internally."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from penstock import _attributes, _core, _hub
from penstock._core import Port
from penstock._hub_files import ADAPTER_FILES
from penstock._session import adapter_errors, check_seconds
from penstock.batch import BlockingBatch, BlockingBatchStream, Chunks, Results
from penstock.embeddings import Pooling
from penstock.request import BlockingRequest, BlockingStream
from penstock.reranking import Documents, Reranker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Literal, NoReturn, Unpack

    from penstock._core import Adapter, Result, SamplingParams, Score
    from penstock._options import BatchPrompt, Prompt, RequestOptions
    from penstock._session import Session
    from penstock.embeddings import Embeddings
    from penstock.reranking import Ranking

__all__ = ["Blocking"]


class Blocking:
    """`engine.blocking`: the methods of `Engine` without `await`, for any number of threads.

    Ctrl-C interrupts every wait, in the main thread.

    Do not use it in a thread that runs an event loop: it blocks the loop.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise _attributes.missing(self, name, _attributes.BLOCKING_HINTS)

    def start(self) -> None:
        """Load the model, after downloading it if necessary; see `Engine.start`."""
        if self._session.must_start():
            try:
                self._session.check_device()
                self._session.open(_hub.find(self._session.model))
            except BaseException:
                self._session.close()
                raise

    def close(self, *, drain: float = 0.0) -> None:
        """Cancel open requests, stop the engine's threads and free the model; see `Engine.aclose`.

        Ctrl-C interrupts the wait and ends a drain; the threads end all the same.
        """
        seconds = check_seconds("drain", drain)
        try:
            self._drain(seconds)
        except BaseException:
            self._session.close()
            raise
        _wait_for_end(self._session.close())
        if self._session.publisher is not None:
            self._session.publisher.join()

    def sleep(self, *, drain: float = 0.0) -> None:
        """Free the weights and the KV cache until `wake`; see `Engine.sleep`.

        Ctrl-C interrupts the wait and ends a drain; the engine falls asleep all the same.
        """
        seconds = check_seconds("drain", drain)
        native = self._session.check_may_sleep()
        try:
            self._drain(seconds)
        except BaseException:
            self._session.stop_to_sleep(native)
            raise
        _wait_for_end(self._session.stop_to_sleep(native))

    def wake(self) -> None:
        """Load the model again after `sleep`; see `Engine.wake`."""
        if self._session.must_wake():
            self._session.reopen()

    def _drain(self, seconds: float) -> None:
        """Let open requests finish for this time; new ones are refused."""
        native = self._session.drain() if seconds > 0 else None
        if native is not None:
            port = Port(blocking=True)
            native.ring_at_end(port)
            port.wait(seconds)

    def start_request(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> BlockingRequest:
        """Submit a request; returns once the engine has accepted it. See `Engine.start_request`."""
        prepared, params = self._session.prepare(prompt, params, dict(options))
        request = self._start(partial(self._session.submit, prepared, params))
        self._session.track(request)
        return request

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> BlockingStream:
        """`start_request` as a context manager, which cancels the request on exit; see `Engine.stream`."""
        return BlockingStream(partial(self.start_request, prompt, params, **options))

    def generate(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """Submit a request and return its complete result; see `Engine.generate`."""
        prepared, params = self._session.prepare(prompt, params, dict(options))
        if params.num_beams > 1:
            search = self._session.search_beams(prepared, params)
            try:
                while search.is_running:
                    search.advance(self._run_step(search))
                return search.result()
            finally:
                search.close()
        submit = partial(self._session.submit, prepared, _core.candidate_params(params))
        with BlockingStream(partial(self._start, submit)) as request:
            return _core.best_of(request.result(), params)

    def generate_many(
        self,
        prompts: Iterable[BatchPrompt] | None = None,
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        concurrency: int | None = None,
        ordered: bool = True,
        **options: Unpack[RequestOptions],
    ) -> BlockingBatch:
        """The results of any number of prompts, as an iterator; see `Engine.generate_many`."""
        jobs = Results(self._session, prompts, params, options, concurrency=concurrency, ordered=ordered)
        return BlockingBatch(jobs)

    def stream_many(
        self,
        prompts: Iterable[BatchPrompt] | None = None,
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        concurrency: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> BlockingBatchStream:
        """The chunks of any number of prompts, as an iterator; see `Engine.stream_many`."""
        return BlockingBatchStream(Chunks(self._session, prompts, params, options, concurrency=concurrency))

    def score(
        self,
        text: str | Sequence[int],
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Score:
        """Log probabilities and perplexity of a text or of token ids; see `Engine.score`."""
        params = self._session.prepare_scoring(text, adapter, cache_salt, priority)
        with BlockingStream(
            partial(self._start, partial(self._session.submit_scoring, text, params))
        ) as request:
            return _core.score(request.result())

    def embed(
        self,
        texts: str | Iterable[str | Sequence[int]],
        *,
        pooling: Literal["last", "mean"] | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> Embeddings:
        """The embeddings of texts, as float32 of shape `(texts, size)`; see `Engine.embed`."""
        pooled = Pooling(
            self._session.check_open().info,
            texts,
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            options={"adapter": adapter, "priority": priority},
        )
        with self.generate_many(pooled.texts, pooled.params, ordered=False) as items:
            for item in items:
                pooled.add(item)
        return pooled.embeddings()

    def rerank(
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
        """The documents by their relevance for a query; see `Engine.rerank`."""
        reranker = Reranker(self._session, family)
        params = reranker.params.replace(adapter=adapter, cache_salt=cache_salt, priority=priority)
        scored = Documents(reranker, query, documents, instruction=instruction, top_n=top_n)
        with self.generate_many(scored.prompts, params, ordered=False) as items:
            for item in items:
                scored.add(item)
        return scored.ranking()

    def load_adapter(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> Adapter:
        """Load a LoRA adapter; see `Engine.load_adapter`."""
        self._session.check_adapter(name, path)
        with adapter_errors(name):
            directory = _hub.find(os.fspath(path), ADAPTER_FILES)
        return self._session.load_adapter(name, directory, replace=replace, progress=progress)

    def unload_adapter(self, name: str, *, force: bool = False) -> None:
        """Remove an adapter and wait for the end of its requests; see `Engine.unload_adapter`."""
        port = Port(blocking=True)
        self._session.unload_adapter(name, port, force=force)
        port.wait()

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The loaded adapters by name; see `Engine.adapters`."""
        return self._session.adapters

    def _start(self, submit: Callable[[Port], _core.Request]) -> BlockingRequest:
        port = Port(blocking=True)
        request = BlockingRequest(self._session, submit(port), port)
        try:
            request.admission()
        except BaseException:
            request.cancel()
            raise
        return request

    def _run_step(self, search: _core.BeamSearch) -> list[Result]:
        """Run one step of a beam search: all its requests concurrently."""
        port = Port(blocking=True)
        requests = [BlockingRequest(self._session, native, port) for native in search.start_step(port)]
        try:
            return [request.result() for request in requests]
        finally:
            for request in requests:
                request.cancel()


def _wait_for_end(native: _core.Engine | None) -> None:
    """Wait until the threads of an engine that was told to stop have ended."""
    if native is not None:
        port = Port(blocking=True)
        native.ring_at_end(port)
        port.wait()
        native.shutdown()
