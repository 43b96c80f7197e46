"""The keywords of `Engine(...)` and of a request, for type checkers and the command line.

What they mean in full, and their ranges, is documented with the classes that check them, `EngineConfig` and
`SamplingParams` in `_core.pyi`; a test holds the names here against theirs. The strings are the command
line's help.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, TypeVar

from penstock._core import EngineConfig, SamplingParams

Fields = TypeVar("Fields", EngineConfig, SamplingParams)
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
ElementName: TypeAlias = Literal["auto", "float32", "float16", "bfloat16"]
KvElementName: TypeAlias = Literal["auto", "float32", "float16", "bfloat16", "int8", "uint4"]


class EngineOptions(TypedDict, total=False):
    """Fields of `EngineConfig`."""

    device: Annotated[str | None, "Where to compute: auto or cpu."]
    dtype: Annotated[ElementName | None, "Type the weights are kept in: auto, float32, float16 or bfloat16."]
    threads: Annotated[int | None, "Compute threads; all CPUs by default."]
    max_model_len: Annotated[int | None, "Most tokens of a sequence; the model's length by default."]
    max_num_seqs: Annotated[int | None, "Most sequences computed together."]
    max_num_batched_tokens: Annotated[int | None, "Most tokens computed in one step."]
    max_waiting: Annotated[int | None, "Most requests that may wait."]
    block_size: Annotated[int | None, "Tokens per block of the KV cache: 16, 32, 64 or 128."]
    kv_cache_dtype: Annotated[KvElementName | None, "Type of the KV cache; that of the weights by default."]
    kv_cache_bytes: Annotated[int | None, "Bytes of the KV cache."]
    tokenizer: Annotated[str | os.PathLike[str] | None, "Another tokenizer.json, or a directory with one."]


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams`."""

    max_tokens: Annotated[int | None, "Most tokens to generate; up to the model's length by default."]
    min_tokens: Annotated[int | None, "No stop token before this many tokens."]
    temperature: Annotated[float | None, "0 is greedy; the model's own by default."]
    top_k: Annotated[int | None, "Choose among this many tokens; 0 is all."]
    top_p: Annotated[float | None, "Choose among the likeliest tokens of this total probability."]
    min_p: Annotated[float | None, "Choose among tokens this likely, relative to the likeliest."]
    seed: Annotated[int | None, "The same seed gives the same answer; random by default."]
    stop: Annotated[str | Sequence[str] | None, "Text that ends the answer; may be given several times."]
    stop_token_ids: Annotated[Sequence[int] | None, "Token that ends the answer; may be given several times."]
    ignore_eos: Annotated[bool | None, "Go on after the model's own end token."]
    logprobs: Annotated[bool | None, "Report the log probability of every token."]
    skip_special_tokens: Annotated[bool | None, "Leave special tokens out of the text."]


def merge(cls: type[Fields], given: Fields | None, changes: dict[str, Any]) -> Fields:
    """`given` with `changes`; a new object of the class where nothing is given."""
    if given is None:
        return cls(**changes)
    if not isinstance(given, cls):
        message = f"expected {cls.__name__}, got {type(given).__name__}"
        raise TypeError(message)
    return given.replace(**changes) if changes else given
