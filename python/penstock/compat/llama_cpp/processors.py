"""Logits processors and stopping criteria with llama-cpp-python's arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock._install import missing_extra
from penstock.compat.errors import UnsupportedError, refuse

if TYPE_CHECKING:
    from collections.abc import Iterable

    import penstock

__all__ = [
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "with_arrays",
]

#: Called with the ids so far and the logits of the next token, which are numpy arrays.
LogitsProcessor: TypeAlias = Callable[[Any, Any], Any]
StoppingCriteria: TypeAlias = Callable[[Any, Any], bool]


class LogitsProcessorList(list[LogitsProcessor]):
    """Logits processors that are called in order."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The logits after all processors."""
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Criteria of which one that is true ends the output."""

    def __call__(self, input_ids: Any, logits: Any) -> bool:
        """Whether one is true."""
        return any(criterion(input_ids, logits) for criterion in list(self))


class MinTokensLogitsProcessor:
    """Masks the end token until `min_tokens` tokens are generated. It has the state of one output."""

    def __init__(self, min_tokens: int, token_eos: int) -> None:
        self.min_tokens = min_tokens
        self.token_eos = token_eos
        self.prompt_tokens: int | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The logits with the mask."""
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores[self.token_eos] = -math.inf
        return scores


def with_arrays(
    processors: Iterable[LogitsProcessor] | None,
    criteria: Iterable[StoppingCriteria] | None,
    end: int | None,
) -> list[penstock.LogitsProcessor]:
    """Processors of Penstock that call those of llama-cpp-python.

    A criterion is called before each token, with the model's logits; if it is true, the only possible token
    is `end`.
    """
    if processors is None and criteria is None:
        return []
    if criteria is not None and end is None:
        refuse("stopping_criteria", criteria, "the model has no end token")
    try:
        import numpy as np
    except ImportError as error:
        raise UnsupportedError(missing_extra("logits_processor", "numpy", "server")) from error
    callables = [*(processors or ())]
    checks = [*(criteria or ())]

    def process(token_ids: list[int], logits: penstock.Tensor) -> None:
        ids = np.array(token_ids, dtype=np.intc)
        values = np.asarray(memoryview(logits))
        if any(check(ids, values.copy()) for check in checks):
            values[:] = -math.inf
            values[end] = 0.0
            return
        scores = values.copy()
        for processor in callables:
            scores = processor(ids, scores)
        values[:] = scores

    return [process]
