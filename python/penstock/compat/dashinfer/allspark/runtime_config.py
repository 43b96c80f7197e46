"""The configuration of an installed model: `AsModelConfig` and its builder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from penstock._shown import shown
from penstock.compat.dashinfer.allspark import environment
from penstock.compat.dashinfer.allspark.enums import (
    AsCacheMode,
    AsEvictionStrategy,
    AsMHAPrefill,
    AsSchedulingStrategy,
    AsStatus,
    TargetDevice,
)
from penstock.compat.dashinfer.allspark.errors import AsError
from penstock.compat.dashinfer.allspark.model_files import ModelFiles
from penstock.compat.dashinfer.allspark.values import (
    parse_compute_unit,
    read_mapping,
    to_enum,
    to_integer,
    to_path,
)

if TYPE_CHECKING:
    from enum import Enum

    from penstock import EngineOptions

__all__ = ["AsModelConfig", "AsModelRuntimeConfigBuilder", "RuntimeConfig", "engine_options"]


@dataclass
class AsModelConfig:
    """The configuration of a model for `Engine.install_model`, which checks it.

    `AsModelRuntimeConfigBuilder` has a setter for most fields; docs/dashinfer.md lists the effect of each.
    """

    model_name: str = ""
    """Name of the model in the engine."""
    model_path: str = ""
    """The `.asgraph` file."""
    weights_path: str = ""
    """The `.asparam` file."""
    compute_unit: str = "CUDA:0"
    """Device and ids: `CUDA:0,1`, `CPU:0`, or `CPU_NUMA:0,1` with NUMA nodes."""
    engine_max_length: int = 2048
    """Maximum number of tokens of a request, prompt and output together; above 2."""
    engine_max_batch: int = 32
    """Maximum number of requests that are computed together; above 0."""
    engine_max_prefill_length: int = 0
    """Maximum number of prompt tokens that are computed in a step; 0 is the engine's default."""
    swap_threshold: int = -1
    text_graph: bool = False
    num_threads: int = 0
    """Compute threads, on `CPU_NUMA` for each node; 0 is the engine's default."""
    matmul_precision: str = "highest"
    lora_names: list[str] = field(default_factory=list)
    """LoRA adapters that are loaded with the model; see `Engine.load_lora`."""
    cache_span_size: int = 128
    """Tokens of a block of the KV cache: 16, 32, 64, 128, or 0 for the engine's default."""
    cache_span_num_init: int = 0
    cache_span_num_grow: int = 0
    enable_prefix_cache: bool = True
    prefix_cache_ttl: int = 300
    """Time for which unused blocks of the prefix cache are kept, in seconds."""
    prefill_mode: AsMHAPrefill = AsMHAPrefill.AsPrefillDefault
    cache_mode: AsCacheMode = AsCacheMode.AsCacheDefault
    """Data type of the KV cache."""
    eviction_strategy: AsEvictionStrategy = AsEvictionStrategy.MaxLength
    """Choice of the request that is interrupted when the KV cache is full."""
    scheduling_strategy: AsSchedulingStrategy = AsSchedulingStrategy.ContextPriority
    enable_sparsity_matmul: bool = False
    lora_max_rank: int = 64
    """Maximum rank of a LoRA adapter."""
    lora_max_num: int = 5
    """Maximum number of loaded LoRA adapters."""


RuntimeConfig = AsModelConfig

#: Keys of `update_from_dict` that differ from the name of the field.
_KEYS = {
    "kv_cache_mode": "cache_mode",
    "kv_cache_span_size": "cache_span_size",
    "compute_thread_in_device": "num_threads",
}
_ENUMS: dict[str, type[Enum]] = {
    "cache_mode": AsCacheMode,
    "eviction_strategy": AsEvictionStrategy,
    "prefill_mode": AsMHAPrefill,
    "scheduling_strategy": AsSchedulingStrategy,
}
_FIELDS = {item.name: item.default for item in dataclasses.fields(AsModelConfig)}
_REQUIRED = ("model_name", "compute_unit", "engine_max_length", "engine_max_batch")


