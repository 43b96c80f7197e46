"""The tensors of generated tokens, as DLPack capsules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock import Chunk

__all__ = ["tensors_of"]

_ITEM_BYTES = 4


def tensors_of(chunk: Chunk) -> list[dict[str, Any]]:
    """For each token of a chunk, the float32 tensors of the positions that were computed for it.

    The shape of each is `(positions, hidden_size)`: all positions of the prompt for the first token, one for
    each later token. Empty unless they were requested.
    """
    num_tokens = len(chunk.token_ids)
    given = {"inputs_embedding": chunk.embeddings, "hidden_states": chunk.hidden_states}
    parts = {
        name: _split(tensor, num_tokens)
        for name, tensor in given.items()
        if tensor is not None and num_tokens
    }
    if not parts:
        return []
    return [dict(zip(parts, capsules, strict=True)) for capsules in zip(*parts.values(), strict=True)]


def _split(tensor: Tensor, num_tokens: int) -> Iterator[Any]:
    """Copies of the rows of each token; the first token has those that the others leave."""
    rows, width = tensor.shape
    data, row_bytes = memoryview(tensor).cast("B"), width * _ITEM_BYTES
    start = 0
    for end in range(rows - num_tokens + 1, rows + 1):
        values = bytes(data[start * row_bytes : end * row_bytes])
        # A capsule of DLPack before 1.0, which every library reads, cannot be read-only: it is a copy.
        yield Tensor(shape=(end - start, width), data=values).__dlpack__(copy=True)
        start = end
