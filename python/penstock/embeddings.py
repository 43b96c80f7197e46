"""`Embeddings`: the pooled hidden states of texts, and how a batch of requests computes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock._checks import check_flag
from penstock._core import SamplingParams, Tensor, Usage
from penstock._shown import shown
from penstock.batch import error_at
from penstock.errors import GenerationError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._core import ModelInfo
    from penstock.batch import BatchItem

__all__ = ["Embeddings", "Pooling"]

_MODES = ("last", "mean")
#: Hidden states with more values are pooled in a thread.
_LARGE = 1 << 20


@dataclass(frozen=True)
class Embeddings:
    """The return value of `Engine.embed`: an embedding for each text, in order."""

    tensor: Tensor
    usage: Usage

    __slots__ = {
        "tensor": "The embeddings: float32 of shape `(number of texts, size)`.",
        "usage": "The token counts of all texts together; no token of them was generated.",
    }


class Pooling:
    """The embeddings of a call, which are pooled one by one, so that no hidden states are kept."""

    def __init__(
        self,
        info: ModelInfo,
        texts: str | Iterable[str | Sequence[int]],
        *,
        pooling: str | None,
        normalize: bool | None,
        dimensions: int | None,
        options: dict[str, Any],
    ) -> None:
        if isinstance(texts, (bytes, dict)) or not isinstance(texts, Iterable):
            limit = "a text, or an iterable of texts or lists of token ids"
            message = f"texts={shown(texts)} is not allowed: it must be {limit}"
            raise InvalidRequestError(message, "texts", texts, limit)
        self._pooling = info.pooling if pooling is None else pooling
        if self._pooling not in _MODES:
            limit = " or ".join(map(repr, _MODES))
            source = ", which the model's files ask for," if pooling is None else ""
            message = f"pooling={shown(self._pooling)}{source} is not supported: it must be {limit}"
            raise InvalidRequestError(message, "pooling", self._pooling, limit)
        if normalize is not None:
            check_flag("normalize", normalize)
        self._normalize = info.normalize if normalize is None else normalize
        self._size = info.hidden_size if dimensions is None else dimensions
        is_integer = isinstance(self._size, int) and not isinstance(self._size, bool)
        if not is_integer or not 1 <= self._size <= info.hidden_size:
            limit = f"an integer from 1 to {info.hidden_size}, the size of the model"
            message = f"dimensions={shown(dimensions)} is not allowed: it must be {limit}"
            raise InvalidRequestError(message, "dimensions", dimensions, limit)
        self.texts = [texts] if isinstance(texts, str) else list(texts)
        # One token is generated, because there is no request without. The prefix cache keeps no text.
        self.params = SamplingParams(
            max_tokens=1, output_hidden_states="prompt", use_prefix_cache=False, **options
        )
        self._rows: dict[int, bytes] = {}
        self._num_tokens = 0

    def is_large(self, item: BatchItem) -> bool:
        """Whether pooling this item takes too long for an event loop: more than about a millisecond."""
        return item.result is not None and item.result.usage.prompt_tokens * self._size > _LARGE

    def add(self, item: BatchItem) -> None:
        """Pool the hidden states of an item; raises its error, with the place of the text as the field."""
        if item.result is None:
            raise error_at(item, f"texts[{item.index}]")
        states, num_tokens = item.result.hidden_states, item.result.usage.prompt_tokens
        if states is None or states.shape[0] != num_tokens:  # the request was preempted and ended
            num_computed = 0 if states is None else states.shape[0]
            reason = f"{num_computed} of the {num_tokens} tokens of texts[{item.index}] were computed"
            message = f"{item.result.finish_reason}: {reason}"
            raise GenerationError(message)
        row = states.pooled(self._pooling, normalize=self._normalize, dimensions=self._size)
        self._rows[item.index] = bytes(row)
        self._num_tokens += num_tokens

    def embeddings(self) -> Embeddings:
        """The embeddings of all texts, once all items were added."""
        data = b"".join(self._rows[index] for index in range(len(self.texts)))
        tensor = Tensor(shape=(len(self.texts), self._size), data=data)
        return Embeddings(tensor, Usage(prompt_tokens=self._num_tokens))
