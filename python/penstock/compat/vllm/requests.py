"""`Requests`: the engine of `LLM` and `AsyncLLM`, its requests, and their outputs."""

from __future__ import annotations

import dataclasses
import math
import random
from functools import cached_property
from typing import TYPE_CHECKING, Any

import penstock
from penstock.compat.errors import refuse
from penstock.compat.prompts import encode_prompt
from penstock.compat.vllm import inputs
from penstock.compat.vllm.logprobs import positions
from penstock.compat.vllm.outputs import CompletionOutput, RequestOutput
from penstock.compat.vllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock import Choice, Chunk, Result
    from penstock.compat.vllm.engine.arg_utils import EngineArgs
    from penstock.compat.vllm.lora.request import LoRARequest
    from penstock.compat.vllm.pooling_params import PoolingParams
    from penstock.compat.vllm.sampling_params import SamplingParams

__all__ = [
    "Job",
    "Requests",
    "adapter_name",
    "check_reset",
    "check_tags",
    "drain_seconds",
    "missing",
    "rows_of",
]

#: Finish reasons that vLLM does not have: the output was ended.
_ABORTED = ("cancelled", "interrupted", "unread")
#: The model's defaults that `get_default_sampling_params` has, and those that only an argument can set.
_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
_OTHER_DEFAULTS = ("presence_penalty", "frequency_penalty", "skip_special_tokens")


