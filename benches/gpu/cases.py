"""The operations of a step that are measured on their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapes import Shape

#: Bytes of operands that are used in turn: more than the cache of the device, so that they come from memory.
TURN = 256 << 20
KV_BITS = {"bfloat16": 16, "int8": 8, "uint4": 4}


@dataclass(frozen=True)
class Product:
    """A product of activations and a weight matrix of bfloat16."""

    name: str
    rows: int
    outputs: int
    inner: int
    turn: int = TURN

    @property
    def copies(self) -> int:
        """Copies of the weights that are used in turn."""
        return max(2, min(32, self.turn // (2 * self.outputs * self.inner)))

    @property
    def bytes(self) -> float:
        """Bytes of weights, operands and float32 results."""
        return 2.0 * self.outputs * self.inner + self.rows * (2 * self.inner + 4 * self.outputs)

    @property
    def flops(self) -> float:
        """Operations."""
        return 2.0 * self.rows * self.outputs * self.inner


@dataclass(frozen=True)
class Attention:
    """Attention of a layer: of one query of each sequence, or of all queries of one prompt."""

    name: str
    kv: str
    sequences: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    is_prefill: bool = False
    turn: int = TURN

    @property
    def copies(self) -> int:
        """Copies of keys and values that are used in turn."""
        return max(2, min(32, self.turn // int(self.bytes)))

    @property
    def bytes(self) -> float:
        """Bytes of keys and values."""
        return self.sequences * self.context * 2 * self.kv_heads * self.head_dim * KV_BITS[self.kv] / 8

    @property
    def flops(self) -> float:
        """Operations on visible keys and values."""
        pairs = self.context * (self.context + 1) / 2 if self.is_prefill else self.context
        return 4.0 * self.sequences * self.heads * self.head_dim * pairs


def cases_of(
    shape: Shape, batches: list[int], contexts: list[int], prefill: int, turn: int = TURN
) -> list[Product | Attention]:
    """The products with each number of rows, decode attention and prefill attention."""
    found: list[Product | Attention] = [
        Product(f"{name}, {rows} rows", rows, outputs, inner, turn)
        for rows in (*batches, prefill)
        for name, outputs, inner in shape.products
        if not (name == "head" and rows == prefill)
    ]
    for kv in KV_BITS:
        shapes = [(sequences, context) for sequences in (batches[0], batches[-1]) for context in contexts]
        for sequences, context in (*shapes, (1, prefill)):
            is_prefill = context == prefill
            kind = "prefill" if is_prefill else "decode"
            heads = shape.heads, shape.kv_heads, shape.head_dim
            name = f"{kind} attention, {kv}, {sequences} x {context}"
            found.append(Attention(name, kv, sequences, context, *heads, is_prefill, turn))
    return found
