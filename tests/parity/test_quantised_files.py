"""Quantised Hugging Face checkpoints: values, logits, refused settings, parity with compressed-tensors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

import penstock
from penstock.cli import main
from support import hooks
from support.api.checkpoints import make_config, write_checkpoint, write_safetensors, write_typed_safetensors
from support.api.quantised import METHODS, write_quantised
from support.api.running import compute_logits, random_prompt
from support.parity.compressed import compress

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def read(model: Path, name: str) -> NDArray[np.float32]:
    return np.frombuffer(hooks.tensor(str(model), name), dtype="<f4")


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("method", METHODS)
def test_weights_have_the_values_of_the_published_layout(method: str, tmp_path: Path) -> None:
    expected = write_quantised(tmp_path / "model", METHODS[method])
    for name, values in expected.items():
        np.testing.assert_array_equal(read(tmp_path / "model", name), values.ravel(), err_msg=name)


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("method", ["gptq", "awq", "w4a16", "fp8-blocks"])
def test_logits_are_those_of_the_dequantised_weights(method: str, tmp_path: Path) -> None:
    expected = write_quantised(tmp_path / "model", METHODS[method])
    plain = write_checkpoint(tmp_path / "plain", make_config("llama"))
    write_safetensors(plain / "model.safetensors", expected, "float32")
    prompt = random_prompt(50)
    ours, theirs = (
        compute_logits(model, prompt, threads=1, dtype="float32") for model in (tmp_path / "model", plain)
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("method", METHODS)
def test_info_names_method_and_parameters(method: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, METHODS[method])
    shown = json.loads(CliRunner().invoke(main, ["info", str(tmp_path), "--json"]).stdout)
    assert shown["quantization"] == METHODS[method].description
    assert shown["unsupported"] == []
    text = CliRunner().invoke(main, ["info", str(tmp_path)]).stdout
    assert f"quantization   {METHODS[method].description}\n" in text


@pytest.mark.needs("hooks")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantization_config.quant_method is bitsandbytes; supported: awq",
        ),
        ({"quant_method": "hqq"}, "GGUF file"),
        ({"quant_method": None}, "quantization_config.quant_method: missing"),
        ({"bits": 2}, "quantization_config.bits is 2; supported: 4, 8"),
        ({"group_size": 128}, r"shape \[6, 16\]; \[2, 16\] is expected"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is marlin; supported: gptq, gptq_v2"),
    ],
)
def test_unsupported_setting_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_quantised(tmp_path, METHODS["gptq"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(penstock.ModelLoadError, match=message):
        compute_logits(tmp_path, [1])
    refused = CliRunner().invoke(main, ["info", str(tmp_path)])
    assert refused.exit_code == 1


@pytest.mark.needs("hooks")
def test_missing_part_of_a_matrix_is_named(tmp_path: Path) -> None:
    parts, _ = METHODS["awq"].quantise(np.ones((64, 64), np.float32))
    del parts["qzeros"]
    write_quantised(tmp_path, METHODS["awq"])
    write_typed_safetensors(
        tmp_path / "model.safetensors", {f"a.{suffix}": part for suffix, part in parts.items()}
    )
    with pytest.raises(penstock.ModelLoadError, match=r"there is no tensor named a\.qzeros"):
        compute_logits(tmp_path, [1])


SCHEMES: dict[str, dict[str, Any]] = {
    "int4": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "int4-zero-points": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    "int4-channel-zero-points": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "int8-words": {"num_bits": 8, "strategy": "channel"},
    "int8": {"num_bits": 8, "strategy": "channel"},
    "int8-zero-points": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "float8": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "float8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "float8-blocks": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]},
}


@pytest.mark.needs("hooks")
@pytest.mark.oracle
@pytest.mark.parametrize("kind", SCHEMES)
def test_files_of_compressed_tensors_have_its_values(kind: str, tmp_path: Path) -> None:
    name = "float-quantized" if kind.startswith("float") else "int-quantized"
    if kind.startswith("int4") or kind == "int8-words":
        name = "pack-quantized"
    theirs = compress(name, SCHEMES[kind], rounds_inputs=kind.startswith("int8"))
    tensors = {f"a.{suffix}": tensor for suffix, tensor in theirs.tensors.items()}
    write_typed_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": theirs.settings}))
    np.testing.assert_array_equal(read(tmp_path, "a.weight"), theirs.values.ravel())
