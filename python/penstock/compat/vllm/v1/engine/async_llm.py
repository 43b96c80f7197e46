"""vLLM's `v1.engine.async_llm`: `AsyncLLM`, which answers prompts on an event loop."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from penstock._threads import run_in_thread
from penstock.compat.errors import refuse
from penstock.compat.vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput
from penstock.compat.vllm.requests import (
    Job,
    Requests,
    adapter_name,
    check_reset,
    check_tags,
    drain_seconds,
    missing,
    rows_of,
)
from penstock.compat.vllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence

    import penstock
    from penstock.compat.vllm.engine.arg_utils import EngineArgs
    from penstock.compat.vllm.inputs import PromptType
    from penstock.compat.vllm.lora.request import LoRARequest
    from penstock.compat.vllm.outputs import RequestOutput
    from penstock.compat.vllm.pooling_params import PoolingParams
    from penstock.compat.vllm.sampling_params import SamplingParams
    from penstock.compat.vllm.tokenizer import Tokenizer

__all__ = ["AsyncLLM"]

_HEALTH = "use is_running and check_health"
_PAUSE = "use sleep and wake_up, which free the memory, too"
_PROCESSES = "the engine has no other processes, devices or caches"
_STATS = "use penstock.Engine.stats"
_WEIGHTS = "weights are those of the files; open another AsyncLLM for others"
#: Methods and attributes of vLLM's `AsyncLLM`, with the reason why they are refused.
NOT_PROVIDED = {
    **dict.fromkeys(("dead_error", "errored", "is_stopped", "should_keep_api_server_alive"), _HEALTH),
    **dict.fromkeys(("is_paused", "pause_generation", "resume_generation"), _PAUSE),
    **dict.fromkeys(("checkpoint_prepare", "checkpoint_restore", "collective_rpc"), _PROCESSES),
    **dict.fromkeys(("get_external_elastic_ep_status", "get_kv_event_sources", "get_status"), _PROCESSES),
    **dict.fromkeys(("handle_fault", "notify_kv_transfer_request_rejected"), _PROCESSES),
    **dict.fromkeys(("reset_encoder_cache", "reset_mm_cache", "scale_elastic_ep"), _PROCESSES),
    **dict.fromkeys(("check_admission", "get_num_queued_tokens", "get_num_unfinished_requests"), _STATS),
    **dict.fromkeys(("compute_weight_checksums", "finish_weight_update", "get_weight_version"), _WEIGHTS),
    **dict.fromkeys(("init_weight_transfer_engine", "shutdown_weight_transfer_engine"), _WEIGHTS),
    **dict.fromkeys(("start_draft_weight_update", "start_weight_update", "update_weight_version"), _WEIGHTS),
    **dict.fromkeys(("start_profile", "stop_profile"), "use penstock.Engine(profile=True)"),
    "add_request": "use generate",
    "from_vllm_config": "use from_engine_args",
    "get_supported_tasks": "a model generates, and embeds texts",
    "is_tracing_enabled": "the server makes traces",
    "pin_lora": "adapters stay loaded until remove_lora",
    "release_kv_cache_memory": _PAUSE,
    "update_weights": _WEIGHTS,
    "wait_for_requests_to_drain": "use sleep with the mode wait, or shutdown with a timeout",
}


class AsyncLLM:
    """A model on event loops, with vLLM's methods; `from_engine_args` loads it and blocks meanwhile.

    docs/vllm.md lists the effects of parameters. Values that are not supported raise `UnsupportedError`,
    which is a `ValueError`.
    """

    def __init__(self, engine_args: EngineArgs) -> None:
        self._requests = Requests(engine_args)
        self._engine = self._requests.engine
        self._ids: dict[penstock.Request, str] = {}

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: Sequence[Any] | None = None,
    ) -> AsyncLLM:
        """Load a model."""
        if stat_loggers:
            refuse("stat_loggers", stat_loggers, "use penstock.Engine.stats")
        return cls(engine_args)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: object = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a prompt as they arrive, in the form that `sampling_params.output_kind` names.

        Each has the choice that has new output; the last one has `finished`. With `FINAL_ONLY` there is one,
        with all choices. Closing the generator cancels the request.
        """
        _refuse_unless_none(kv_hints=kv_hints, data_parallel_rank=data_parallel_rank or None)
        _refuse_unless_none(reasoning_ended=reasoning_ended, reasoning_parser_kwargs=reasoning_parser_kwargs)
        if lora_request is not None:
            await self._load(lora_request)
        make = partial(
            self._requests.job,
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
        )
        job: Job = make() if tokenization_kwargs is None else await run_in_thread(make)
        job = dataclasses.replace(job, text=prompt_text) if job.text is None else job
        kind = sampling_params.output_kind
        async with self._engine.stream(job.prompt, job.params, unread="keep") as request:
            self._ids[request] = request_id
            try:
                if kind is not RequestOutputKind.FINAL_ONLY:
                    outputs: dict[int, CompletionOutput] = {}
                    async for chunk in request:
                        new = job.completion(chunk)
                        add = _with_total if kind is RequestOutputKind.DELTA else _joined
                        if (before := outputs.get(new.index)) is not None:
                            new = add(before, new)
                        outputs[new.index] = new
                        finished = sum(output.finished() for output in outputs.values()) == job.params.n
                        source = await request.result() if finished else request
                        yield job.output(source, [new], finished=finished)
                else:
                    yield job.result(await request.result())
            finally:
                del self._ids[request]

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """The embedding of a prompt: one output."""
        _refuse_unless_none(reasoning_ended=reasoning_ended)
        if lora_request is not None:
            await self._load(lora_request)
        ids = await run_in_thread(partial(self._requests.token_ids, prompt, tokenization_kwargs))
        options = self._requests.embed_options(pooling_params, lora_request)
        (row,) = rows_of(await self._engine.embed([ids], **options))
        yield PoolingRequestOutput(request_id, PoolingOutput(row), ids, 0, finished=True)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Cancel the requests of these ids: the last output of each has the finish reason `abort`."""
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        for request, name in list(self._ids.items()):
            if name in ids:
                request.cancel()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._requests.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._requests.tokenizer

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; `False` if it is loaded."""
        return await self._load(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter once its requests have ended; `False` if it is not loaded."""
        if str(lora_id) not in self._engine.adapters:
            return False
        await self._engine.unload_adapter(str(lora_id))
        return True

    async def list_loras(self) -> set[int]:
        """The ids of the loaded adapters."""
        return {int(name) for name in self._engine.adapters}

    async def check_health(self) -> None:
        """Raise `penstock.EngineStoppedError` unless the engine works."""
        self._engine.health()

    async def do_log_stats(self) -> None:
        """Has no effect: `penstock.Engine.stats` has the metrics."""

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Remove all blocks from the prefix cache; running requests keep theirs."""
        check_reset(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        self._engine.reset_prefix_cache()
        return True

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the weights and the KV cache. Requests are cancelled, or with the mode `wait` may finish."""
        await self._engine.sleep(drain=drain_seconds(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Load the model again."""
        check_tags(tags)
        await self._engine.wake()
        return True

    async def is_sleeping(self) -> bool:
        """Whether the engine is asleep."""
        return self._engine.health().state == "asleep"

    @property
    def is_running(self) -> bool:
        """Whether requests can be started."""
        return self._engine.is_running

    def shutdown(self, timeout: float | None = None) -> None:
        """Cancel all requests, or let them finish for `timeout` seconds, and free the model."""
        self._engine.close(drain=timeout or 0.0)

    def __del__(self) -> None:
        if "_engine" in self.__dict__:
            self.shutdown()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise missing(self, name, NOT_PROVIDED)

    async def _load(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, and return whether it was not loaded."""
        if not self._requests.must_load(lora_request):
            return False
        await self._engine.load_adapter(adapter_name(lora_request), lora_request.lora_path, replace=True)
        return True


def _with_total(before: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    """New output of a choice, with the log probability of all its output."""
    if before.cumulative_logprob is None:
        return new
    total = before.cumulative_logprob + (new.cumulative_logprob or 0.0)
    return dataclasses.replace(new, cumulative_logprob=total)


def _joined(before: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    """All output of a choice so far."""
    return dataclasses.replace(
        _with_total(before, new),
        text=before.text + new.text,
        token_ids=[*before.token_ids, *new.token_ids],
        logprobs=None if before.logprobs is None else before.logprobs + (new.logprobs or []),
    )


def _refuse_unless_none(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            refuse(name, value, "the engine has one device, and does not parse text")
