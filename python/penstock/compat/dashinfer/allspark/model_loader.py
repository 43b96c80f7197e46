"""Loaders, which read a model and write the files that `Engine.install_model` takes."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import penstock
from penstock.compat.dashinfer.allspark.adapters import LoraSettings
from penstock.compat.dashinfer.allspark.dashinfer_model import DashInferModel
from penstock.compat.dashinfer.allspark.enums import RoPEScaleMethod
from penstock.compat.dashinfer.allspark.llm import LLM, ModelSerializerException, Read
from penstock.compat.dashinfer.allspark.model_files import (
    DATA_TYPES,
    Conversion,
    ModelFiles,
    TemporaryFiles,
    source_files,
)
from penstock.compat.dashinfer.allspark.quantization import QuantizationSettings, read_settings
from penstock.compat.dashinfer.allspark.values import read_mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "LLM",
    "DashInferModel",
    "HuggingFaceModel",
    "ModelScope",
    "ModelSerializerException",
    "RoPEScaleMethod",
    "snapshot_download",
]

_ROPE_TYPES = {
    RoPEScaleMethod.NO_SCALE: "default",
    RoPEScaleMethod.YaRN: "yarn",
    RoPEScaleMethod.NTK: "dynamic",
}


class HuggingFaceModel(LLM):
    """A model as a Hugging Face directory, a `.gguf` file, or an id on the Hugging Face hub or on ModelScope.

        loader = HuggingFaceModel("Qwen/Qwen2.5-1.5B-Instruct", "qwen", user_set_data_type="bfloat16")
        loader.load_model().serialize(engine, model_output_dir="model_output").free_model()

    `user_set_data_type` is `float32`, `float16` or `bfloat16`, by default that of the files.
    `in_memory_serialize` makes `serialize` write temporary files. No code of a model is executed:
    `trust_remote_code` has no effect.
    """

    def __init__(
        self,
        hf_model_path: str | os.PathLike[str],
        name: str,
        in_memory_serialize: bool = False,
        user_set_data_type: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(name)
        self.hf_model_path = os.fspath(hf_model_path)
        self.in_memory_serialize = in_memory_serialize
        self._data_type = _data_type("user_set_data_type", user_set_data_type)
        self._overrides: dict[str, Any] = {}
        self._settings: QuantizationSettings | None = None
        self._temporary: TemporaryFiles | None = None
        self._is_loaded = False

    def load_model(
        self,
        override_data_type: str | None = None,
        direct_load: bool = False,
        load_format: str | None = "auto",
        trust_remote_code: bool = False,
    ) -> Self:
        """Find the model, download it if necessary, and read its configuration.

        The weights are read when the model is serialised, so `direct_load` has no effect. `load_format` is
        `auto` or `safetensors`; `None` is `auto`. An id that the Hugging Face hub does not have is looked up
        on ModelScope, if its package is installed. Raises `ModelSerializerException`.
        """
        if load_format not in (None, "auto", "safetensors"):
            message = f"load_format is {load_format!r}; it must be 'auto' or 'safetensors'"
            raise ValueError(message)
        if override_data_type is not None:
            self._data_type = _data_type("override_data_type", override_data_type)
        with self._errors():
            self._metadata = self._read(penstock.describe)
        self._is_loaded = True
        return self

    def _find_model(self) -> str:
        return self.hf_model_path

    def _read(self, read: Callable[[str | Path], Read]) -> Read:
        try:
            return super()._read(read)
        except penstock.ModelLoadError as error:
            # The library of the Hugging Face hub is optional, and so is its class of this error.
            if type(error.__cause__).__name__ != "RepositoryNotFoundError" or _modelscope() is None:
                raise
            try:
                self.hf_model_path = snapshot_download(self.hf_model_path)
            except ModelSerializerException as second:
                raise ModelSerializerException(f"{error}; {second.args[0]}", 1, self.name) from error
        return super()._read(read)

    def init_quantization(
        self,
        enable: bool = True,
        customized_quant_config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Select the quantisation of the weights: by the argument, else as in the model's own files.

        Raises `ValueError` if the files are not quantised and there is no argument, or for invalid settings.
        """
        if not enable:
            self._settings = None
            return self
        settings = customized_quant_config or self._own_settings()
        if not settings:
            raise ValueError("customized_quant_config is not given, and the model's files are not quantised")
        self._settings = read_settings(settings)
        return self

    def _own_settings(self) -> Mapping[str, Any]:
        """The settings in a quantised model's files."""
        directory = Path(self._loaded()["path"])
        with self._errors():
            for name, key in (("config.json", "quantization_config"), ("quantize_config.json", None)):
                path = directory / name
                content = read_mapping(path) if path.is_file() else {}
                settings = content if key is None else content.get(key)
                if isinstance(settings, dict) and settings:
                    return {"quant_method": "gptq", **settings}
        return {}

    def set_rope_scale_method(
        self, method: RoPEScaleMethod, parameters: Mapping[str, Any] | None = None
    ) -> Self:
        """Set the scaling of the rotary embedding, before the model is serialised.

        `parameters` has the other keys of `rope_scaling` in `config.json`, such as `factor`.
        """
        scaling = {"rope_type": _ROPE_TYPES[method], **(parameters or {})}
        # transformers 5 writes `rope_parameters`, earlier versions `rope_scaling`, which replaces them
        config = self.get_model_config()
        if "rope_parameters" in config and not config.get("rope_scaling"):
            self._overrides = {"rope_parameters": scaling}
        else:
            self._overrides = {"rope_scaling": None if method is RoPEScaleMethod.NO_SCALE else scaling}
        return self

    def serialize(
        self,
        engine: object,
        model_output_dir: str | os.PathLike[str] | None = "",
        enable_quant: bool = False,
        weight_only_quant: bool = False,
        customized_quant_config: Mapping[str, Any] | None = None,
        multinode_mode: bool = True,
        lora_cfg: Mapping[str, Any] | None = None,
        skip_if_exists: bool = False,
    ) -> Self:
        """Call `serialize_to_memory` if the loader has `in_memory_serialize`, else `serialize_to_path`."""
        if self.in_memory_serialize:
            return self.serialize_to_memory(
                engine,
                enable_quant,
                weight_only_quant,
                multinode_mode,
                customized_quant_config,
                lora_cfg,
            )
        return self.serialize_to_path(
            engine,
            model_output_dir,
            enable_quant,
            weight_only_quant,
            skip_if_exists,
            multinode_mode,
            customized_quant_config,
            lora_cfg,
        )

    def serialize_to_path(
        self,
        engine: object,
        model_output_dir: str | os.PathLike[str] | None,
        enable_quant: bool = False,
        weight_only_quant: bool = False,
        skip_if_exists: bool = False,
        multinode_mode: bool = True,
        customized_quant_config: Mapping[str, Any] | None = None,
        lora_cfg: Mapping[str, Any] | None = None,
    ) -> Self:
        """Write `<name>.asgraph` and `<name>.asparam` to a directory.

        With `enable_quant` the weights are quantised as `init_quantization` describes; whether products
        read quantised activations depends on those settings, not on `weight_only_quant`. With
        `skip_if_exists` nothing is written if both files are complete and were written by this version, from
        the same unchanged files and with the same settings. The files fit any number of NUMA nodes
        (`multinode_mode`).

        With `lora_cfg`, also an empty one, the model takes adapters. `lora_names` are the names of
        directories in `input_base_dir`, in PEFT's layout with `adapter_model.safetensors`; each is copied to
        `<name>.aslora`. With `lora_only` nothing else is written.

        A failure leaves the former files, or no `.asgraph`. Threads and processes may write the same name:
        both files are then those of one of them. Raises `ModelSerializerException` and `ValueError`.
        """
        if not model_output_dir:
            raise ValueError("model_output_dir is empty; it must be a directory")
        lora = self._lora_settings(lora_cfg)
        conversion = self._conversion(enable_quant, customized_quant_config, lora)
        files = ModelFiles.named(model_output_dir, self.name)
        with self._errors():
            is_wanted = lora is None or not lora.lora_only
            if is_wanted and not (skip_if_exists and files.are_complete(conversion)):
                files.write(conversion.source, conversion)
            if lora is not None:
                lora.write(files.weights.parent)
        self._files = files
        return self

    def serialize_to_memory(
        self,
        engine: object,
        enable_quant: bool = False,
        weight_only_quant: bool = False,
        multinode_mode: bool = True,
        customized_quant_config: Mapping[str, Any] | None = None,
        lora_cfg: Mapping[str, Any] | None = None,
    ) -> Self:
        """Write the files of `serialize_to_path` to the system's directory of temporary files.

        They are deleted by `free_memory_serialize_file` and at exit, but not by `free_model`. Raises
        `ValueError` for `lora_only`: the model has no files then.
        """
        lora = self._lora_settings(lora_cfg)
        if lora is not None and lora.lora_only:
            raise ValueError("lora_only is True; it must be False for temporary files")
        conversion = self._conversion(enable_quant, customized_quant_config, lora)
        self.free_memory_serialize_file()
        with self._errors():
            temporary = TemporaryFiles()
            try:
                files = ModelFiles.named(temporary.directory, self.name)
                files.write(conversion.source, conversion)
                if lora is not None:
                    lora.write(temporary.directory)
            except BaseException:
                temporary.remove()
                raise
        self._temporary, self._files = temporary, files
        return self

    def free_model(self) -> Self:
        """End the use of the original model. The serialised files, tokenizer and configuration remain."""
        self._is_loaded = False
        return self

    def free_memory_serialize_file(self) -> Self:
        """Delete the files of `serialize_to_memory`. An installed model does not need them any more.

        Adapters are kept until the process ends, for `Engine.load_lora`.
        """
        if self._temporary is not None:
            self._temporary.remove_model()
            self._temporary = self._files = None
        return self

    def _lora_settings(self, lora_cfg: Mapping[str, Any] | None) -> LoraSettings | None:
        lora = LoraSettings.read(lora_cfg)
        if lora is not None:
            with self._errors():
                lora.check()
        return lora

    def _conversion(
        self,
        enable_quant: bool,
        customized_quant_config: Mapping[str, Any] | None,
        lora: LoraSettings | None,
    ) -> Conversion:
        if not self._is_loaded:
            raise ModelSerializerException("the model is not loaded; call load_model first", 1, self.name)
        if customized_quant_config and not enable_quant:
            raise ValueError("customized_quant_config is given without enable_quant=True")
        if enable_quant and (customized_quant_config or self._settings is None):
            self.init_quantization(customized_quant_config=customized_quant_config)
        quantization = self._settings.quantization if enable_quant and self._settings else "auto"
        metadata = self._loaded()
        with self._errors():
            files = source_files(metadata)
        return Conversion(
            source=str(Path(metadata["path"]).resolve()),
            source_files=files,
            data_type=self._data_type,
            quantization=quantization,
            config_overrides=self._overrides,
            lora=lora is not None,
        )


