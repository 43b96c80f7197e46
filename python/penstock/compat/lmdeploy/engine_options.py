"""`resolve`: the options of `penstock.Engine` for the arguments of a pipeline."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import penstock
from penstock._shown import shown
from penstock.compat.lmdeploy.adapters import adapters_of, add_adapters
from penstock.compat.lmdeploy.checks import check_integer, refuse
from penstock.compat.lmdeploy.engine_configs import (
    AnyEngineConfig,
    EarlyPytorchConfig,
    EarlyTurbomindConfig,
    PytorchEngineConfig,
    QuantPolicy,
    TurbomindEngineConfig,
)
from penstock.compat.lmdeploy.errors import ArgumentError, UnsupportedError, message_of
from penstock.compat.lmdeploy.prompts import hint_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock import EngineOptions

__all__ = ["NO_EFFECT", "Resolved", "Settings", "open_engine", "resolve"]

_BACKENDS = ("turbomind", "pytorch")
_DEFAULT_GROUP_SIZE = 128
_DEFAULT_PREFILL_TOKENS = 8192
_DEFAULT_CONTEXT_TOKENS = 1
_MIN_GPU_BLOCKS = 16
#: `max_num_seqs` and `max_num_batched_tokens` of an engine, if they are not set.
_DEFAULT_SEQUENCES, _DEFAULT_TOKENS = 64, 512
#: `max_logprobs` of the engine: the maximum of `GenerationConfig.logprobs`.
_MAX_LOGPROBS = 1024
#: The maximum of `prefix_cache_ttl`: LMDeploy keeps blocks until it needs the memory.
_NO_TTL = 1e9

#: Fields of engine configurations and arguments of a pipeline that change nothing; docs/lmdeploy.md has the
#: reasons.
NO_EFFECT = frozenset(
    {
        "allowed_media_domains",
        "async_",
        "cache_checkpoint_interval",
        "cache_chunk_size",
        "cache_generation",
        "cache_prompt",
        "cache_prompt_boundary_skip",
        "communicator",
        "cudagraph_capture_batch_sizes",
        "dist_init_addr",
        "distributed_executor_backend",
        "dllm_confidence_threshold",
        "dllm_denoising_steps",
        "dllm_unmasking_strategy",
        "eager_mode",
        "empty_init",
        "enable_eplb",
        "enable_metrics",
        "enable_microbatch",
        "enable_mp_engine",
        "enable_transfer_obj_ref",
        "kernel_block_size",
        "language_model_only",
        "max_log_len",
        "max_prefill_iters",
        "migration_backend",
        "mp_engine_backend",
        "prefill_interval",
        "prefix_cache_decode_state_interval",
        "prefix_cache_state_budget",
        "thread_safe",
        "trust_remote_code",
        "use_context_fmha",
    }
)
_PYTORCH_FIELDS = frozenset(field.name for field in dataclasses.fields(PytorchEngineConfig))
_PYTORCH_HINT = "; it is a field of PytorchEngineConfig, which backend_config can be"
_ONE_DEVICE = "Penstock computes a model in one process on one device"
_NO_DIFFUSION = "diffusion models are not supported"
#: Fields and arguments with the values that are supported, and the reason why others are not.
_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(
        (
            "tp",
            "dp",
            "cp",
            "ep",
            "nnodes",
            "device_num",
            "attn_tp_size",
            "attn_cp_size",
            "attn_dp_size",
            "mlp_tp_size",
            "mlp_dp_size",
            "moe_tp_size",
            "outer_dp_size",
        ),
        ((None, 1), _ONE_DEVICE),
    ),
    "node_rank": ((0,), _ONE_DEVICE),
    "dp_rank": ((0,), _ONE_DEVICE),
    "custom_module_map": ((None, {}), "modules are not written in Python"),
    "device_type": (("cuda", "cpu"), "there are no kernels for this device"),
    "logprobs_mode": ((None, "raw_logprobs"), "logprobs are log probabilities; output_logits has logits"),
    "enable_return_routed_experts": ((False,), "experts are not reported"),
    "dllm_block_length": ((None,), _NO_DIFFUSION),
    "role": (("Hybrid",), "prefill and decoding are not separated"),
    "speculative_config": ((None,), "draft models are not supported"),
    "vision_config": ((None,), "images are not supported yet"),
}
_KV_CACHE_DTYPES = {QuantPolicy.INT8: "int8", QuantPolicy.INT4: "uint4"}
#: Beginnings of `penstock.describe(model)["quantization"]` for each `model_format`.
_FORMATS = {
    "hf": "",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "fp8": "FP8",
    "compressed-tensors": "compressed-tensors",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments that concern the pipeline itself, not the engine.

    - `config`: the engine's configuration.
    - `returns_text`: calls return text instead of `Response` objects, as LMDeploy did first.
    - `max_concurrency`: the largest number of requests of one call that run at once; `None` for the
      engine's `max_num_seqs`.
    - `enable_prefix_caching`: requests without a session share cached blocks.
    - `model_name`: the name of a chat template, or `None`.
    - `adapters`: the paths of LoRA adapters by name.
    """

    config: AnyEngineConfig
    returns_text: bool
    max_concurrency: int | None
    enable_prefix_caching: bool
    model_name: str | None
    adapters: dict[str, str]


