"""Logits processors with LMDeploy's arguments, and the one that ends repetitive outputs."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from array import array
from typing import TYPE_CHECKING, Any

from penstock._install import missing_extra
from penstock.compat.lmdeploy.checks import refuse
from penstock.compat.lmdeploy.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import penstock

__all__ = ["NgramStop", "with_tensors"]


def with_tensors(processor: Callable[[Any, Any], Any]) -> penstock.LogitsProcessor:
    """A processor of Penstock that calls one of LMDeploy: `processor(token_ids, logits)` with tensors."""
    if not callable(processor):
        refuse("a value of logits_processors", processor, "callable")
    try:
        import torch
    except ImportError as error:
        message = missing_extra("logits_processors", "torch", "lmdeploy")
        raise UnsupportedError(message) from error

    def process(token_ids: list[int], logits: penstock.Tensor) -> object:
        return processor(torch.tensor(token_ids), torch.from_dlpack(logits))

    return process


@dataclasses.dataclass
class NgramStop:
    """Ends an output by the token `end`, once its last `size` tokens occur `threshold` times in it.

    `forbids_end` masks `end` in other places. The processor has the state of one output.
    """

    size: int
    threshold: int
    min_tokens: int
    end: int
    forbids_end: bool
    _prompt_len: int | None = dataclasses.field(default=None, init=False)
    #: By the digest of the n-gram, which may be long.
    _counts: dict[bytes, int] = dataclasses.field(default_factory=dict, init=False)
    _counted: int = dataclasses.field(default=0, init=False)

    def __call__(self, token_ids: list[int], logits: penstock.Tensor) -> None:
        """Modify the logits of the next token."""
        if self._prompt_len is None:
            self._prompt_len = self._counted = len(token_ids)
        repeats = self._count(token_ids) >= self.threshold
        if repeats and len(token_ids) - self._prompt_len >= self.min_tokens:
            _write(logits, self.end, only=True)
        elif self.forbids_end:
            _write(logits, self.end, only=False)

    def _count(self, token_ids: list[int]) -> int:
        """The number of occurrences of the last n-gram in the output."""
        number = 0
        first = max(self._counted + 1, (self._prompt_len or 0) + self.size)
        for end in range(first, len(token_ids) + 1):
            ngram = array("q", token_ids[end - self.size : end])
            key = hashlib.blake2b(ngram, digest_size=16).digest()
            number = self._counts[key] = self._counts.get(key, 0) + 1
        self._counted = max(self._counted, len(token_ids))
        return number


def _write(logits: penstock.Tensor, token: int, *, only: bool) -> None:
    """Write minus infinity to the logits of all other tokens, or to that of the token."""
    values: Any = memoryview(logits)
    if only:
        values[:] = array("f", [-math.inf]) * len(values)
    values[token] = 0.0 if only else -math.inf
