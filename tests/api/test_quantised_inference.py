"""Inference with quantised weights: accuracy, memory, and the same output in every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from support.api.checkpoints import make_config, write_checkpoint
from support.api.ggufs import TYPES, VOCABULARY, write_gguf
from support.api.quantised import METHODS, write_quantised
from support.api.running import compute_logits, generate_greedily, perplexity, random_prompt
from support.marks import rare_except
from support.paths import DATA, ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

TEXTS = {"licence": ROOT / "LICENSE", "story": DATA / "alice.txt"}
NUM_TOKENS = 600

#: Bounds, about twice the measured values: the RMS error of the logits relative to their standard deviation,
#: and the relative change of the perplexity, to the weights of the file in float32. "auto" is Q4_1 with a
#: head of Q8_0.
BOUNDS = {
    "auto": (0.1, 0.01),
    "int8": (0.15, 0.03),
    "int4": (0.1, 0.01),
    "w8a16": (0.07, 0.02),
    "w4a16": (0.04, 0.005),
    "fp8": (0.2, 0.06),
}
QUANTISED = [kind for kind in TYPES if kind not in {"F32", "F16", "BF16"}]


def error_of(logits: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """The RMS error relative to the standard deviation."""
    return float(np.sqrt(np.mean((logits - exact) ** 2) / np.var(exact)))


@pytest.fixture(scope="module", params=rare_except(TEXTS, "licence"))
def exact(demo_model: Path, request: pytest.FixtureRequest) -> tuple[list[int], NDArray[np.float32]]:
    """The token ids of a text, and the logits of the demo model with its weights in float32."""
    with penstock.Engine(demo_model, threads=1) as engine:
        token_ids = engine.encode(TEXTS[request.param].read_text())[:NUM_TOKENS]
    return token_ids, compute_logits(demo_model, token_ids, threads=2)


@pytest.mark.needs("hooks", "sources")
@pytest.mark.parametrize("quantization", rare_except(BOUNDS, "int4"))
def test_perplexity_of_the_demo_model_stays_within_bounds(
    quantization: str, demo_model: Path, exact: tuple[list[int], NDArray[np.float32]]
) -> None:
    token_ids, expected = exact
    logits = compute_logits(demo_model, token_ids, quantization=quantization, threads=2)
    error = error_of(logits, expected)
    change = perplexity(logits, token_ids) / perplexity(expected, token_ids) - 1
    print(f"{quantization}: error of logits {error:.5f}, change of perplexity {change:+.5f}")
    most_error, most_change = BOUNDS[quantization]
    assert 0 < error < most_error
    assert change < most_change


@pytest.mark.needs("hooks", "sources")
@pytest.mark.parametrize("kind", QUANTISED)
def test_gguf_type_is_close_to_its_values_in_float32(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", TYPES[kind])
    prompt = random_prompt(100, vocabulary_size=VOCABULARY)
    expected = compute_logits(tmp_path / "model.gguf", prompt)
    error = error_of(compute_logits(tmp_path / "model.gguf", prompt, quantization="auto"), expected)
    print(f"{kind}: error of logits {error:.5f}")
    assert error < 0.05


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("method", ["gptq", "awq", "w4a16", "fp8", "fp8-square-blocks"])
def test_weight_only_files_have_the_logits_of_their_values(method: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, METHODS[method])
    prompt = random_prompt(50)
    stored = compute_logits(tmp_path, prompt, quantization="auto")
    np.testing.assert_array_equal(stored, compute_logits(tmp_path, prompt))


@pytest.mark.parametrize("method", ["fp8", "fp8-square-blocks"])
def test_fp8_files_are_computed_as_they_are_stored(method: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, METHODS[method])
    with penstock.Engine(tmp_path, threads=1) as engine:
        layers = [info for info in engine.info.weight_formats if "_proj" in info.module]
    assert {(info.format, info.activations) for info in layers} == {("fp8", "float32")}
    assert {info.group_size for info in layers} == {None if method == "fp8" else 64}


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a16", "w4a16", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_request_has_the_same_output_alone_and_in_a_batch(
    quantization: str, family: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", make_config(family))
    prompts = [random_prompt(length, seed=length) for length in (3, 17, 40, 90)]
    config = {"threads": 2, "quantization": quantization, "max_num_batched_tokens": 64}
    together = generate_greedily(checkpoint, prompts, 20, **config)
    for prompt, result in zip(prompts, together, strict=True):
        [alone] = generate_greedily(checkpoint, [prompt], 20, **config)
        assert alone.token_ids == result.token_ids
        assert alone.logprobs == result.logprobs


def test_quantised_weights_take_the_memory_of_their_codes(demo_model: Path) -> None:
    def memory(quantization: Any) -> int:
        with penstock.Engine(demo_model, threads=1, quantization=quantization) as engine:
            return engine.info.memory.weights

    bfloat16 = memory("none")
    assert memory("auto") < 0.37 * bfloat16
    assert memory("int8") < 0.52 * bfloat16
    assert memory("int4") < 0.37 * bfloat16
    assert memory("fp8") < 0.52 * bfloat16


def test_unknown_quantization_error_lists_the_names(tiny_model: Path) -> None:
    with pytest.raises(penstock.ConfigError, match="w8a16") as caught:
        penstock.Engine(tiny_model, quantization="int3")  # type: ignore[arg-type]
    assert caught.value.field == "quantization"
