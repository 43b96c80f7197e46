"""The option `quantization`: group sizes, types of tables and layers, and the formats in `engine.info`."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

import penstock
from penstock.cli import main
from support.api.checkpoints import make_config, make_weights, write_checkpoint, write_safetensors
from support.api.running import compute_logits, generate_greedily, random_prompt

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

TYPES = ("int8", "int4", "w8a16", "w4a16")
SCHEMES = [
    {"type": name, "group_size": size, "symmetric": symmetric}
    for name, size, symmetric in itertools.product(TYPES, (32, 64, 128, -1), (True, False))
]
#: Columns that are no multiple of every group size.
CONFIG = make_config("llama", hidden_size=160, intermediate_size=352)


def name_of(scheme: dict[str, Any]) -> str:
    return f"{scheme['type']}, {scheme['group_size']}, {'centred' if scheme['symmetric'] else 'minimum'}"


def write_exact(directory: Path, config: dict[str, Any], scheme: dict[str, Any]) -> Path:
    """A checkpoint whose matrices the scheme quantises without an error.

    They are codes times a power of two, with the lowest and the highest code in each 32 columns.
    """
    write_checkpoint(directory, config)
    low, high = (-8, 7) if "4" in scheme["type"] else (-128, 127)
    if "4" not in scheme["type"] and scheme["symmetric"]:
        low = -high
    generator = np.random.default_rng(1)
    tensors: dict[str, NDArray[Any]] = {}
    for name, weights in make_weights(config, 0):
        values = weights
        if weights.ndim == 2:
            rows, columns = weights.shape
            codes = np.rint(generator.standard_normal((rows, columns)) * high / 3).clip(low, high)
            codes[:, ::32], codes[:, 1::32] = low, high
            scale = 2.0 ** np.rint(np.log2(weights.std() / codes.std()))
            values = (codes * scale).astype(np.float32)
        tensors[name] = values
    write_safetensors(directory / "model.safetensors", tensors, "float32")
    return directory


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_scheme_has_the_logits_of_its_values_in_float32(scheme: dict[str, Any], tmp_path: Path) -> None:
    write_exact(tmp_path, CONFIG, scheme)
    prompt = random_prompt(40)
    quantization = {**scheme, "embedding": scheme, "head": scheme}
    logits = compute_logits(tmp_path, prompt, quantization=quantization)
    exact = compute_logits(tmp_path, prompt)
    if scheme["type"].endswith("a16"):
        np.testing.assert_array_equal(logits, exact)
    else:
        error = np.sqrt(np.mean((logits - exact) ** 2) / np.var(exact))
        assert 0 < error < 0.06


@pytest.mark.parametrize(
    "scheme",
    [
        {"type": "int8", "group_size": -1},
        {"type": "int8", "symmetric": False},
        {"type": "int4", "group_size": 128, "symmetric": True},
        {"type": "w4a16", "group_size": 64, "layers": {"*.v_proj": "int8", "*.down_proj": "none"}},
        {"type": "int8", "layers": {"*.v_proj": {"type": "int4", "group_size": 64}}},
        {"type": "fp8", "group_size": 128, "layers": {"*.v_proj": "w4a16"}},
    ],
    ids=str,
)
def test_request_has_the_same_output_alone_and_in_a_batch(scheme: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", CONFIG)
    prompts = [random_prompt(length, seed=length) for length in (3, 17, 40)]
    config = {"threads": 2, "quantization": scheme, "max_num_batched_tokens": 64}
    together = generate_greedily(checkpoint, prompts, 10, **config)
    for prompt, result in zip(prompts, together, strict=True):
        [alone] = generate_greedily(checkpoint, [prompt], 10, **config)
        assert (alone.token_ids, alone.logprobs) == (result.token_ids, result.logprobs)


def formats(model: Path, quantization: Any, **options: Any) -> dict[str, list[tuple[object, ...]]]:
    """The formats of each module: type, group size, symmetry, activations and number of matrices."""
    found: dict[str, list[tuple[object, ...]]] = {}
    with penstock.Engine(model, threads=1, quantization=quantization, **options) as engine:
        for info in engine.info.weight_formats:
            shown = (info.format, info.group_size, info.symmetric, info.activations, info.count)
            found.setdefault(info.module, []).append(shown)
    return found


def test_info_has_the_format_of_each_module(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", CONFIG)
    rules = {
        "model.layers.0.mlp.*": {"type": "w8a16", "group_size": -1},
        "*.down_proj": "int8",
        "*.v_proj": {"type": "int8", "group_size": 64, "symmetric": False},
    }
    quantization = {"type": "int4", "group_size": 64, "symmetric": True, "head": "none", "layers": rules}
    default, weight_only = ("int4", 64, True, "int8"), ("int8", None, True, "float32", 1)
    assert formats(checkpoint, quantization, dtype="bfloat16") == {
        "model.embed_tokens": [("int8", 128, True, "int8", 1)],
        "self_attn.q_proj": [(*default, 2)],
        "self_attn.k_proj": [(*default, 2)],
        "self_attn.v_proj": [("int8", 64, False, "int8", 2)],
        "self_attn.o_proj": [(*default, 2)],
        "mlp.gate_proj": [weight_only, (*default, 1)],
        "mlp.up_proj": [weight_only, (*default, 1)],
        "mlp.down_proj": [weight_only, ("int8", 128, True, "int8", 1)],
        "lm_head": [("bfloat16", None, None, "float32", 1)],
    }


def test_fp8_has_a_scale_for_each_row_or_group(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", CONFIG)
    found = formats(checkpoint, {"type": "fp8", "head": {"type": "fp8", "group_size": 64}})
    assert found["model.embed_tokens"] == [("fp8", None, True, "float32", 1)]
    assert found["mlp.down_proj"] == [("fp8", None, True, "float32", 2)]
    assert found["lm_head"] == [("fp8", 64, True, "float32", 1)]


def test_part_in_float_makes_its_fused_matrix_read_floats(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", CONFIG)
    found = formats(checkpoint, {"type": "int8", "layers": {"*.k_proj": "none"}})
    assert found["self_attn.q_proj"] == found["self_attn.v_proj"] == [("int8", 128, True, "float32", 2)]
    assert found["self_attn.k_proj"] == [("float32", None, None, "float32", 2)]
    assert found["self_attn.o_proj"] == [("int8", 128, True, "int8", 2)]


@pytest.mark.parametrize(
    "keys", [{"embedding": "none"}, {"head": "none"}, {"layers": {"lm_head": "none"}}], ids=str
)
def test_table_that_is_the_head_takes_the_scheme_of_either(keys: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", CONFIG | {"tie_word_embeddings": True})
    found = formats(checkpoint, {"type": "int4", **keys})
    assert found["model.embed_tokens"] == [("float32", None, None, "float32", 1)]
    assert "lm_head" not in found


def test_auto_keeps_the_formats_of_the_file_beside_others(demo_model: Path) -> None:
    stored = formats(demo_model, "auto")
    mixed = formats(demo_model, {"type": "auto", "layers": {"*.down_proj": "int8"}})
    assert mixed.pop("mlp.down_proj") == [("int8", 128, True, "int8", 30)]
    del stored["mlp.down_proj"]
    assert mixed == stored
    assert stored["mlp.up_proj"] == [("int4", 32, False, "int8", 30)]


def test_bytes_of_the_formats_are_those_of_the_weights(tiny_model: Path) -> None:
    with penstock.Engine(tiny_model, threads=1, quantization="int8") as engine:
        info = engine.info
        total = sum(item.bytes for item in info.weight_formats)
        assert 0.8 * info.memory.weights < total <= info.memory.weights
        assert info.to_dict()["weight_formats"][0]["module"] == "model.embed_tokens"


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"type": "int4", "layers": {"*.down": "int8"}}, r"\*\.down.*mlp\.down_proj"),
        ({"type": "int4", "embedding": "int8", "head": "none"}, "one matrix"),
    ],
)
def test_scheme_that_the_model_does_not_have_is_an_error(
    quantization: dict[str, Any], words: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", CONFIG | {"tie_word_embeddings": True})
    with pytest.raises(penstock.ConfigError, match=words) as caught:
        penstock.Engine(checkpoint, quantization=quantization).blocking.start()
    assert caught.value.field == "quantization"


def test_mapping_is_a_value_of_the_configuration() -> None:
    layers = {"*.down_proj": "int8", "*.v_proj": {"type": "int4", "group_size": 128}}
    given: dict[str, Any] = {"type": "w4a16", "group_size": -1, "head": "none", "layers": layers}
    config = penstock.EngineConfig(quantization=given)
    assert config.quantization == given
    assert list(given["layers"]) == list(config.quantization["layers"])
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):  # noqa: S301 - own bytes
        assert (other, hash(other)) == (config, hash(config))
    layers["*.up_proj"] = "none"
    assert config.quantization != given
    assert penstock.EngineConfig(quantization={"type": "int8"}).quantization == "int8"
    assert config.replace(quantization=None).quantization == "auto"


def test_command_line_takes_a_name_or_a_json_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []

    def record(_model: str, **options: Any) -> penstock.Engine:
        given.append(options["quantization"])
        raise penstock.ModelLoadError("recorded")

    monkeypatch.setattr("penstock.Engine", record)
    mapping = {"type": "int4", "group_size": 128}
    for value in ("int4", json.dumps(mapping), '{"type": '):
        result = CliRunner().invoke(main, ["bench", str(tmp_path), "--quantization", value])
    assert given == ["int4", mapping]
    assert "a JSON object is expected" in result.output
