"""Tensors of adapters that are damaged, unsupported or of another model are refused with their shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.api.adapters import PREFIX, make_tensors, write_adapter, write_adapter_files
from support.api.checkpoints import make_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from support.api.adapter_engine import AdapterEngine
    from support.api.adapters import Typed

CONFIG = make_config("llama")
#: A module with its input and output features.
MODULE, INPUTS, OUTPUTS = "model.layers.1.mlp.up_proj", 128, 192
A, B = (f"{PREFIX}{MODULE}.lora_{part}.weight" for part in "AB")


def zeros(*shape: int, dtype: str = "F32") -> Typed:
    numbers = {"F32": np.float32, "I8": np.int8, "F8_E4M3": np.uint8}
    return dtype, np.zeros(shape, numbers[dtype])


def filled(value: float) -> Typed:
    values = np.zeros((OUTPUTS, 8), np.float32)
    values[-1, -1] = value
    return "F32", values


def update(module: str, rows: int = OUTPUTS) -> dict[str, Typed]:
    """A and B of a module."""
    return {
        f"{PREFIX}{module}.lora_A.weight": zeros(8, INPUTS),
        f"{PREFIX}{module}.lora_B.weight": zeros(rows, 8),
    }


TOO_LARGE = f"{MODULE} of the adapter is too large to compute with: its scale is "
#: Changes of the tensors, `None` for one that is removed, and words of the error.
CHANGES: dict[str, tuple[Mapping[str, Typed | None], str]] = {
    "no B": ({B: None}, f"module {MODULE}: there is no tensor lora_B"),
    "no A": ({A: None}, f"module {MODULE}: there is no tensor lora_A"),
    "transposed A": ({A: zeros(INPUTS, 8)}, f"{B}: shape [192, 8]; [_, 128] is expected"),
    "transposed B": ({B: zeros(8, OUTPUTS)}, f"{B}: shape [8, 192]; [_, 8] is expected"),
    "both transposed": ({A: zeros(INPUTS, 8), B: zeros(8, OUTPUTS)}, f"{B}: shape [8, 192]"),
    "other inputs": ({A: zeros(8, 129)}, f"{A} has shape [8, 129]; the configuration requires [8, 128]"),
    "other outputs": ({B: zeros(191, 8)}, f"{B} has shape [191, 8]; the configuration requires [192, 8]"),
    "other rank of B": ({B: zeros(OUTPUTS, 9)}, f"{B}: shape [192, 9]; [_, 8] is expected"),
    "other rank": ({A: zeros(4, INPUTS), B: zeros(OUTPUTS, 4)}, f"{A}: rank 4; the configuration has 8"),
    "three dimensions": ({A: zeros(1, 8, INPUTS)}, f"{A}: shape [1, 8, 128]; a matrix is expected"),
    "one dimension": ({B: zeros(OUTPUTS)}, f"{B}: shape [192]; a matrix is expected"),
    "scalar": ({B: zeros()}, f"{B}: shape []; a matrix is expected"),
    "no rows": ({A: zeros(0, INPUTS)}, f"{A}: shape [0, 128]; a matrix is expected"),
    "no columns": ({B: zeros(OUTPUTS, 0)}, f"{B}: shape [192, 0]; a matrix is expected"),
    "nine dimensions": ({A: zeros(*[1] * 9)}, "dimensions"),
    "NaN": ({B: filled(float("nan"))}, f"{B} of the adapter has the value NaN"),
    "infinity": ({B: filled(float("inf"))}, f"{B} of the adapter has the value inf"),
    "negative infinity": ({B: filled(-float("inf"))}, f"{B} of the adapter has the value -inf"),
    "large A": ({A: ("F32", np.full((8, INPUTS), 2e19, np.float32))}, TOO_LARGE + "1e0"),
    "large B": ({B: filled(-2e20)}, TOO_LARGE + "1e0"),
    "8-bit integers": ({A: zeros(8, INPUTS, dtype="I8")}, f"{A} is I8; supported: F32, F16, BF16"),
    "8-bit floats": ({A: zeros(8, INPUTS, dtype="F8_E4M3")}, f"{A} is F8_E4M3; supported: F32, F16, BF16"),
    "unknown tensor": ({f"{PREFIX}extra.weight": zeros(8, 8)}, "extra.weight: is neither lora_A nor lora_B"),
    "head": (
        update("lm_head", 512),
        "lm_head of the adapter is not supported; the modules that can be adapted are self_attn.q_proj",
    ),
    "saved head": ({f"{PREFIX}lm_head.weight": zeros(512, 128)}, "lm_head.weight: is neither"),
    "saved norm": ({f"{PREFIX}model.norm.weight": zeros(128)}, "full tensors (modules_to_save, bias)"),
    "embedding": (
        {f"{PREFIX}model.embed_tokens.lora_embedding_A": zeros(8, 512)},
        "model.embed_tokens.lora_embedding_A: adapts an embedding, which is not supported",
    ),
    "trainable tokens": (
        {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": zeros(1, 128)},
        "belongs to trainable tokens",
    ),
    "magnitudes of DoRA": (
        {f"{PREFIX}{MODULE}.lora_magnitude_vector": zeros(OUTPUTS)},
        f"{MODULE}.lora_magnitude_vector: belongs to DoRA",
    ),
    "bias of an update": ({f"{PREFIX}{MODULE}.lora_B.bias": zeros(OUTPUTS)}, "is the bias of an update"),
    "bias of the base": (
        {f"{PREFIX}{MODULE}.base_layer.bias": zeros(OUTPUTS)},
        "replaces a tensor of the base",
    ),
    "bias of a module": ({f"{PREFIX}{MODULE}.bias": zeros(OUTPUTS)}, "full tensors (modules_to_save, bias)"),
    "same part twice": (
        {f"{PREFIX}{MODULE}.lora_A.default.weight": zeros(8, INPUTS)},
        "is a second tensor for the same part of a module",
    ),
    "same part without the prefix": ({f"{MODULE}.lora_B.weight": zeros(OUTPUTS, 8)}, "is a second tensor"),
    "layer beyond the model": (
        update("model.layers.2.mlp.up_proj"),
        "model.layers.2.mlp.up_proj of the adapter is not in the model, which has 2 layers",
    ),
    "layer of 40 digits": (
        update(f"model.layers.{'9' * 40}.mlp.up_proj"),
        "is not in the model, which has 2 layers",
    ),
    "negative layer": (
        update("model.layers.-1.mlp.up_proj"),
        "is not in the model, which has 2 layers",
    ),
    "module that the model does not have": (
        update("model.layers.0.mlp.router"),
        "model.layers.0.mlp.router of the adapter is not a module of the model that can be adapted",
    ),
    "norm": (
        update("model.layers.0.input_layernorm"),
        "model.layers.0.input_layernorm of the adapter is not a module of the model that can be adapted",
    ),
    "expert": (
        update("model.layers.0.mlp.experts.0.up_proj"),
        "mlp.experts.0.up_proj of the adapter is not a module of the model",
    ),
}

#: Layers that are spelled in another way than the model's.
SPELLINGS = {"leading zero": "model.layers.01.mlp.up_proj", "sign": "model.layers.+1.mlp.up_proj"}

#: Names of the same modules.
NAMES = {
    "without a prefix": "{module}.lora_{part}.weight",
    "with the name of the adapter": PREFIX + "{module}.lora_{part}.default.weight",
    "of a text model in a larger one": PREFIX + "model.language_model.{rest}.lora_{part}.weight",
    "of a wrapped text model": PREFIX + "language_model.{module}.lora_{part}.weight",
}
#: Names of no module.
WRONG_NAMES = {
    "another prefix": "transformer.{module}.lora_{part}.weight",
    "the prefix twice": PREFIX * 2 + "{module}.lora_{part}.weight",
    "another suffix": PREFIX + "{module}.lora_{part}.kernel",
    "no suffix": PREFIX + "{module}.lora_{part}",
    "lower case": PREFIX + "{module}.lora_{letter}.weight",
    "two adapter names": PREFIX + "{module}.lora_{part}.a.b.weight",
}


@pytest.fixture(autouse=True)
def without_adapters(adapter_engine: AdapterEngine) -> Iterator[None]:
    """Unload the adapters that a test has loaded."""
    yield
    for name in adapter_engine.engine.adapters:
        adapter_engine.unload(name)


def renamed(template: str) -> dict[str, Typed]:
    """The tensors of an adapter under other names."""
    tensors = {}
    for name, values in make_tensors(CONFIG).items():
        module, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        rest = module.removeprefix("model.")
        tensors[template.format(module=module, part=part, rest=rest, letter=part.lower())] = values
    return tensors


@pytest.mark.parametrize("case", CHANGES)
def test_tensor_is_refused(case: str, adapter_engine: AdapterEngine, tmp_path: Path) -> None:
    changes, words = CHANGES[case]
    tensors = {
        name: values for name, values in {**make_tensors(CONFIG), **changes}.items() if values is not None
    }
    assert words in adapter_engine.refusal(write_adapter_files(tmp_path, {"r": 8}, tensors))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_layer_in_another_spelling_is_refused(
    spelling: str, adapter_engine: AdapterEngine, tmp_path: Path
) -> None:
    tensors = make_tensors(CONFIG) | update(SPELLINGS[spelling])
    adapter_engine.refusal(write_adapter_files(tmp_path, {"r": 8}, tensors))


def test_error_of_the_model_names_the_folder(adapter_engine: AdapterEngine, tmp_path: Path) -> None:
    tensors = make_tensors(CONFIG) | {A: zeros(8, 129)}
    assert str(tmp_path) in adapter_engine.refusal(write_adapter_files(tmp_path, {"r": 8}, tensors))


@pytest.mark.parametrize("case", NAMES)
def test_other_names_of_the_modules_are_read(
    case: str, adapter_engine: AdapterEngine, tmp_path: Path
) -> None:
    adapter_engine.load("expected", write_adapter(tmp_path / "expected", CONFIG))
    folder = write_adapter_files(tmp_path / "named", {"r": 8}, renamed(NAMES[case]))
    adapter_engine.load("named", folder)
    assert adapter_engine.run("named") == adapter_engine.run("expected") != adapter_engine.base


@pytest.mark.parametrize("case", WRONG_NAMES)
def test_names_of_no_module_are_refused(case: str, adapter_engine: AdapterEngine, tmp_path: Path) -> None:
    tensors = renamed(WRONG_NAMES[case])
    message = adapter_engine.refusal(write_adapter_files(tmp_path, {"r": 8}, tensors))
    assert "model.layers.0." in message


def test_rank_above_the_maximum_is_refused(adapter_engine: AdapterEngine, tmp_path: Path) -> None:
    message = adapter_engine.refusal(write_adapter(tmp_path, CONFIG, rank=65))
    assert "has rank 65; max_adapter_rank is 64" in message


def test_adapter_of_another_model_is_refused(adapter_engine: AdapterEngine, tmp_path: Path) -> None:
    other = make_config("llama", hidden_size=160, intermediate_size=200)
    message = adapter_engine.refusal(write_adapter(tmp_path, other))
    assert "down_proj.lora_A.weight has shape [8, 200]; the configuration requires [8, 192]" in message