def adapter_name(lora_request: LoRARequest) -> str:
    """The name of an adapter in the engine: vLLM tells adapters apart by their ids."""
    return str(lora_request.lora_int_id)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A request of the engine, and what its outputs repeat."""

    request_id: str
    text: str | None
    prompt: str | list[int]
    params: penstock.SamplingParams
    lora_request: LoRARequest | None
    stop_token_ids: Sequence[int]
    #: `None` without texts.
    tokenizer: penstock.Tokenizer | None

    def completion(self, part: Choice | Chunk) -> CompletionOutput:
        """The output of a choice, or a part of it."""
        logprobs = None
        if part.logprobs is not None:
            logprobs = positions(self.tokenizer, part.token_ids, part.logprobs, part.top_logprobs)
        stop = part.stop_reason
        is_named = isinstance(stop, str) or stop in self.stop_token_ids
        return CompletionOutput(
            index=part.index,
            text="" if self.tokenizer is None else part.text,
            token_ids=list(part.token_ids),
            cumulative_logprob=None if part.logprobs is None else sum(part.logprobs),
            logprobs=logprobs,
            finish_reason="abort" if part.finish_reason in _ABORTED else part.finish_reason,
            stop_reason=stop if is_named else None,  # type: ignore[arg-type]
        )

    def output(
        self, request: Result | penstock.Request, outputs: list[CompletionOutput], *, finished: bool
    ) -> RequestOutput:
        """The output of a request, which has the log probabilities of the prompt at the end."""
        prompt_logprobs = None
        if isinstance(request, penstock.Result) and request.prompt_logprobs is not None:
            prompt_logprobs = positions(
                self.tokenizer,
                request.prompt_token_ids,
                request.prompt_logprobs,
                request.prompt_top_logprobs,
            )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.text,
            prompt_token_ids=list(request.prompt_token_ids),
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=finished,
            lora_request=self.lora_request,
            num_cached_tokens=request.usage.cached_tokens,
        )

    def result(self, result: Result) -> RequestOutput:
        """The complete output of a request."""
        return self.output(result, [self.completion(choice) for choice in result.choices], finished=True)


class Requests:
    """An open engine with the arguments of vLLM's. Blocks while the model loads."""

    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        self.model_tokenizer = penstock.Tokenizer(args.tokenizer or args.model_name)
        self.tokenizer = Tokenizer(self.model_tokenizer)
        self.engine = penstock.Engine(args.model_name, config=args.engine_config())
        self.engine.blocking.start()
        self._seeds = random.Random(args.seed)  # noqa: S311

    def job(
        self,
        request_id: str,
        prompt: Any,
        sampling: SamplingParams,
        *,
        lora_request: LoRARequest | None,
        priority: int,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> Job:
        """The request for a prompt. With `tokenization_kwargs` it tokenises text, in the calling thread."""
        text, ids, salt = inputs.parse(prompt)
        adds_special_tokens = _adds_special_tokens(tokenization_kwargs)
        if ids is None and not adds_special_tokens:
            ids = self._encode(text, add_special_tokens=False)
        options = sampling.options()
        if sampling.max_tokens is None:
            options["max_tokens"] = self.engine.info.max_model_len
        if sampling.seed is None:
            options["seed"] = self._seeds.getrandbits(64)
        if sampling.logprobs is not None:
            options |= {"logprobs": True, "top_logprobs": self._num_logprobs(sampling.logprobs)}
        if sampling.prompt_logprobs is not None:
            options["prompt_logprobs"] = self._num_logprobs(sampling.prompt_logprobs)
        if options.get("logprobs") or "prompt_logprobs" in options:
            options["logprobs_mode"] = self.args.value("logprobs_mode")
        if lora_request is not None:
            options["adapter"] = adapter_name(lora_request)
        if self.args.scheduling_policy == "priority":
            options["priority"] = priority
        return Job(
            request_id=request_id,
            text=text,
            prompt=ids if ids is not None else text or "",
            params=penstock.SamplingParams(**options).replace(cache_salt=salt),
            lora_request=lora_request,
            stop_token_ids=sampling.stop_token_ids or (),
            tokenizer=self.model_tokenizer if sampling.detokenize else None,
        )

    def token_ids(self, prompt: Any, tokenization_kwargs: Mapping[str, Any] | None) -> list[int]:
        """The tokens of a prompt of an embedding."""
        text, ids, _ = inputs.parse(prompt)
        adds_special_tokens = _adds_special_tokens(tokenization_kwargs)
        if ids is not None:
            return ids
        return self._encode(text, add_special_tokens=adds_special_tokens)

    def _encode(self, text: str | None, *, add_special_tokens: bool) -> list[int]:
        longest = self.engine.info.max_model_len
        return encode_prompt(
            self.model_tokenizer.encode,
            text or "",
            longest,
            name="max_model_len",
            add_special_tokens=add_special_tokens,
        )

    def embed_options(self, params: PoolingParams, lora_request: LoRARequest | None) -> dict[str, Any]:
        """The keywords of `penstock.Engine.embed`."""
        params.check()
        model = self.args.pooler
        return {
            "pooling": model.pooling,
            "normalize": model.use_activation if params.use_activation is None else params.use_activation,
            "dimensions": model.dimensions if params.dimensions is None else params.dimensions,
            "adapter": None if lora_request is None else adapter_name(lora_request),
        }

    def must_load(self, lora_request: LoRARequest) -> bool:
        """Whether an adapter has to be loaded before its request."""
        if not self.args.enable_lora:
            refuse("lora_request", lora_request.lora_name, "the engine needs enable_lora=True")
        return lora_request.load_inplace or adapter_name(lora_request) not in self.engine.adapters

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The sampling parameters that the model's files and the arguments set."""
        values: dict[str, Any] = {}
        if self.args.generation_config == "auto":
            found = penstock.describe(self.args.model_name)["generation_config"]
            values = {name: found[name] for name in _DEFAULTS}
        given = self.args.override_generation_config or {}
        values |= {name: given[name] for name in (*_DEFAULTS, *_OTHER_DEFAULTS) if name in given}
        if (limit := values.pop("max_new_tokens", None)) is not None:
            values["max_tokens"] = limit
        return {name: value for name, value in values.items() if value is not None}

    def _num_logprobs(self, given: int) -> int:
        return self.engine.info.vocabulary_size if given == -1 else int(given)


def _adds_special_tokens(tokenization_kwargs: Mapping[str, Any] | None) -> bool:
    """The only keyword of the tokenizer that is supported."""
    given = dict(tokenization_kwargs or {})
    adds_special_tokens = given.pop("add_special_tokens", True)
    if given:
        refuse("tokenization_kwargs", given, "add_special_tokens is the only one")
    return bool(adds_special_tokens)


def rows_of(embeddings: penstock.Embeddings) -> list[penstock.Tensor]:
    """Each embedding as a tensor of its own."""
    size = embeddings.tensor.shape[1]
    data = memoryview(embeddings.tensor).cast("B")
    num_bytes = 4 * size
    starts = range(0, len(data), num_bytes)
    return [penstock.Tensor(shape=(size,), data=bytes(data[start : start + num_bytes])) for start in starts]


def drain_seconds(level: int, mode: str) -> float:
    """The time in which requests may finish before the engine sleeps."""
    if level not in (1, 2):
        refuse("level", level, "it must be 1 or 2; both free the weights and the KV cache")
    if mode not in ("abort", "wait"):
        refuse("mode", mode, 'it must be "abort" or "wait"')
    return math.inf if mode == "wait" else 0.0


def check_tags(tags: Sequence[str] | None) -> None:
    """Refuse to load only some of what `sleep` frees."""
    if tags is not None:
        refuse("tags", tags, "all memory is taken at once")


def check_reset(*, reset_running_requests: bool, reset_connector: bool) -> None:
    """Refuse to reset more than the prefix cache."""
    if reset_running_requests:
        refuse("reset_running_requests", reset_running_requests, "running requests keep their blocks")
    if reset_connector:
        refuse("reset_connector", reset_connector, "there is no connector to other caches")


def missing(owner: object, name: str, not_provided: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that is not provided, with the reason or the alternative."""
    reason = f": {not_provided[name]}" if name in not_provided else ""
    message = f"{type(owner).__name__} has no attribute {name!r}{reason}"
    return AttributeError(message, name=name, obj=owner)