class AsModelRuntimeConfigBuilder:
    """Builds an `AsModelConfig`.

    Setters return the builder, so that calls can be chained:

        builder = AsModelRuntimeConfigBuilder().model_name("m").model_dir("model_output", "m")
        config = builder.compute_unit(TargetDevice.CPU).max_length(2048).max_batch(8).build()

    A value of the wrong type raises `ValueError`; `Engine.install_model` checks ranges.
    """

    def __init__(self) -> None:
        self._config = AsModelConfig()

    def model_name(self, model_name: str) -> Self:
        """Set the name of the model in the engine."""
        return self._set("model_name", model_name)

    def model_dir(self, model_dir: str | os.PathLike[str], file_name_prefix: str) -> Self:
        """Set the files of a serialised model: `<prefix>.asgraph` and `<prefix>.asparam` in `model_dir`."""
        directory, prefix = to_path("model_dir", model_dir), to_path("file_name_prefix", file_name_prefix)
        path = os.path.join(directory, prefix)  # noqa: PTH118 - the parts are kept
        return self.model_file_path(f"{path}.asgraph", f"{path}.asparam")

    def model_file_path(
        self, model_file_name: str | os.PathLike[str], weight_file_path: str | os.PathLike[str]
    ) -> Self:
        """Set the two files of a serialised model; prefer `model_dir`."""
        self._set("model_path", to_path("model_file_name", model_file_name))
        return self._set("weights_path", to_path("weight_file_path", weight_file_path))

    def compute_unit(
        self,
        target_device: TargetDevice | str,
        device_id_array: Sequence[int] | None = None,
        compute_thread_in_device: int = 0,
    ) -> Self:
        """Set the device.

        `device_id_array` has the GPUs of `CUDA` or the NUMA nodes of `CPU_NUMA`, by default 0; `CPU` ignores
        it. `compute_thread_in_device` is the number of threads, for `CPU_NUMA` of each node; 0 chooses.
        """
        device = to_enum("target_device", TargetDevice, target_device)
        given = [0] if device_id_array is None or device is TargetDevice.CPU else device_id_array
        ids = list(given) if isinstance(given, Iterable) else []
        if not ids or any(type(item) is not int or item < 0 for item in ids):
            message = f"device_id_array is {shown(given)}; it must be a list of numbers from 0"
            raise ValueError(message)
        self._set("compute_unit", f"{device.name}:{','.join(map(str, ids))}")
        return self._set("num_threads", compute_thread_in_device)

    def set_compute_unit_from_str(self, compute_unit: str) -> Self:
        """Set the device by its text, such as `CUDA:0,1`."""
        return self._set("compute_unit", compute_unit)

    def max_length(self, length: int | str) -> Self:
        """Set the maximum number of tokens of a request, prompt and output together."""
        return self._set("engine_max_length", length)

    def max_batch(self, batch: int | str) -> Self:
        """Set the maximum number of requests that are computed together."""
        return self._set("engine_max_batch", batch)

    def max_prefill_length(self, length: int | str) -> Self:
        """Set the maximum number of prompt tokens that are computed in a step; 0 is the engine's default.

        The tokens of longer prompts are computed in several steps, with the same result.
        """
        return self._set("engine_max_prefill_length", length)

    def prefill_cache(self, enable: bool = True) -> Self:
        """Enable or disable the prefix cache."""
        return self._set("enable_prefix_cache", enable)

    def prefix_cache_ttl(self, ttl: int | str = 300) -> Self:
        """Set the time for which unused blocks of the prefix cache are kept, in seconds."""
        return self._set("prefix_cache_ttl", ttl)

    def kv_cache_mode(self, cache_mode: AsCacheMode | str) -> Self:
        """Set the data type of the KV cache."""
        return self._set("cache_mode", cache_mode)

    def kv_cache_span_size(self, span_size: int | str) -> Self:
        """Set the number of tokens of a KV cache block: 16, 32, 64, 128, or 0 for the engine's default."""
        return self._set("cache_span_size", span_size)

    def set_span_init_size(self, size: int | str) -> Self:
        """Has no effect: the memory of the KV cache is allocated when the model is installed."""
        return self._set("cache_span_num_init", size)

    def eviction_strategy(self, strategy: AsEvictionStrategy | str) -> Self:
        """Set the choice of the request that is interrupted when the KV cache is full."""
        return self._set("eviction_strategy", strategy)

    def scheduling_strategy(self, strategy: AsSchedulingStrategy | str) -> Self:
        """Has no effect: a step computes the tokens of prompts and of outputs together."""
        return self._set("scheduling_strategy", strategy)

    def enable_sparsity_matmul(self, enable: bool = False) -> Self:
        """`True` is refused by `Engine.install_model`: 2:4 sparse weights are not supported."""
        return self._set("enable_sparsity_matmul", enable)

    def lora_max_rank(self, rank: int | str) -> Self:
        """Set the maximum rank of a LoRA adapter, by default 64."""
        return self._set("lora_max_rank", rank)

    def lora_max_num(self, number: int | str) -> Self:
        """Set the maximum number of loaded LoRA adapters, by default 5; 0 disables adapters."""
        return self._set("lora_max_num", number)

    def from_dict(self, rfield: Mapping[str, Any]) -> Self:
        """Set the fields of a runtime configuration as a mapping.

        `model_name`, `compute_unit` (a mapping with `device_type`, `device_ids` and
        `compute_thread_in_device`), `engine_max_length` and `engine_max_batch` are required; a missing one
        raises `KeyError`. The others are those of `update_from_dict`.
        """
        _require_mapping(rfield)
        missing = [key for key in _REQUIRED if key not in rfield]
        if missing:
            message = f"the runtime configuration has no {', '.join(missing)}"
            raise KeyError(message)
        return self.update_from_dict(rfield)

    def update_from_dict(self, rfield: Mapping[str, Any]) -> Self:
        """Set the given fields: those of `AsModelConfig`, `kv_cache_mode` and `kv_cache_span_size`.

        Enumerations may be given by name. An unknown key raises `ValueError`, and nothing is changed.
        """
        _require_mapping(rfield)
        unknown = [key for key in rfield if _KEYS.get(key, key) not in _FIELDS]
        if unknown:
            keys, names = ", ".join(map(shown, unknown)), ", ".join(sorted([*_FIELDS, *_KEYS]))
            message = f"unknown keys in the runtime configuration: {keys}; the keys are {names}"
            raise ValueError(message)
        previous, self._config = self._config, dataclasses.replace(self._config)
        try:
            for key, value in rfield.items():
                if key == "compute_unit" and isinstance(value, Mapping):
                    self.compute_unit(
                        value["device_type"],
                        value.get("device_ids"),
                        to_integer("compute_thread_in_device", value.get("compute_thread_in_device", 0)),
                    )
                else:
                    self._set(_KEYS.get(key, key), value)
        except BaseException:
            self._config = previous
            raise
        return self

    def from_file(self, path: str | os.PathLike[str]) -> Self:
        """Set the fields of a JSON or YAML file, which `from_dict` describes.

        The fields are the file's content, or its section `runtime_config`. A name that ends with `.yaml` or
        `.yml` is YAML, which requires `pip install 'penstock-llm[dashinfer]'`.
        """
        content = read_mapping(Path(path))
        section = content.get("runtime_config", content)
        if not isinstance(section, Mapping):
            message = f"{os.fspath(path)}: runtime_config must be a mapping"
            raise ValueError(message)
        return self.from_dict(section)

    @staticmethod
    def parse_device_type(device_str: str) -> tuple[TargetDevice, list[int]]:
        """The device and ids of a text such as `CUDA:0,1`. Raises `ValueError`."""
        return parse_compute_unit(device_str)

    def build(self) -> AsModelConfig:
        """The configuration. The builder keeps its values."""
        return dataclasses.replace(self._config, lora_names=list(self._config.lora_names))

    def _set(self, name: str, value: object) -> Self:
        setattr(self._config, name, _converted(name, value))
        return self


