"""The operations of a step that are measured on their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    def row_bytes(self) -> int:
        """Bytes of a row of activations."""
        return 2 * self.inner

    @property
    def bytes(self) -> float:
        """Bytes of weights, operands and float32 results."""
        return self.weight_bytes + self.rows * (self.row_bytes + 4.0 * self.outputs)

    @property
    def flops(self) -> float:
        """Operations."""
        return 2.0 * self.rows * self.outputs * self.inner


#: Bits of a weight with its scales, by type of the weights. Activations have 8 bits, with w4a16 16.
WEIGHT_BITS = {"int4": 5.0, "int8": 8.125, "fp8": 8.0, "w4a16": 5.0}


@dataclass(frozen=True)
class QuantisedProduct(Product):
    """A product of activations and a quantised weight matrix."""

    weights: str = "int8"

    @property
    def has_floats(self) -> bool:
        """Whether activations are of bfloat16."""
        return self.weights == "w4a16"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of activations, with scales: a block has 64 columns."""
        return -(-self.inner // 64) * (128 if self.has_floats else 80)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights."""
        return WEIGHT_BITS[self.weights] / 8 * self.outputs * self.inner

    @property
    def flops(self) -> float:
        """Operations of 16 bits that take the time of those of 8 bits: half as many."""
        return (2.0 if self.has_floats else 1.0) * self.rows * self.outputs * self.inner


@dataclass(frozen=True)
class Attention:
    """Attention of a layer: of one query of a sequence, of all of a prompt, or of its last ones."""

    name: str
    kv: str
    sequences: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    is_prefill: bool = False
    turn: int = TURN
    #: Queries of a prompt whose other positions are in the cache; 0: all.
    last_queries: int = 0

    @property
    def queries(self) -> int:
        """Queries of a sequence."""
        return (self.last_queries or self.context) if self.is_prefill else 1

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
        pairs = self.queries * self.context - self.queries * (self.queries - 1) / 2
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
