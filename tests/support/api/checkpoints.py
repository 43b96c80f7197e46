"""Random Hugging Face checkpoints, written with numpy, without torch.

The weights give meaningful logits: every projection has unit gain on normalised activations, the head gives
logits with a standard deviation near 3, and norm weights and biases are far enough from 1 and 0 that omitting
one is detected. The tokenizer has one token per byte: any text can be a prompt, and any token id decodes.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_OF_TURN = 258

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def make_config(family: str, **changes: Any) -> dict[str, Any]:
    """A small configuration of `family` in the format of transformers 5, with `changes` applied."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": END_OF_TURN,
    }
    if family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False
    if family == "mistral":
        config["sliding_window"] = None
    return config | changes


def in_old_format(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration in the format of transformers 4: `rope_theta`, `rope_scaling`, `torch_dtype`."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old["torch_dtype"] = old.pop("dtype")
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    return old


def write_checkpoint(directory: Path, config: dict[str, Any], *, seed: int = 0, shards: int = 1) -> Path:
    """Write config, weights in the config's dtype, tokenizer and generation defaults; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_TURN}))
    dtype = config.get("dtype") or config["torch_dtype"]
    tensors = {name: encode(values, dtype) for name, values in make_weights(config, seed)}
    _write_weights(directory, tensors, dtype, shards)
    write_tokenizer(directory, config["vocab_size"])
    return directory


def make_weights(config: dict[str, Any], seed: int) -> Iterator[tuple[str, Floats]]:
    """Every tensor of the configuration, with its Hugging Face name."""
    generator = np.random.default_rng(seed)
    for name, shape in tensor_shapes(config):
        values = generator.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            yield name, 1 + 0.1 * values
        elif name.endswith(".bias"):
            yield name, 0.1 * values
        else:
            gain = 3.0 if name in ("model.embed_tokens.weight", "lm_head.weight") else 1.0
            yield name, values * np.float32(gain / math.sqrt(shape[-1]))


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The Hugging Face name and the shape of every tensor."""
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    qkv_bias = family == "qwen2" or config.get("attention_bias", False)
    output_bias = family != "qwen2" and config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)

    def linear(name: str, rows: int, columns: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)

    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield from linear(f"{layer}.self_attn.q_proj", heads * head_dim, hidden, bias=qkv_bias)
        yield from linear(f"{layer}.self_attn.k_proj", kv_heads * head_dim, hidden, bias=qkv_bias)
        yield from linear(f"{layer}.self_attn.v_proj", kv_heads * head_dim, hidden, bias=qkv_bias)
        yield from linear(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, bias=output_bias)
        if family == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (head_dim,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield from linear(f"{layer}.mlp.gate_proj", inner, hidden, bias=mlp_bias)
        yield from linear(f"{layer}.mlp.up_proj", inner, hidden, bias=mlp_bias)
        yield from linear(f"{layer}.mlp.down_proj", hidden, inner, bias=mlp_bias)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def encode(values: Floats, dtype: str) -> NDArray[Any]:
    """`values` rounded to `dtype`; bfloat16 as bits, because numpy has no type for it."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        to_nearest_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return ((bits + to_nearest_even) >> np.uint32(16)).astype(np.uint16)
    return values.astype({"float32": np.float32, "float16": np.float16}[dtype])


def _write_weights(directory: Path, tensors: dict[str, NDArray[Any]], dtype: str, shards: int) -> None:
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors, dtype)
        return
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[index::shards])
        write_safetensors(directory / file, part, dtype)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(values.nbytes for values in tensors.values())
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index_text)


def write_safetensors(file: Path, tensors: dict[str, NDArray[Any]], dtype: str) -> None:
    """Write a safetensors file whose tensors have all the same dtype."""
    name_of_type = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    write_typed_safetensors(file, {name: (name_of_type, values) for name, values in tensors.items()})


def write_typed_safetensors(file: Path, tensors: dict[str, tuple[str, NDArray[Any]]]) -> None:
    """Write a safetensors file: length of the header, header, data. Dtypes have the names of the format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, values) in tensors.items():
        start, end = end, end + values.nbytes
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, values in tensors.values():
            out.write(values.tobytes())


def write_tokenizer(directory: Path, vocabulary_size: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = [f"Ġword{index}" for index in range(len(alphabet) + len(SPECIAL_TOKENS), vocabulary_size)]
    vocabulary = dict.fromkeys([*alphabet, *SPECIAL_TOKENS, *fillers])
    tokenizer = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
