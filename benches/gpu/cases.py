"""The operations of a step that are measured on their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from shapes import Shape

#: Bytes of operands that are used in turn: more than the cache of the device, so that they come from memory.
TURN = 256 << 20
#: Products that are measured with quantised weights, too: a wide and a narrow one.
QUANTISED = ("gate_up", "down")
KV_BITS = {"bfloat16": 16, "int8": 8, "uint4": 4}


@dataclass(frozen=True)
class Product:
    """A product of activations and a weight matrix of bfloat16."""

    #: Of an activation.
    x_bytes: ClassVar[float] = 2

    name: str
    rows: int
    outputs: int
    inner: int
    turn: int = TURN

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights."""
        return 2.0 * self.outputs * self.inner

    @property
    def copies(self) -> int:
        """Copies of the weights that are used in turn."""
        return max(2, min(32, self.turn // int(self.weight_bytes)))

    @property
    def bytes(self) -> float:
        """Bytes of weights, operands and float32 results."""
        return self.weight_bytes + self.rows * (self.x_bytes * self.inner + 4 * self.outputs)

    @property
    def flops(self) -> float:
        """Operations."""
        return 2.0 * self.rows * self.outputs * self.inner


#: Bits of a weight with its scales, by type of the weights. Activations have 8 bits.
WEIGHT_BITS = {"int4": 5.0, "int8": 8.125, "fp8": 8.0}


@dataclass(frozen=True)
class QuantisedProduct(Product):
    """A product of 8-bit activations and a quantised weight matrix."""

    x_bytes: ClassVar[float] = 1.25  # with scales

    weights: str = "int8"

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights."""
        return WEIGHT_BITS[self.weights] / 8 * self.outputs * self.inner

    @property
    def flops(self) -> float:
        """Operations of 16 bits that take the time of those of 8 bits: half as many."""
        return 1.0 * self.rows * self.outputs * self.inner


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
    """The products with each number of rows, some of them quantised, and attention of decode and prefill."""
    found: list[Product | Attention] = [
        Product(f"{name}, {rows} rows", rows, outputs, inner, turn)
        for rows in (*batches, prefill)
        for name, outputs, inner in shape.products
        if not (name == "head" and rows == prefill)
    ]
    found += [
        QuantisedProduct(f"{weights} {name}, {rows} rows", rows, outputs, inner, turn, weights)
        for weights in WEIGHT_BITS
        for rows in (batches[0], batches[-1], prefill)
        for name, outputs, inner in shape.products
        if name in QUANTISED
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