class ModelScope(HuggingFaceModel):
    """A model as an id on ModelScope, which the package `modelscope` downloads, or as a local path."""

    def _find_model(self) -> str:
        if not Path(self.hf_model_path).exists():
            self.hf_model_path = snapshot_download(self.hf_model_path)
        return self.hf_model_path


def snapshot_download(model_id: str, revision: str | None = None) -> str:
    """The local directory of a model on ModelScope, downloaded by the package `modelscope`.

    Raises `ModelSerializerException` if the package is not installed or the download fails.
    """
    modelscope = _modelscope()
    if modelscope is None:
        message = (
            "downloading from ModelScope requires its package: pip install modelscope; "
            "or pass the path of a directory, or use HuggingFaceModel with an id on the Hugging Face hub"
        )
        raise ModelSerializerException(message, 1, model_id)
    try:
        return str(modelscope.snapshot_download(model_id, revision))
    except Exception as error:
        message = f"download from ModelScope failed: {error}"
        raise ModelSerializerException(message, 1, model_id) from error


def _modelscope() -> Any:
    """The package `modelscope`; `None` if it is not installed."""
    try:
        return importlib.import_module("modelscope")
    except ImportError:
        return None


def _data_type(name: str, value: str | None) -> str:
    if value is None:
        return "auto"
    if value not in DATA_TYPES:
        message = f"{name} is {value!r}; it must be one of {', '.join(DATA_TYPES)}"
        raise ValueError(message)
    return value
