"""`serialize_model_from_torch`: writes the files of a serialised model from a state dict."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._install import missing_extra
from penstock._shown import shown
from penstock.compat.dashinfer.allspark.adapters import LoraSettings
from penstock.compat.dashinfer.allspark.llm import ModelSerializerException, SerializerErrors
from penstock.compat.dashinfer.allspark.model_files import DATA_TYPES, Conversion, ModelFiles
from penstock.compat.dashinfer.allspark.quantization import read_settings

if TYPE_CHECKING:
    import os

__all__ = ["serialize_model_from_torch"]

_ROTARY_BASE = 10000.0


def serialize_model_from_torch(
    model_name: str,
    model_type: str,
    torch_model: object,
    model_config: object,
    save_dir: str | os.PathLike[str] | None = None,
    as_model_path: str | os.PathLike[str] | None = None,
    as_weight_path: str | os.PathLike[str] | None = None,
    data_type: str = "float32",
    derive_type: str = "lmhead",
    multigpu_mode: int = 1,
    do_binary_add_fused: bool = True,
    do_dynamic_quantize_convert: bool = False,
    quant_config: Mapping[str, Any] | None = None,
    enable_i8cache_mha: bool = False,
    mha_kv_cache_config: Mapping[str, Any] | None = None,
    use_dynamic_ntk: bool = False,
    use_logn_attn: bool = False,
    model_sequence_length: int = 2048,
    seqlen_extrapolation: float = 1.0,
    lora_cfg: Mapping[str, Any] | None = None,
    rotary_base: float = _ROTARY_BASE,
) -> None:
    """Write the files of a serialised model from the weights of a torch model.

    `torch_model` is a module, or its state dict: a mapping of Hugging Face names to tensors of torch or
    arrays of NumPy. `model_config` is the model's configuration: a mapping with the keys of `config.json`, or
    an object with `to_dict()`. The files are `<model_name>.asgraph` and `<model_name>.asparam` in `save_dir`,
    or have the paths `as_model_path` and `as_weight_path`. `quant_config` is that of `serialize`; it and
    `do_dynamic_quantize_convert` are given together; `lora_cfg` is that of `serialize`, too, and its adapters
    are written beside the weights. The model has no tokenizer. While the files are written,
    a copy of the weights is in the system's directory of temporary files.

    `use_logn_attn` scales the queries beyond `model_sequence_length`. `model_type`, `multigpu_mode` and
    `do_binary_add_fused` have no effect: the configuration describes the model. The other parameters must
    have their defaults: the scaling of the rotary embedding and its base are values of `model_config`, the
    type of the KV cache is one of the runtime configuration.

    Requires `pip install 'penstock-llm[dashinfer]'`. Raises `ValueError` for invalid parameters and
    `ModelSerializerException` for weights that are no model.
    """
    unsupported = {
        "derive_type": (derive_type, "lmhead"),
        "enable_i8cache_mha": (enable_i8cache_mha, False),
        "mha_kv_cache_config": (mha_kv_cache_config or None, None),
        "use_dynamic_ntk": (use_dynamic_ntk, False),
        "seqlen_extrapolation": (seqlen_extrapolation, 1.0),
        "rotary_base": (rotary_base, _ROTARY_BASE),
    }
    for name, (value, default) in unsupported.items():
        if value != default:
            message = f"{name} is {value!r}; it must be {default!r}"
            raise ValueError(message)
    if data_type not in DATA_TYPES:
        message = f"data_type is {data_type!r}; it must be one of {', '.join(DATA_TYPES)}"
        raise ValueError(message)
    quantization: Any = "auto"
    if bool(do_dynamic_quantize_convert) != bool(quant_config):
        message = (
            f"do_dynamic_quantize_convert is {do_dynamic_quantize_convert!r} and quant_config is "
            f"{shown(quant_config)}; both must be given, or neither"
        )
        raise ValueError(message)
    if quant_config:
        quantization = read_settings(quant_config).quantization
    lora = LoraSettings.read(lora_cfg)
    files = _files(model_name, save_dir, as_model_path, as_weight_path)
    config = _configuration(model_config)
    if use_logn_attn:
        config |= {"use_logn_attn": True, "seq_length": model_sequence_length}
    tensors = _state_dict(torch_model)
    conversion = Conversion(source="", data_type=data_type, quantization=quantization, lora=lora is not None)
    with SerializerErrors(model_name), tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        if lora is not None:
            lora.check()
        if lora is None or not lora.lora_only:
            (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            _write_tensors(tensors, Path(directory) / "model.safetensors", model_name)
            files.write(directory, conversion)
        if lora is not None:
            lora.write(files.weights.parent)


def _files(
    model_name: str,
    save_dir: str | os.PathLike[str] | None,
    graph: str | os.PathLike[str] | None,
    weights: str | os.PathLike[str] | None,
) -> ModelFiles:
    if (graph is None) != (weights is None):
        message = (
            f"as_model_path is {graph!r} and as_weight_path is {weights!r}; both must be given, or neither"
        )
        raise ValueError(message)
    if graph is not None and weights is not None:
        return ModelFiles(Path(graph), Path(weights))
    if save_dir is None:
        raise ValueError("save_dir is None; it, or as_model_path and as_weight_path, must be given")
    return ModelFiles.named(save_dir, model_name)


def _configuration(model_config: object) -> dict[str, Any]:
    config = model_config if isinstance(model_config, Mapping) else getattr(model_config, "to_dict", dict)()
    if not config:
        message = f"model_config is {model_config!r}; it must be a mapping or an object with to_dict()"
        raise ValueError(message)
    return dict(config)


def _state_dict(torch_model: object) -> dict[str, Any]:
    model: Any = torch_model
    tensors = model if isinstance(model, Mapping) else getattr(model, "state_dict", dict)()
    if not isinstance(tensors, Mapping) or not tensors:
        message = f"torch_model is of type {type(model).__name__}; it must be a module or a state dict"
        raise ValueError(message)
    return dict(tensors)


def _write_tensors(tensors: dict[str, Any], path: Path, model_name: str) -> None:
    """Write a safetensors file. Tensors that share memory, such as tied weights, are written separately."""
    module = "safetensors.numpy" if all(map(_is_array, tensors.values())) else "safetensors.torch"
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        message = missing_extra("writing a state dict", error.name, "dashinfer")
        raise ModelSerializerException(message, 1, model_name) from error
    try:
        if module.endswith("torch"):
            tensors = _separate(tensors)
        library.save_file(tensors, path)
    except (AttributeError, TypeError, ValueError) as error:
        message = f"the state dict cannot be written: {error}"
        raise ModelSerializerException(message, 1, model_name) from error


def _separate(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors of torch as contiguous ones in the memory of the CPU, none of which share it."""
    separate, used = {}, set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        memory = copy.untyped_storage().data_ptr()
        separate[name] = copy.clone() if memory in used else copy
        used.add(memory)
    return separate


def _is_array(value: object) -> bool:
    """Whether a value is an array of NumPy, which need not be imported."""
    return type(value).__module__ == "numpy"
