"""The shapes of models, their random checkpoints, and the least work of their steps."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.api.checkpoints import encode, make_config, tensor_shapes, write_tokenizer

REPOSITORY = Path(__file__).parent.parent.parent
#: Bytes of an element of the KV cache; scales are not counted.
KV_BYTES = {"bfloat16": 2.0, "int8": 1.0, "uint4": 0.5}
#: Values of the block of random weights that all matrices repeat.
BLOCK = 1 << 25


@dataclass(frozen=True)
class Shape:
    """A model of Llama's architecture."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int

    @property
    def products(self) -> list[tuple[str, int, int]]:
        """The products of a layer, and that of the head: name, outputs, inner width."""
        heads, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            ("qkv", heads + 2 * kv, self.hidden),
            ("o", self.hidden, heads),
            ("gate_up", 2 * self.inner, self.hidden),
            ("down", self.hidden, self.inner),
            ("head", self.vocabulary, self.hidden),
        ]

    @property
    def layer_weights(self) -> int:
        """The weights of a layer."""
        return sum(outputs * inner for _, outputs, inner in self.products[:-1])

    @property
    def head_weights(self) -> int:
        """The weights of the head."""
        return self.vocabulary * self.hidden

    def weight_bytes(self, bits: float = 16) -> float:
        """Bytes that a step reads of the weights; the head has 16 bits."""
        return self.layers * self.layer_weights * bits / 8 + 2 * self.head_weights

    def kv_bytes(self, kv: str) -> float:
        """Bytes of a token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * KV_BYTES[kv]

    def flops(self, tokens: float, outputs: float, visible: float) -> float:
        """Operations of tokens that see `visible` positions in the mean, and of `outputs` logits rows."""
        attention = 4 * self.layers * self.heads * self.head_dim * visible
        return tokens * (2 * self.layers * self.layer_weights + attention) + 2 * outputs * self.head_weights

    def write(self, folder: Path) -> Path:
        """Write a checkpoint of random bfloat16 weights."""
        config = make_config(
            "llama",
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.positions,
            dtype="bfloat16",
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        write_tokenizer(folder, self.vocabulary)
        header, end = {}, 0
        for name, shape in tensor_shapes(config):
            start, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        values = np.random.default_rng(0).standard_normal(min(BLOCK, end // 2), np.float32)
        block = encode(values * np.float32(self.hidden**-0.5), "bfloat16")
        ones = encode(np.ones(self.hidden, np.float32), "bfloat16")
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, shape in tensor_shapes(config):
                rest = int(np.prod(shape))
                if len(shape) == 1:
                    file.write(ones.data)
                    continue
                while rest > 0:
                    file.write(block[:rest].data)
                    rest -= len(block)
        return folder


EIGHT_BILLION = Shape(4096, 14_336, 32, 32, 8, 128, 128_256, 16_384)
#: A step of it is hardly more than the work of the host.
SMALL_LAYER = Shape(256, 512, 1, 2, 1, 128, 512, 8192)
#: For dry runs.
TINY = Shape(128, 256, 2, 2, 1, 64, 512, 512)
TINY_LAYER = replace(TINY, layers=1)
