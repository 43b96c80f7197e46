"""The embedding of a text: pooled hidden states of the last layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import penstock
from penstock.compat.errors import refuse
from penstock.compat.llama_cpp.constants import (
    LLAMA_POOLING_TYPE_LAST,
    LLAMA_POOLING_TYPE_MEAN,
    LLAMA_POOLING_TYPE_NONE,
    LLAMA_POOLING_TYPE_UNSPECIFIED,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["check_pooling", "embed", "pooling_of"]

#: One token is generated, because the engine has no request without.
_PARAMS = penstock.SamplingParams(max_tokens=1, output_hidden_states="prompt", use_prefix_cache=False)

#: The engine's names of pooling types.
_POOLINGS = {LLAMA_POOLING_TYPE_MEAN: "mean", LLAMA_POOLING_TYPE_LAST: "last"}
_POOLING_TYPES_OF_FILES = {"mean": LLAMA_POOLING_TYPE_NONE, "last": LLAMA_POOLING_TYPE_LAST}
_POOLING_TYPES = (LLAMA_POOLING_TYPE_UNSPECIFIED, LLAMA_POOLING_TYPE_NONE, *_POOLINGS)


def check_pooling(pooling_type: int) -> None:
    """Raise `UnsupportedError` for a pooling type that is not supported."""
    if pooling_type not in _POOLING_TYPES:
        refuse("pooling_type", pooling_type, f"it must be one of {', '.join(map(str, _POOLING_TYPES))}")


def pooling_of(info: penstock.ModelInfo) -> int:
    """The pooling type of a model's files. Raises `UnsupportedError` for one that is not supported.

    `mean` is also the engine's default for files without pooling, which most are: it is no pooling here.
    """
    pooling_type = _POOLING_TYPES_OF_FILES.get(info.pooling)
    if pooling_type is None:
        given = ", ".join(map(str, _POOLING_TYPES[1:]))
        reason = f"the model's files ask for {info.pooling}; pass one of {given}"
        refuse("pooling_type", LLAMA_POOLING_TYPE_UNSPECIFIED, reason)
    return pooling_type


def embed(
    engine: penstock.Engine, prompts: Sequence[Sequence[int]], pooling_type: int, *, normalize: bool
) -> Iterator[list[float] | list[list[float]]]:
    """The embedding of each prompt, or of each of its tokens without pooling."""
    for item in engine.blocking.generate_many(prompts, _PARAMS):
        if item.result is None:
            raise item.error or AssertionError(item)
        states: Any = item.result.hidden_states
        if (pooling := _POOLINGS.get(pooling_type)) is not None:
            pooled: Any = memoryview(states.pooled(pooling, normalize=normalize))
            yield pooled.tolist()
        else:
            rows: Any = memoryview(states).tolist()
            yield [_normalised(row) for row in rows] if normalize else rows


def _normalised(vector: list[float]) -> list[float]:
    norm = math.hypot(*vector) or 1.0
    return [value / norm for value in vector]
