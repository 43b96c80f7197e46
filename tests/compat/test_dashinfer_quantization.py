"""Weight quantisation by the settings of the DashInfer API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.compat.dashinfer import allspark
from penstock.compat.dashinfer.allspark import (
    QUANT_CONFIG_MAP,
    GPTQSettings,
    HuggingFaceModel,
    IQSettings,
    TargetDevice,
    get_quant_settings_cls,
)
from penstock.compat.dashinfer.allspark.runtime_config import engine_options
from support.api.checkpoints import make_config, write_checkpoint
from support.api.quantised import METHODS, write_quantised

if TYPE_CHECKING:
    from pathlib import Path

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}


def instant(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "instant_quant", **settings}


def weight_formats(model: Path, output: Path, **arguments: Any) -> tuple[set[Any], list[int]]:
    """The formats of the layers' matrices of a serialised model, and tokens that it generates."""
    loader = HuggingFaceModel(model, "m").load_model()
    loader.serialize_to_path(None, output, enable_quant=True, **arguments).free_model()
    config = loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, [0], 2).build()
    path, options = engine_options(config)
    with penstock.Engine(path, **options) as engine:
        layers = [item for item in engine.info.weight_formats if item.module.endswith("proj")]
        result = engine.blocking.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        formats = {(item.format, item.group_size, item.symmetric, item.activations) for item in layers}
        return formats, list(result.token_ids)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with matrices of a multiple of 128 columns."""
    config = make_config("llama", hidden_size=256, intermediate_size=256)
    return write_checkpoint(tmp_path_factory.mktemp("wide"), config)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (instant(weight_format="int8"), ("int8", None, False, "float32")),
        (instant(weight_format="uint8", group_size=128), ("int8", 128, False, "float32")),
        (instant(weight_format="uint4"), ("int4", None, False, "float32")),
        (instant(weight_format="int4", group_size=32), ("int4", 32, False, "float32")),
        (instant(weight_format="int8", compute_method="activate_quant"), ("int8", None, True, "int8")),
        (instant(weight_format="fp8_e4m3", compute_method="activate_quant"), ("fp8", None, True, "float32")),
    ],
    ids=["a16w8", "a16w8-groups", "a16w4", "a16w4-groups", "a8w8", "fp8"],
)
def test_instant_quantisation_loads_and_generates(
    settings: dict[str, Any], expected: tuple[Any, ...], wide_model: Path, tmp_path: Path
) -> None:
    formats, tokens = weight_formats(wide_model, tmp_path, customized_quant_config=settings)
    assert formats == {expected}
    assert len(tokens) == 4


def test_group_settings_apply_to_the_modules_that_match(wide_model: Path, tmp_path: Path) -> None:
    settings = instant(weight_format="int8", group_settings={r"layers\.0\..*down_proj$": 32, "o_proj": 64})
    formats, _ = weight_formats(wide_model, tmp_path, customized_quant_config=settings)
    assert {item[1] for item in formats} == {None, 32, 64}


@pytest.mark.parametrize(
    ("expression", "pattern"),
    [
        ("down_proj", "*down_proj*"),
        (r"^model\.layers\.0\.", "model.layers.0.*"),
        ("layers.1.*o_proj$", "*layers?1*o_proj"),
    ],
)
def test_regular_expression_becomes_a_pattern(expression: str, pattern: str) -> None:
    value = IQSettings(instant(weight_format="uint4", group_settings={expression: 64})).quantization
    assert isinstance(value, dict)
    assert value["layers"] == {pattern: {"type": "w4a16", "group_size": 64, "symmetric": False}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "quant_method"),
        ({"quant_method": "awq"}, "quant_method is 'awq'"),
        (instant(), "weight_format"),
        (instant(weight_format="int3"), "weight_format"),
        (instant(weight_format="int8", group_size=256), "group_size is 256"),
        (instant(weight_format="int8", group_size=True), "group_size"),
        (instant(weight_format="int8", groupsize=32), "unknown keys of the quantisation: groupsize"),
        (instant(weight_format="int8", compute_method="both"), "compute_method"),
        (instant(weight_format="uint4", compute_method="activate_quant"), "weight_format is 'uint4'"),
        (instant(weight_format="fp8_e4m3", group_size=64), "group_size"),
        (instant(weight_format="int8", group_settings={"a|b": 32}), r"a\|b"),
        (instant(weight_format="int8", group_settings={"a": 5}), "group_settings"),
        (instant(weight_format="int8", group_settings=[1]), "group_settings"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3"),
        ("int8", "customized_quant_config"),
    ],
)
def test_bad_quantisation_setting_is_a_value_error(settings: Any, message: str, tiny_model: Path) -> None:
    loader = HuggingFaceModel(tiny_model, "m").load_model()
    with pytest.raises(ValueError, match=message):
        loader.serialize_to_memory(None, enable_quant=True, customized_quant_config=settings or {"x": 1})


def test_gptq_files_keep_their_codes_and_groups(tmp_path: Path) -> None:
    write_quantised(tmp_path / "model", METHODS["gptq"])
    with penstock.Engine(tmp_path / "model") as engine:
        stored = {item.format for item in engine.info.weight_formats if item.module.endswith("proj")}
        groups = {item.group_size for item in engine.info.weight_formats if item.module.endswith("proj")}
    for weight_only in (False, True):
        formats, tokens = weight_formats(
            tmp_path / "model", tmp_path / "output", weight_only_quant=weight_only
        )
        assert {item[0] for item in formats} == stored
        assert {item[1] for item in formats} == groups
        assert len(tokens) == 4


def test_gptq_with_act_order_is_not_implemented(tmp_path: Path) -> None:
    write_quantised(tmp_path, METHODS["gptq"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotImplementedError, match="desc_act"):
        HuggingFaceModel(tmp_path, "m").load_model().serialize_to_memory(None, enable_quant=True)


def test_quantisation_without_settings_is_a_value_error(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="customized_quant_config is not given"):
        HuggingFaceModel(tiny_model, "m").load_model().serialize_to_memory(None, enable_quant=True)


def test_settings_of_init_quantization_apply_to_serialize(wide_model: Path, tmp_path: Path) -> None:
    loader = HuggingFaceModel(wide_model, "m").load_model()
    loader.init_quantization(customized_quant_config=instant(weight_format="int8"))
    loader.serialize_to_path(None, tmp_path, enable_quant=True)
    graph = json.loads((tmp_path / "m.asgraph").read_text())
    assert graph["conversion"]["quantization"]["type"] == "w8a16"
    loader.init_quantization(enable=False).serialize_to_path(None, tmp_path)
    graph = json.loads((tmp_path / "m.asgraph").read_text())
    assert graph["conversion"]["quantization"] == "auto"


def test_settings_classes_are_found_by_method() -> None:
    assert {"gptq": GPTQSettings, "instant_quant": IQSettings} == QUANT_CONFIG_MAP
    assert get_quant_settings_cls("instant_quant") is IQSettings
    assert issubclass(GPTQSettings, allspark.QuantizationSettings)
    assert GPTQSettings(GPTQ).quantization == "auto"
