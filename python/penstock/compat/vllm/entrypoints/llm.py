"""vLLM's `entrypoints.llm`: `LLM`, which answers lists of prompts."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import penstock
from penstock.compat.errors import refuse
from penstock.compat.vllm import inputs, outputs
from penstock.compat.vllm.engine.arg_utils import EngineArgs
from penstock.compat.vllm.pooling_params import PoolingParams, check_task
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
from penstock.compat.vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.compat.vllm.inputs import PromptType
    from penstock.compat.vllm.lora.request import LoRARequest
    from penstock.compat.vllm.sampling_params import BeamSearchParams
    from penstock.compat.vllm.tokenizer import Tokenizer

__all__ = ["LLM"]

_LATER = "generate and chat take any number of prompts, and compute them in one batch"
_WORKERS = "the engine runs in this process, and the model is not a module of torch"
_WEIGHTS = "weights are those of the files; open another LLM for others"
#: Methods and attributes of vLLM's `LLM`, with the reason why they are refused.
NOT_PROVIDED = {
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), _LATER),
    **dict.fromkeys(("start_profile", "stop_profile"), "use penstock.Engine(profile=True)"),
    **dict.fromkeys(("apply_model", "collective_rpc", "llm_engine", "model_config"), _WORKERS),
    **dict.fromkeys(("init_weight_transfer_engine", "shutdown_weight_transfer_engine"), _WEIGHTS),
    **dict.fromkeys(("start_draft_weight_update", "start_weight_update", "update_weights"), _WEIGHTS),
    **dict.fromkeys(("finish_weight_update", "get_weight_version", "update_weight_version"), _WEIGHTS),
    "classify": "models with a head for classes are not supported yet",
    "get_metrics": "use penstock.Engine.stats",
    "release_kv_cache_memory": "use sleep",
    "reset_mm_cache": "images and other media are not supported yet",
}


class LLM:
    """A model that answers lists of prompts, with vLLM's methods. They can be called from any thread.

    The keywords are those of `EngineArgs`, and `chat_template`, a Jinja template or its path. docs/vllm.md
    lists their effects. Values that are not supported raise `UnsupportedError`, which is a `ValueError`; a
    model that cannot be loaded raises `penstock.ModelLoadError`.
    """

    def __init__(self, model: str, *, chat_template: str | Path | None = None, **arguments: Any) -> None:
        self._chat_template = _source(chat_template)
        self._requests = Requests(EngineArgs(model, **arguments))
        self._engine = self._requests.engine
        self._ids = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """The model with these arguments."""
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._requests.tokenizer

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of devices: 1."""
        return 1

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests without any: vLLM's defaults and those of the model's files."""
        return SamplingParams(**self._requests.defaults)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Sequence[LoRARequest] | LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[outputs.RequestOutput]:
        """The outputs of prompts, in their order. Raises the error of the first prompt that has one."""
        _check_media(mm_processor_kwargs)
        return self._run(
            inputs.prompts_of(prompts), sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs
        )

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Sequence[LoRARequest] | LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[outputs.RequestOutput]:
        """The answers to a chat or to several, in their order; calls of tools are not parsed."""
        _check_media(mm_processor_kwargs)
        if chat_template_content_format != "auto":
            refuse("chat_template_content_format", chat_template_content_format, "the template decides it")
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts: list[PromptType] = [
            self._requests.model_tokenizer.apply_chat_template(
                chat,
                chat_template=self._chat_template if chat_template is None else chat_template,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt or (None if continue_final_message else False),
                continue_final_message=continue_final_message,
            )
            for chat in chats
        ]
        keywords = {"add_special_tokens": False, **(tokenization_kwargs or {})}
        return self._run(texts, sampling_params, use_tqdm, lora_request, priority, keywords)

    def beam_search(
        self,
        prompts: Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Sequence[LoRARequest] | LoRARequest | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[outputs.BeamSearchOutput]:
        """The best beams of each prompt."""
        limit = self._requests.args.max_logprobs
        num_logprobs = 2 * params.beam_width if limit == -1 else min(2 * params.beam_width, limit)
        jobs = self._jobs(prompts, SamplingParams(), lora_request, priority, None)
        beams = penstock.SamplingParams(**params.options()).replace(logprobs=True, top_logprobs=num_logprobs)
        all_params = [
            beams.replace(
                adapter=job.params.adapter, cache_salt=job.params.cache_salt, priority=job.params.priority
            )
            for job in jobs
        ]
        decode = self._requests.model_tokenizer.decode
        found = []
        results = self._results(jobs, all_params, use_tqdm, concurrency_limit)
        for prompt, job, result in zip(prompts, jobs, results, strict=True):
            sequences = []
            for choice in result.choices:
                tokens = [*result.prompt_token_ids, *choice.token_ids]
                beam = outputs.BeamSearchSequence(
                    orig_prompt=prompt,
                    tokens=tokens,
                    logprobs=job.completion(choice).logprobs or [],
                    lora_request=job.lora_request,
                    cum_logprob=choice.cumulative_logprob or 0.0,
                    text=decode(tokens, skip_special_tokens=params.skip_special_tokens),
                )
                sequences.append(beam)
            found.append(outputs.BeamSearchOutput(sequences))
        return found

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Sequence[LoRARequest] | LoRARequest | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[outputs.PoolingRequestOutput[outputs.PoolingOutput]]:
        """The embeddings of prompts as tensors; `pooling_task` must be `embed`."""
        if pooling_task is None:
            message = 'pooling_task is None; it must be "embed"'
            raise ValueError(message)
        check_task("pooling_task", pooling_task)
        given = inputs.prompts_of(prompts)
        ids = [self._requests.token_ids(prompt, tokenization_kwargs) for prompt in given]
        rows = self._embed(ids, pooling_params or PoolingParams(), lora_request)
        return [
            outputs.PoolingRequestOutput(
                str(next(self._ids)), outputs.PoolingOutput(row), tokens, 0, finished=True
            )
            for tokens, row in zip(ids, rows, strict=True)
        ]

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Sequence[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[outputs.EmbeddingRequestOutput]:
        """The embeddings of prompts as lists of numbers."""
        found = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [
            outputs.EmbeddingRequestOutput(
                item.request_id,
                outputs.EmbeddingOutput(list(map(float, memoryview(item.outputs.data)))),
                item.prompt_token_ids,
                item.num_cached_tokens,
                item.finished,
            )
            for item in found
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Sequence[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[outputs.ScoringRequestOutput]:
        """The cosine of the embeddings of each pair; a single text is the first of every pair."""
        if chat_template is not None:
            refuse("chat_template", chat_template, "the texts are embedded as they are")
        firsts, seconds = inputs.prompts_of(data_1), inputs.prompts_of(data_2)
        if len(firsts) not in (1, len(seconds)):
            message = f"data_1 has {len(firsts)} texts; it must have 1, or {len(seconds)} as data_2"
            raise ValueError(message)
        found = self.embed(
            [*firsts, *seconds],
            use_tqdm=use_tqdm,
            pooling_params=pooling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        left, right = found[: len(firsts)], found[len(firsts) :]
        if len(left) == 1:
            left *= len(right)
        return [
            outputs.ScoringRequestOutput(
                f"{one.request_id}_{other.request_id}",
                outputs.ScoringOutput(_cosine(one.outputs.embedding, other.outputs.embedding)),
                one.prompt_token_ids + other.prompt_token_ids,
                one.num_cached_tokens + other.num_cached_tokens,
                finished=True,
            )
            for one, other in zip(left, right, strict=True)
        ]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Remove all blocks from the prefix cache; running requests keep theirs."""
        check_reset(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        self._engine.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the weights and the KV cache. Requests are cancelled, or with the mode `wait` may finish."""
        self._engine.blocking.sleep(drain=drain_seconds(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Load the model again."""
        check_tags(tags)
        self._engine.blocking.wake()
        return True

    def __repr__(self) -> str:
        return f"LLM(model={self._engine.name!r})"

    def __del__(self) -> None:
        if "_engine" in self.__dict__:
            self._engine.blocking.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise missing(self, name, NOT_PROVIDED)

    def _run(
        self,
        prompts: Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        lora_request: Sequence[LoRARequest] | LoRARequest | None,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[outputs.RequestOutput]:
        sampling = self.get_default_sampling_params() if sampling_params is None else sampling_params
        jobs = self._jobs(prompts, sampling, lora_request, priority, tokenization_kwargs)
        results = self._results(jobs, [job.params for job in jobs], use_tqdm)
        return [job.result(result) for job, result in zip(jobs, results, strict=True)]

    def _jobs(
        self,
        prompts: Sequence[PromptType],
        sampling: SamplingParams | Sequence[SamplingParams],
        lora_request: Sequence[LoRARequest] | LoRARequest | None,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[Job]:
        """The requests for prompts, after their adapters are loaded."""
        each = zip(
            prompts,
            _spread("sampling_params", sampling, len(prompts)),
            self._load(lora_request, len(prompts)),
            _spread("priority", priority or 0, len(prompts)),
            strict=True,
        )
        return [
            self._requests.job(
                str(next(self._ids)),
                prompt,
                one,
                lora_request=lora,
                priority=rank,
                tokenization_kwargs=tokenization_kwargs,
            )
            for prompt, one, lora, rank in each
        ]

    def _load(
        self, lora_request: Sequence[LoRARequest | None] | LoRARequest | None, count: int
    ) -> Sequence[LoRARequest | None]:
        """The adapter of each request; loads those that are not loaded yet."""
        found = _spread("lora_request", lora_request, count)
        for one in {adapter_name(one): one for one in found if one is not None}.values():
            if self._requests.must_load(one):
                self._engine.blocking.load_adapter(adapter_name(one), one.lora_path, replace=True)
        return found

    def _results(
        self,
        jobs: Sequence[Job],
        params: Sequence[penstock.SamplingParams],
        use_tqdm: bool | Callable[..., Any],
        concurrency: int | None = None,
    ) -> Iterator[penstock.Result]:
        """The results in the order of the requests. Raises the error of a request, and cancels the others."""
        prompts = [job.prompt for job in jobs]
        many = self._engine.blocking.generate_many(prompts, params, concurrency=concurrency)
        with many as items, _progress(use_tqdm, len(jobs)) as bar:
            for item in items:
                if item.result is None:
                    raise item.error or AssertionError(item)
                if bar is not None:
                    bar.update(1)
                yield item.result

    def _embed(
        self,
        ids: Sequence[list[int]],
        pooling_params: PoolingParams | Sequence[PoolingParams],
        lora_request: Sequence[LoRARequest] | LoRARequest | None,
    ) -> list[penstock.Tensor]:
        """The embedding of each prompt; those with the same options are computed together."""
        params = _spread("pooling_params", pooling_params, len(ids))
        options = [
            self._requests.embed_options(*pair)
            for pair in zip(params, self._load(lora_request, len(ids)), strict=True)
        ]
        rows: dict[int, penstock.Tensor] = {}
        for one in options:
            indices = [index for index, other in enumerate(options) if other == one and index not in rows]
            if indices:
                found = self._engine.blocking.embed([ids[index] for index in indices], **one)
                rows |= zip(indices, rows_of(found), strict=True)
        return [rows[index] for index in range(len(ids))]


def _spread(name: str, given: Any, count: int) -> Sequence[Any]:
    """An argument for each prompt."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        message = f"{name} has {len(given)} items; it must have {count}, as the prompts"
        raise ValueError(message)
    return given


@contextlib.contextmanager
def _progress(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Any]:
    """A progress bar, or `None`; without the package tqdm there is none."""
    make = use_tqdm
    if use_tqdm is True:
        try:
            from tqdm.auto import tqdm as make
        except ImportError:
            make = False
    if not callable(make):
        yield None
        return
    bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
    try:
        yield bar
    finally:
        bar.close()


def _source(chat_template: str | Path | None) -> str | None:
    """A chat template: its source, or the file at a path."""
    if chat_template is None or (isinstance(chat_template, str) and set(chat_template) & set("{}\n")):
        return chat_template
    return Path(chat_template).read_text(encoding="utf-8")


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(operator.mul, one, other)) / lengths if lengths else 0.0


def _check_media(mm_processor_kwargs: object) -> None:
    if mm_processor_kwargs:
        refuse("mm_processor_kwargs", mm_processor_kwargs, "images and other media are not supported yet")
