"""Penstock: an asynchronous LLM inference engine.

    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    async with penstock.Engine("path/to/model") as engine:
        async with engine.stream(messages, max_tokens=256) as request:
            async for chunk in request:
                print(chunk.text, end="", flush=True)

All public names are listed here; modules whose names begin with an underscore are private. Importing this
package imports only anyio and the extension module.
"""

import typing as _typing

from penstock import _install, demo
from penstock import _interpreter as _interpreter  # first: it refuses sub-interpreters
from penstock._convert import convert
from penstock._core import (
    Adapter,
    Choice,
    Chunk,
    CudaDevice,
    CudaInfo,
    EngineConfig,
    Health,
    Histogram,
    Host,
    HostTierInfo,
    MemoryInfo,
    ModelInfo,
    NumaInfo,
    ProfileRow,
    Result,
    SamplingParams,
    Score,
    Stats,
    Tensor,
    Timings,
    ToolCall,
    ToolCallDelta,
    Usage,
    WeightFormatInfo,
    __version__,
)
from penstock._cuda import cuda_info
from penstock._describe import describe
from penstock._options import EngineOptions, LogitsProcessor, Prompt, RequestOptions, SamplingOptions
from penstock.batch import Batch, BatchChunk, BatchItem, BatchStream, BlockingBatch, BlockingBatchStream
from penstock.blocking import Blocking
from penstock.embeddings import Embeddings
from penstock.engine import Engine
from penstock.errors import (
    AdapterConflictError,
    AdapterLimitError,
    AdapterLoadError,
    AdapterNotFoundError,
    ConfigError,
    DeadlineError,
    DeviceUnavailableError,
    EngineStoppedError,
    GenerationError,
    InvalidRequestError,
    ModelLoadError,
    OutOfMemoryError,
    OverloadedError,
    PenstockError,
    RequestError,
)
from penstock.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventStream
from penstock.request import BlockingRequest, BlockingStream, Request, Stream
from penstock.reranking import Ranking, Relevance, Reranker
from penstock.tokenizer import Tokenizer

__all__ = [
    "Adapter",
    "AdapterConflictError",
    "AdapterLimitError",
    "AdapterLoadError",
    "AdapterNotFoundError",
    "AllBlocksCleared",
    "Batch",
    "BatchChunk",
    "BatchItem",
    "BatchStream",
    "BlockRemoved",
    "BlockStored",
    "Blocking",
    "BlockingBatch",
    "BlockingBatchStream",
    "BlockingRequest",
    "BlockingStream",
    "Choice",
    "Chunk",
    "ConfigError",
    "CudaDevice",
    "CudaInfo",
    "DeadlineError",
    "DeviceUnavailableError",
    "Embeddings",
    "Engine",
    "EngineConfig",
    "EngineOptions",
    "EngineStoppedError",
    "GenerationError",
    "Health",
    "Histogram",
    "Host",
    "HostTierInfo",
    "InvalidRequestError",
    "KvEventStream",
    "LogitsProcessor",
    "MemoryInfo",
    "ModelInfo",
    "ModelLoadError",
    "NumaInfo",
    "OutOfMemoryError",
    "OverloadedError",
    "PenstockError",
    "ProfileRow",
    "Prompt",
    "Ranking",
    "Relevance",
    "Request",
    "RequestError",
    "RequestOptions",
    "Reranker",
    "Result",
    "SamplingOptions",
    "SamplingParams",
    "Score",
    "Stats",
    "Stream",
    "Tensor",
    "Timings",
    "Tokenizer",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "WeightFormatInfo",
    "__version__",
    "convert",
    "cuda_info",
    "demo",
    "describe",
]

_install.warn_of_namesake()

EngineOptions.__module__ = SamplingOptions.__module__ = RequestOptions.__module__ = __name__

if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> _typing.NoReturn:
        import sys

        from penstock import _attributes

        raise _attributes.missing_name(sys.modules[__name__], name, sys._getframe(1))  # noqa: SLF001