class Resolved(NamedTuple):
    """The arguments of `penstock.Engine`, and the settings of the pipeline."""

    model: str
    options: EngineOptions
    settings: Settings


def resolve(
    model_path: str | os.PathLike[str],
    backend: str | None = None,
    backend_config: AnyEngineConfig | None = None,
    *,
    model_name: str | None = None,
    instance_num: int | None = None,
    tp: int | None = None,
    **arguments: Any,
) -> Resolved:
    """The options of `penstock.Engine` for the arguments of a pipeline; `None` for one that is not given.

    The class of `backend_config` selects the fields, `backend` only the default. Other arguments can be
    fields of the configuration, as in `session_len=4096`. Raises `UnsupportedError` for a value that is not
    supported, `ArgumentError` for one that is invalid, `TypeError` for an unknown argument.
    """
    if backend is not None and backend not in _BACKENDS:
        refuse("backend", backend, "'turbomind' or 'pytorch'")
    if not isinstance(model_name, str | None):
        refuse("model_name", model_name, "None or a text")
    config = _with_arguments(backend_config, backend, arguments)
    values = {**arguments, **_fields(config)}
    check_integer(SimpleNamespace(instance_num=instance_num), "instance_num", low=1, optional=True)
    for name, value in (*values.items(), ("tp", 1 if tp is None else tp)):
        _check_supported(name, value)
    settings = Settings(
        config=config,
        returns_text=isinstance(config, (EarlyPytorchConfig, EarlyTurbomindConfig))
        or any(argument is not None for argument in (backend, instance_num, tp)),
        max_concurrency=instance_num,
        enable_prefix_caching=bool(values.get("enable_prefix_caching")),
        model_name=model_name or values.get("model_name") or None,
        adapters=adapters_of(values.get("adapters")),
    )
    model = _model(model_path, values)
    options: EngineOptions = {"max_logprobs": _MAX_LOGPROBS, "prefix_cache_ttl": _NO_TTL}
    if values["session_len"] is not None:
        options["max_model_len"] = values["session_len"]
    if values.get("device_type") == "cpu":
        options["device"] = "cpu"
    if values.get("dtype", "auto") != "auto":
        options["dtype"] = values["dtype"]
    _add_cache(options, values, config)
    _add_batch(options, values)
    add_adapters(options, settings.adapters)
    _add_overrides(options, values, model)
    _check_format(options, values, model, config)
    return Resolved(model, options, settings)


def open_engine(model: str, options: EngineOptions, adapters: Mapping[str, str]) -> penstock.Engine:
    """An engine that is open for blocking calls, with these LoRA adapters.

    Raises `ArgumentError` for options that the model does not allow, with LMDeploy's names of the fields.
    """
    try:
        engine = penstock.Engine(model, **options)
        engine.blocking.start()
        try:
            for name, path in adapters.items():
                engine.blocking.load_adapter(name, path)
        except BaseException:
            engine.close()
            raise
    except penstock.ConfigError as error:
        raise ArgumentError(message_of(error)) from error
    except penstock.OutOfMemoryError as error:
        raise penstock.OutOfMemoryError(message_of(error)) from error
    return engine


