"""vLLM's API on Penstock: `from penstock.compat.vllm import LLM, SamplingParams`."""

from typing import NoReturn

from penstock.compat.errors import UnsupportedError
from penstock.compat.vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from penstock.compat.vllm.engine.async_llm_engine import AsyncLLMEngine
from penstock.compat.vllm.entrypoints.llm import LLM
from penstock.compat.vllm.inputs import PromptType, TextPrompt, TokensPrompt
from penstock.compat.vllm.lora.request import LoRARequest
from penstock.compat.vllm.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from penstock.compat.vllm.pooling_params import PoolingParams
from penstock.compat.vllm.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from penstock.compat.vllm.v1.engine.async_llm import AsyncLLM

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LoRARequest",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedError",
    "__version__",
    "__version_tuple__",
]

#: The version of vLLM's API that this is.
__version__ = "0.33.0"
__version_tuple__ = (0, 33, 0)

_NO_CLASSES = "models with a head for classes are not supported yet"
_NOT_PROVIDED = {
    "ClassificationOutput": _NO_CLASSES,
    "ClassificationRequestOutput": _NO_CLASSES,
    "LLMEngine": "use LLM or AsyncLLM",
    "ModelRegistry": "the families of models are those of Penstock",
    "initialize_ray_cluster": "an engine uses one device",
}


def __getattr__(name: str) -> NoReturn:
    if name in _NOT_PROVIDED:
        message = f"vllm.{name} is not provided: {_NOT_PROVIDED[name]}"
        raise ImportError(message, name=__name__)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message, name=name)