def _require_mapping(rfield: object) -> None:
    if not isinstance(rfield, Mapping):
        message = f"the runtime configuration is {shown(rfield)}; it must be a mapping"
        raise ValueError(message)


def _converted(name: str, value: object) -> object:
    """`value` in the type of the field `name`. Raises `ValueError`."""
    default = _FIELDS[name]
    if name in _ENUMS:
        return to_enum(name, _ENUMS[name], value)
    if isinstance(default, bool):
        if not isinstance(value, int) or value not in (0, 1):
            message = f"{name} is {shown(value)}; it must be True or False"
            raise ValueError(message)
        return bool(value)
    if isinstance(default, int):
        return to_integer(name, value)
    if name == "lora_names":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            message = f"{name} is {shown(value)}; it must be a list of names"
            raise ValueError(message)
        return list(value)
    if not isinstance(value, str):
        message = f"{name} is {shown(value)}; it must be text"
        raise ValueError(message)
    return value


#: `kv_cache_dtype` for the cache modes.
_KV_CACHE_DTYPES: dict[AsCacheMode, Literal["auto", "int8", "uint4"]] = {
    AsCacheMode.AsCacheDefault: "auto",
    AsCacheMode.AsCacheQuantI8: "int8",
    AsCacheMode.AsCacheQuantU4: "uint4",
}
BLOCK_SIZES = (16, 32, 64, 128)
DEFAULT_BLOCK_SIZE = 16
#: Tokens of a step if there is no `engine_max_prefill_length`.
DEFAULT_STEP_TOKENS = 512
#: The least and the greatest value of integer fields.
_RANGES = {
    "engine_max_length": (3, 2**31 - 1),
    "engine_max_batch": (1, 65536),
    "engine_max_prefill_length": (0, 1048576),
    "num_threads": (0, 1024),
    "prefix_cache_ttl": (1, 1000000000),
    "cache_span_num_init": (0, 2**31 - 1),
    "cache_span_num_grow": (0, 2**31 - 1),
    "lora_max_rank": (1, 1024),
    "lora_max_num": (0, 1024),
}
_PRECISIONS = ("highest", "high", "medium", "medium_bf16", "medium_fp16")