def _with_arguments(
    config: AnyEngineConfig | None, backend: str | None, arguments: dict[str, Any]
) -> AnyEngineConfig:
    """The configuration, changed by the arguments that are its fields."""
    if config is None:
        config = PytorchEngineConfig() if backend == "pytorch" else TurbomindEngineConfig()
    if not isinstance(config, AnyEngineConfig):
        limit = "a TurbomindEngineConfig, a PytorchEngineConfig or an EngineConfig"
        refuse("backend_config", config, limit)
    changes = {name: arguments.pop(name) for name in _fields(config) if name in arguments}
    if isinstance(config, PytorchEngineConfig):
        changes.setdefault("kernel_block_size", -1)  # the former one was checked with another block size
    for name in arguments:
        if name not in NO_EFFECT and name not in _SUPPORTED:
            hint = _PYTORCH_HINT if name in _PYTORCH_FIELDS else hint_of(name)
            message = f"pipeline() got an unexpected argument {name!r}{hint}"
            raise TypeError(message)
    return dataclasses.replace(config, **changes)


def _fields(config: AnyEngineConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _check_supported(name: str, value: Any) -> None:
    if name == "devices" and value is not None:
        if not isinstance(value, (list, tuple)):
            refuse(name, value, "None or a list")
        if len(value) > 1:
            _unsupported(name, value, _ONE_DEVICE)
    if name in _SUPPORTED:
        supported, reason = _SUPPORTED[name]
        if getattr(value, "name", value) not in supported:  # `role` can be a member of an enumeration
            _unsupported(name, value, reason)


def _unsupported(name: str, value: object, reason: str) -> NoReturn:
    raise UnsupportedError(f"{name} is {shown(value)}; it is not supported: {reason}")


def _model(model_path: str | os.PathLike[str], values: Mapping[str, Any]) -> str:
    """The model, with its revision on the Hugging Face hub."""
    if not isinstance(model_path, (str, os.PathLike)):
        refuse("model_path", model_path, "a directory, a .gguf file, or the id of a model on the hub")
    model = os.fspath(model_path)
    if os.path.exists(model):  # noqa: PTH110
        return model
    if values.get("download_dir") is not None:
        _unsupported("download_dir", values["download_dir"], "set the environment variable HF_HUB_CACHE")
    revision = values.get("revision")
    return model if revision is None else f"{model}@{revision}"


def _add_cache(options: EngineOptions, values: Mapping[str, Any], config: AnyEngineConfig) -> None:
    """Add the size and the type of the KV cache, and preemption."""
    block_size = values.get("cache_block_seq_len", values.get("block_size"))
    if block_size not in (16, 32, 64, 128):
        name = "cache_block_seq_len" if "cache_block_seq_len" in values else "block_size"
        refuse(name, block_size, "16, 32, 64 or 128")
    options["block_size"] = block_size
    ratio = values.get("cache_max_entry_count")
    if blocks := values.get("num_gpu_blocks"):
        if blocks < _MIN_GPU_BLOCKS:
            refuse("num_gpu_blocks", blocks, f"0, or an integer from {_MIN_GPU_BLOCKS}")
        options["kv_cache_blocks"] = blocks
    elif ratio is not None and ratio < 1:
        options["kv_cache_ratio"] = float(ratio)
    elif ratio is not None:
        if ratio != int(ratio):
            refuse("cache_max_entry_count", ratio, "below 1, or an integer number of blocks")
        options["kv_cache_blocks"] = int(ratio)
    policy = values.get("quant_policy", 0)
    if isinstance(config, EarlyTurbomindConfig):
        policy = config.kv_bits if policy else 0
    if policy in _KV_CACHE_DTYPES:
        options["kv_cache_dtype"] = _KV_CACHE_DTYPES[policy]  # type: ignore[typeddict-item]
    elif policy:
        _unsupported("quant_policy", int(policy), "the KV cache has 4 or 8 bits, or the type of the model")
    if values.get("eviction_type") == "copy":
        options["preemption_mode"] = "swap"
    if values.get("num_cpu_blocks"):
        options["host_cache_blocks"] = values["num_cpu_blocks"]


def _add_batch(options: EngineOptions, values: Mapping[str, Any]) -> None:
    """Add the size of a batch and the token budget of a step."""
    sequences = values["max_batch_size"]
    if sequences is not None:
        options["max_num_seqs"] = sequences
    bounds = {
        "max_prefill_token_num": (0, _DEFAULT_PREFILL_TOKENS),
        "num_tokens_per_iter": (0,),
        "max_context_token_num": (_DEFAULT_CONTEXT_TOKENS,),
    }
    tokens = min(
        (values[name] for name, unset in bounds.items() if name in values and values[name] not in unset),
        default=_DEFAULT_TOKENS,
    )
    tokens = max(tokens, sequences or _DEFAULT_SEQUENCES, options["block_size"] or 0)
    if tokens != _DEFAULT_TOKENS:
        options["max_num_batched_tokens"] = tokens


def _add_overrides(options: EngineOptions, values: Mapping[str, Any], model: str) -> None:
    """Add the values that replace those of the model's `config.json`."""
    overrides = values.get("hf_overrides") or {}
    if not isinstance(overrides, Mapping):
        refuse("hf_overrides", overrides, "a mapping")
    overrides = dict(overrides)
    factor = values.get("rope_scaling_factor", 0)
    if 0 < factor < 1:
        refuse("rope_scaling_factor", factor, "0, or a number from 1")
    if factor or values.get("use_dynamic_ntk"):
        name = "rope_scaling_factor" if factor else "use_dynamic_ntk"
        overrides |= _dynamic_scaling(name, values[name], float(factor) or 1.0, overrides, model)
    if values.get("use_logn_attn"):
        overrides["use_logn_attn"] = True
    if overrides:
        options["config_overrides"] = overrides


def _dynamic_scaling(
    name: str, value: object, factor: float, overrides: Mapping[str, Any], model: str
) -> dict[str, Any]:
    """The override for dynamic NTK scaling."""
    config = {**penstock.describe(model)["config"], **overrides}
    # `rope_scaling` replaces `rope_parameters`
    is_new = config.get("rope_parameters") and not config.get("rope_scaling")
    key = "rope_parameters" if is_new else "rope_scaling"
    own = config.get(key) or {}
    kind = own.get("rope_type", own.get("type", "default"))
    if kind not in ("default", "dynamic"):
        reason = f"the model has a {key} of type {kind}; replace it by hf_overrides"
        _unsupported(name, value, reason)
    return {key: {**own, "rope_type": "dynamic", "factor": factor}}


def _check_format(
    options: EngineOptions, values: Mapping[str, Any], model: str, config: AnyEngineConfig
) -> None:
    """Compare `model_format` and `group_size` with the files."""
    name, group_size = values.get("model_format"), values.get("group_size")
    has_group_size = group_size not in (None, 0, _DEFAULT_GROUP_SIZE)
    if name is None and not has_group_size:
        return
    if name is not None and name not in _FORMATS:
        meta = "Meta's files are pickles, which are not read: convert them with transformers"
        reason = meta if name == "llama" else f"use {_names(_FORMATS)}"
        _unsupported("model_format", name, reason)
    if name is not None and model.endswith(".gguf"):
        refuse("model_format", name, "None for a GGUF file, which describes its format")
    found = penstock.describe(model)["quantization"] or ""
    if name == "fp8" and not found and isinstance(config, PytorchEngineConfig):
        options["quantization"] = "fp8"
    elif name is not None and (not found.startswith(_FORMATS[name]) or bool(found) != bool(_FORMATS[name])):
        files = f"quantised: {found}" if found else "not quantised"
        refuse("model_format", name, f"the format of the files, which are {files}")
    groups = re.search(r"groups of (\d+)", found)
    if has_group_size and groups and int(groups[1]) != group_size:
        refuse("group_size", group_size, f"{groups[1]}, that of the files")


def _names(names: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(map(repr, names))
