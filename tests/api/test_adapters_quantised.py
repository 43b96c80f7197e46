"""Adapters over quantised weights: the update is computed in float32, from unrounded activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from support.api.adapters import make_tensors, write_adapter, write_adapter_files
from support.api.checkpoints import encode, make_config, make_weights, write_checkpoint, write_safetensors
from support.api.engines import bits_of, make_engine
from support.api.ggufs import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, TYPES, VOCABULARY, write_gguf
from support.api.quantised import METHODS, write_quantised
from support.api.running import random_prompt

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PROMPT = random_prompt(60, vocabulary_size=VOCABULARY)
PARAMS = penstock.SamplingParams(
    max_tokens=16, temperature=0, ignore_eos=True, logprobs=True, output_logits="prompt"
)
CONFIG = make_config("llama")
#: The configuration of the models that `write_gguf` writes.
GGUF_CONFIG = make_config(
    "llama",
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HIDDEN // HEADS,
)
SCHEMES = ("int8", "int4", "w8a16", "w4a16", "fp8")
GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS")
#: Files of which a product has exactly the bits of a product with their values in float32.
WEIGHT_ONLY = ("gptq", "gptq-act-order", "awq", "w4a16", "w8a16", "fp8", "fp8-blocks")


def run(model: Path, adapter: Path | None = None, **options: Any) -> tuple[Any, NDArray[np.float32]]:
    """The bits of a greedy output, and the logits of the prompt."""
    with make_engine(model, max_adapters=1, **options) as engine:
        if adapter is not None:
            engine.blocking.load_adapter("adapter", adapter)
        name = "adapter" if adapter is not None else None
        result = engine.blocking.generate(PROMPT, PARAMS, adapter=name)
    return bits_of(result), np.asarray(result.logits)


def error_of(logits: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """The RMS error relative to the standard deviation."""
    return float(np.sqrt(np.mean((logits - exact) ** 2) / np.var(exact)))


def write_zero_update(directory: Path, config: dict[str, Any]) -> Path:
    """An adapter with B = 0."""
    tensors = {
        name: (dtype, values * ("lora_A" in name)) for name, (dtype, values) in make_tensors(config).items()
    }
    return write_adapter_files(directory, {"r": 8}, tensors)


def assert_same(found: tuple[Any, NDArray[np.float32]], expected: tuple[Any, NDArray[np.float32]]) -> None:
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_update_of_zeros_has_the_bits_of_the_quantised_base(scheme: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "base", CONFIG)
    adapter = write_zero_update(tmp_path / "adapter", CONFIG)
    assert_same(run(model, adapter, quantization=scheme), run(model, quantization=scheme))


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_update_of_zeros_has_the_bits_of_a_gguf_base(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", TYPES[kind])
    adapter = write_zero_update(tmp_path / "adapter", GGUF_CONFIG)
    assert_same(run(tmp_path / "model.gguf", adapter), run(tmp_path / "model.gguf"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_update_of_quantised_zeros_has_the_bits_of_float32(scheme: str, dtype: str, tmp_path: Path) -> None:
    """Linear layers of zeros, which every scheme stores exactly: the update is the whole product."""
    model = write_checkpoint(tmp_path / "base", CONFIG)
    weights = {
        name: values * ("_proj" not in name and np.float32(1)) for name, values in make_weights(CONFIG, 0)
    }
    write_safetensors(model / "model.safetensors", weights, "float32")
    adapter = write_adapter(tmp_path / "adapter", CONFIG, rank=24, lora_alpha=10, dtype=dtype)
    quantization = {"type": scheme, "embedding": "none", "head": "none"}
    expected = run(model, adapter)
    assert_same(run(model, adapter, quantization=quantization), expected)
    assert error_of(run(model)[1], expected[1]) > 0.3


@pytest.mark.parametrize("method", WEIGHT_ONLY)
def test_weight_only_base_has_the_bits_of_its_values(method: str, tmp_path: Path) -> None:
    """The same update is added to the same products."""
    write_quantised(tmp_path / "base", METHODS[method])
    adapter = write_adapter(tmp_path / "adapter", CONFIG, rank=16, lora_alpha=5)
    stored = run(tmp_path / "base", adapter, quantization="auto")
    values = run(tmp_path / "base", adapter, quantization="none", dtype="float32")
    assert_same(stored, values)
    assert error_of(run(tmp_path / "base")[1], values[1]) > 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_error_with_an_adapter_is_that_of_the_base(scheme: str, tmp_path: Path) -> None:
    """An update as large as the weights adds no error: its share of the product is exact."""
    model = write_checkpoint(tmp_path / "base", CONFIG)
    adapter = write_adapter(tmp_path / "adapter", CONFIG, rank=16)
    quantization = {"type": scheme, "embedding": "none", "head": "none"}
    error = error_of(run(model, quantization=quantization)[1], run(model)[1])
    adapted = error_of(run(model, adapter, quantization=quantization)[1], run(model, adapter)[1])
    print(f"{scheme}: error {error:.5f}, with an adapter {adapted:.5f}")
    assert 0 < adapted < 1.2 * error


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_error_of_a_gguf_with_an_adapter_is_that_of_the_base(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, TYPES[kind])
    adapter = write_adapter(tmp_path / "adapter", GGUF_CONFIG, rank=16)
    exact: dict[str, Any] = {"quantization": "none", "dtype": "float32"}
    error = error_of(run(file)[1], run(file, **exact)[1])
    adapted = error_of(run(file, adapter)[1], run(file, adapter, **exact)[1])
    print(f"{kind}: error {error:.5f}, with an adapter {adapted:.5f}")
    assert 0 < adapted < 1.5 * error < 0.08
    assert error_of(run(file)[1], run(file, adapter)[1]) > 5 * adapted


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_base_has_the_same_bits_in_a_batch(scheme: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "base", CONFIG)
    folders = [write_adapter(tmp_path / str(seed), CONFIG, rank=4 << seed, seed=seed) for seed in range(3)]
    params = PARAMS.replace(output_logits=None)
    prompts = [random_prompt(3 + 11 * index, seed=index) for index in range(8)]
    runs = [
        (prompt, params.replace(adapter=name))
        for prompt, name in zip(prompts, ["0", "1", "2", None] * 2, strict=True)
    ]

    def outputs(*, concurrency: int, **options: Any) -> list[Any]:
        with make_engine(model, max_adapters=3, quantization=scheme, **options) as engine:
            for index, folder in enumerate(folders):
                engine.blocking.load_adapter(str(index), folder)
            items = engine.blocking.generate_many(*zip(*runs, strict=True), concurrency=concurrency)
            return [item.result and bits_of(item.result) for item in items]

    alone = outputs(concurrency=1, prefix_cache=False)
    assert outputs(concurrency=8, threads=2, max_num_batched_tokens=64) == alone
    with make_engine(model, quantization=scheme) as engine:
        base = [bits_of(engine.blocking.generate(*runs[index])) for index in (3, 7)]
    assert [alone[3], alone[7]] == base


def test_half_precision_base_computes_the_update_in_float32(tmp_path: Path) -> None:
    """A bfloat16 base has the bits of its values in float32: nothing of the update is rounded."""
    half = write_checkpoint(tmp_path / "half", CONFIG | {"dtype": "bfloat16"})
    wide = write_checkpoint(tmp_path / "wide", CONFIG)
    values = {
        name: (encode(weights, "bfloat16").astype(np.uint32) << np.uint32(16)).view(np.float32)
        for name, weights in make_weights(CONFIG, 0)
    }
    write_safetensors(wide / "model.safetensors", values, "float32")
    adapter = write_adapter(tmp_path / "adapter", CONFIG, rank=16, lora_alpha=5)
    assert_same(run(half, adapter, kv_cache_dtype="float32"), run(wide, adapter))


@pytest.mark.parametrize("quantization", ["none", "int8", "w4a16"])
def test_converted_base_has_the_bits_of_its_source(quantization: Any, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "base", CONFIG)
    converted = penstock.convert(model, tmp_path / "converted", quantization=quantization)
    adapter = write_adapter(tmp_path / "adapter", CONFIG, rank=16, lora_alpha=5)
    assert_same(run(converted, adapter), run(model, adapter, quantization=quantization))