def engine_options(config: AsModelConfig) -> tuple[Path, EngineOptions]:
    """The model and the options of `penstock.Engine` for a configuration.

    Raises `AsError`: `ALLSPARK_PARAM_ERROR` for an invalid field and for what is not supported,
    `ALLSPARK_IO_ERROR` for missing and invalid files.
    """
    try:
        values: dict[str, Any] = {name: _converted(name, getattr(config, name)) for name in _FIELDS}
        config = AsModelConfig(**values)
        device, ids = parse_compute_unit(config.compute_unit)
        host_cache_bytes = environment.host_cache_bytes()
        is_cuda = device is TargetDevice.CUDA and not environment.replaces_cuda()
    except ValueError as error:
        raise _param_error(str(error)) from error
    _check(config)
    if is_cuda and len(ids) > 1:
        raise _param_error(f"compute_unit is {config.compute_unit!r}; a model runs on one GPU")
    files = ModelFiles(Path(config.model_path), Path(config.weights_path))
    graph = files.read()
    block_size = config.cache_span_size or DEFAULT_BLOCK_SIZE
    budget = config.engine_max_prefill_length or DEFAULT_STEP_TOKENS
    options: EngineOptions = {
        "device": f"cuda:{ids[0]}" if is_cuda else "cpu",
        "max_model_len": config.engine_max_length,
        "max_num_seqs": config.engine_max_batch,
        "max_num_batched_tokens": max(budget, config.engine_max_batch, block_size),
        "block_size": cast("Any", block_size),  # checked
        "kv_cache_dtype": _KV_CACHE_DTYPES[config.cache_mode],
        "prefix_cache": config.enable_prefix_cache,
        "preemption_mode": "interrupt",
        "preemption_victim": "longest",
    }
    if is_cuda:
        options["memory_ratio"] = environment.gpu_memory_ratio()
    if config.enable_prefix_cache:
        options["prefix_cache_ttl"] = config.prefix_cache_ttl
    if host_cache_bytes:
        options["host_cache_bytes"] = host_cache_bytes
    if graph.conversion.lora and config.lora_max_num:
        options |= {"max_adapters": config.lora_max_num, "max_adapter_rank": config.lora_max_rank}
    if graph.conversion.config_overrides:
        options["config_overrides"] = graph.conversion.config_overrides
    # `CPU:0` is also the text of DashInfer for any CPU.
    is_numa = device is TargetDevice.CPU_NUMA or (device is TargetDevice.CPU and ids != [0])
    if is_numa:
        options["numa_nodes"] = ids
    if config.num_threads:
        options["threads"] = config.num_threads * (len(ids) if is_numa else 1)
    return files.weights, options


def _check(config: AsModelConfig) -> None:
    """Raise `AsError` for a value that is out of range or not supported."""
    for name in ("model_name", "model_path", "weights_path"):
        if not getattr(config, name):
            raise _param_error(f"{name} is empty; it must be set")
    for name, (least, most) in _RANGES.items():
        value = getattr(config, name)
        if not least <= value <= most:
            raise _param_error(f"{name} is {shown(value)}; it must be from {least} to {most}")
    if config.cache_span_size not in (0, *BLOCK_SIZES):
        size = shown(config.cache_span_size)
        raise _param_error(f"cache_span_size is {size}; it must be 0, 16, 32, 64 or 128")
    if config.matmul_precision not in _PRECISIONS:
        raise _param_error(
            f"matmul_precision is {config.matmul_precision!r}; it must be one of {', '.join(_PRECISIONS)}"
        )
    if config.enable_sparsity_matmul:
        raise _param_error("enable_sparsity_matmul is True; 2:4 sparse weights are not supported")
    if config.text_graph:
        raise _param_error("text_graph is True; the model has no graph that could be written as text")


def _param_error(reason: str) -> AsError:
    return AsError(AsStatus.ALLSPARK_PARAM_ERROR, reason)
