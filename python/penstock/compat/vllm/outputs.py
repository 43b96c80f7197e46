"""vLLM's `outputs`: the outputs of requests."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import penstock
    from penstock.compat.vllm.logprobs import LogprobsOnePosition
    from penstock.compat.vllm.lora.request import LoRARequest

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]


@dataclasses.dataclass
class CompletionOutput:
    """One output of a request.

    `token_ids` include end tokens and stop tokens, `text` does not. `finish_reason` is `stop`, `length` or
    `abort`; `stop_reason` is the stop string, or the one of `stop_token_ids`, that ended the output.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: list[LogprobsOnePosition | None] | None
    routed_experts: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    sampling_mask: None = None
    spec_decode_metrics: None = None
    weight_versions: None = None

    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestOutput:
    """The outputs of a request, and its prompt.

    `prompt` is the text, that of a chat after its template; `None` for token ids. `num_cached_tokens` is the
    number of tokens of the prompt that came from the prefix cache. `metrics` are those of
    `penstock.Engine.stats`, and `None` here.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[LogprobsOnePosition | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: None = None
    prompt_token_id_logprobs: None = dataclasses.field(default=None, kw_only=True)
    kv_transfer_params: None = dataclasses.field(default=None, kw_only=True)
    ec_transfer_params: None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass
class PoolingOutput:
    """An embedding as a tensor: float32 of shape `(size,)`."""

    data: penstock.Tensor


@dataclasses.dataclass
class EmbeddingOutput:
    """An embedding as a list of numbers."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The size of the embedding."""
        return len(self.embedding)


@dataclasses.dataclass
class ScoringOutput:
    """The score of a pair of texts: the cosine of the angle between their embeddings."""

    score: float


Output = TypeVar("Output")


@dataclasses.dataclass
class PoolingRequestOutput(Generic[Output]):
    """The output for a prompt of `embed`, `encode` or `score`, and the tokens of the prompt."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool
    error: None = dataclasses.field(default=None, kw_only=True)
    late_chunking: None = dataclasses.field(default=None, kw_only=True)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding of a prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of a pair; its tokens are those of both texts."""


@dataclasses.dataclass
class BeamSearchSequence:
    """A beam: `tokens` and `text` include the prompt."""

    orig_prompt: Any
    tokens: list[int]
    logprobs: list[LogprobsOnePosition | None]
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass
class BeamSearchOutput:
    """The beams of a prompt, the best one first."""

    sequences: list[BeamSearchSequence]
