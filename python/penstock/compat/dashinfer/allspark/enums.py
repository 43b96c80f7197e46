"""The enumerations of the DashInfer API, with its values."""

from __future__ import annotations

from enum import Enum

__all__ = [
    "AsCacheMode",
    "AsEvictionStrategy",
    "AsMHAPrefill",
    "AsSchedulingStrategy",
    "AsStatus",
    "GenerateRequestStatus",
    "RoPEScaleMethod",
    "TargetDevice",
    "VocabType",
]


class _Code(int, Enum):
    """An enumeration of integers that prints its names."""


class AsStatus(_Code):
    """Result of a call of `Engine`."""

    ALLSPARK_SUCCESS = 0
    ALLSPARK_UNKNOWN_ERROR = 1
    ALLSPARK_PARAM_ERROR = 2
    ALLSPARK_IO_ERROR = 3
    ALLSPARK_MEMORY_ERROR = 4
    ALLSPARK_RUNTIME_ERROR = 5
    ALLSPARK_EXCEED_LIMIT_ERROR = 7
    ALLSPARK_INVALID_CALL_ERROR = 8
    ALLSPARK_ALLSPARK_INVALID_CALL_ERROR = 8  # the name in DashInfer's Python package
    ALLSPARK_EMPTY_REQUEST = 9
    ALLSPARK_ILLEGAL_REQUEST_ID = 10
    ALLSPARK_CACHE_MEMORY_OUT = 11
    ALLSPARK_REQUEST_DENIED = 12
    ALLSPARK_CHUNK_PREFILL = 14
    ALLSPARK_DEPRECATED = 20
    ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR = 21
    ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR = 22
    ALLSPARK_LORA_NOT_FOUND = 23
    ALLSPARK_LORA_ALREADY_LOADED = 24
    ALLSPARK_LORA_IN_USE = 25
    ALLSPARK_STREAMING = 200


class GenerateRequestStatus(_Code):
    """State of a request, in this order; states can be skipped, and one of the last two is the end."""

    Init = 0
    """The request waits, or its prompt is being computed."""
    ContextFinished = 1
    """Never reported: DashInfer's queues do not show it, and its programs take it for an error."""
    Generating = 2
    """The prompt is computed, and at least one token is generated."""
    GenerateFinished = 3
    """The output is complete, or the request was stopped."""
    GenerateInterrupted = 4
    """The engine ended the request early: the KV cache was full, or the request failed."""


class AsCacheMode(_Code):
    """Data type of the KV cache."""

    AsCacheDefault = 0
    """The model's own type."""
    AsCacheQuantI8 = 1
    """8-bit integers."""
    AsCacheQuantU4 = 2
    """4-bit integers."""


class AsMHAPrefill(_Code):
    """Attention kernel of prompts; it has no effect, the engine chooses."""

    AsPrefillDefault = 0
    AsPrefillFlashV2 = 10
    AsPrefillXformer = 20


class AsEvictionStrategy(_Code):
    """Choice of the request that is interrupted when the KV cache is full."""

    MaxLength = 0
    """The longest request."""
    Random = 1
    """Any request."""


class AsSchedulingStrategy(_Code):
    """Order of prompts and generation; it has no effect, a step computes both."""

    ContextPriority = 0
    Balance = 1


class VocabType(_Code):
    """Kind of a tokenizer's vocabulary."""

    VOCAB_TYPE_WPM = 0
    VOCAB_TYPE_SPM = 1
    VOCAB_TYPE_UGM = 2
    VOCAB_TYPE_BPE = 3


class TargetDevice(Enum):
    """Device of a model."""

    CUDA = 1
    CPU = 2
    CPU_NUMA = 3
    """CPU, with threads and memory on chosen NUMA nodes."""


class RoPEScaleMethod(Enum):
    """Method that extends the context of rotary embeddings."""

    NO_SCALE = 0
    YaRN = 3
    NTK = 4
