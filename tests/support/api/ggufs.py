"""Small GGUF files, written with the `gguf` package: metadata and a random model with weights of any type.

Types that the package can quantise to are quantised from random weights. For the other types, the blocks
themselves are random, with scales small enough that the activations stay finite.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

Type = gguf.GGMLQuantizationType

TYPES = {
    kind.name: kind
    for kind in (
        Type.F32,
        Type.F16,
        Type.BF16,
        Type.Q8_0,
        Type.Q4_0,
        Type.Q4_1,
        Type.Q5_0,
        Type.Q5_1,
        Type.Q2_K,
        Type.Q3_K,
        Type.Q4_K,
        Type.Q5_K,
        Type.Q6_K,
        Type.IQ4_NL,
        Type.IQ4_XS,
    )
}
# Offsets of the half-precision scales in a block and the largest scale, for types with random blocks.
SCALES = {
    Type.Q2_K: ((80, 82), 1e-2),
    Type.Q3_K: ((108,), 3e-3),
    Type.Q4_K: ((0, 2), 1e-4),
    Type.Q5_K: ((0, 2), 1e-4),
    Type.Q6_K: ((208,), 1e-4),
    Type.IQ4_NL: ((0,), 2e-3),
    Type.IQ4_XS: ((0,), 1e-4),
}

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY = 256, 512, 2, 4, 2, 320


def head_dim_of(architecture: str) -> int:
    """The head dimension; for Qwen 3 it is larger than the width divided by the heads."""
    return 128 if architecture == "qwen3" else HIDDEN // HEADS


def encode(values: NDArray[np.float32], kind: Type, generator: np.random.Generator) -> NDArray[Any]:
    """`values` quantised to `kind`, or random blocks of that kind if the package cannot quantise to it."""
    if kind not in SCALES:
        return gguf.quants.quantize(values, kind)
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    rows, width = values.shape
    blocks = generator.integers(256, size=(rows * width // columns, size), dtype=np.uint8)
    offsets, largest = SCALES[kind]
    for offset in offsets:
        scales = generator.uniform(largest / 10, largest, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write_gguf(
    file: Path,
    kind: Type,
    *,
    architecture: str = "llama",
    seed: int = 0,
    pooling: int | None = None,
    chat_template: str | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Write a model whose matrices have type `kind`; returns every tensor as the `gguf` package reads it."""
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(file, architecture)
    _add_metadata(writer, head_dim_of(architecture))
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    expected = {}
    for name, shape in _tensor_shapes(architecture):
        values = generator.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            values = 0.1 * values if name.endswith("bias") else 1 + 0.1 * values
            writer.add_tensor(name, values)
            expected[name] = values
        else:
            gain = 3.0 if name in ("token_embd.weight", "output.weight") else 1.0
            raw = encode(values * np.float32(gain / math.sqrt(shape[1])), kind, generator)
            writer.add_tensor(name, raw, raw_dtype=kind)
            expected[name] = gguf.quants.dequantize(raw, kind).reshape(shape).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _tensor_shapes(architecture: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    head_dim = head_dim_of(architecture)
    yield "token_embd.weight", (VOCABULARY, HIDDEN)
    for index in range(LAYERS):
        layer = f"blk.{index}"
        yield f"{layer}.attn_norm.weight", (HIDDEN,)
        for part, rows in (("q", HEADS * head_dim), ("k", KV_HEADS * head_dim), ("v", KV_HEADS * head_dim)):
            yield f"{layer}.attn_{part}.weight", (rows, HIDDEN)
            if architecture == "qwen2":
                yield f"{layer}.attn_{part}.bias", (rows,)
        if architecture == "qwen3":
            yield f"{layer}.attn_q_norm.weight", (head_dim,)
            yield f"{layer}.attn_k_norm.weight", (head_dim,)
        yield f"{layer}.attn_output.weight", (HIDDEN, HEADS * head_dim)
        yield f"{layer}.ffn_norm.weight", (HIDDEN,)
        yield f"{layer}.ffn_gate.weight", (INNER, HIDDEN)
        yield f"{layer}.ffn_up.weight", (INNER, HIDDEN)
        yield f"{layer}.ffn_down.weight", (HIDDEN, INNER)
    yield "output_norm.weight", (HIDDEN,)
    yield "output.weight", (VOCABULARY, HIDDEN)


def _add_metadata(writer: gguf.GGUFWriter, head_dim: int) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    fillers = [f"Ġword{index}" for index in range(257, VOCABULARY - 1)]
    writer.add_token_list([*_byte_tokens(), "ab", *fillers, "<end>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * (VOCABULARY - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(VOCABULARY - 1)
    writer.add_add_bos_token(value=False)


def _byte_tokens() -> list[str]:
    """The 256 characters that stand for bytes in byte-level vocabularies, sorted."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())
