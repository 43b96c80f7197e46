"""vLLM's `engine.arg_utils`: the arguments of an engine, and the options of Penstock's for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import penstock
from penstock.compat.errors import refuse, refuse_all, renamed, unexpected
from penstock.compat.vllm.config import PoolerConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AsyncEngineArgs", "EngineArgs"]

#: Arguments with an effect, and their defaults.
HONOURED: Mapping[str, Any] = {
    "block_size": None,
    "convert": "auto",
    "device_ids": None,
    "dtype": "auto",
    "enable_lora": False,
    "enable_prefix_caching": None,
    "generation_config": "auto",
    "gpu_memory_utilization": 0.92,
    "hf_overrides": None,
    "kv_cache_dtype": "auto",
    "kv_cache_memory_bytes": None,
    "kv_offloading_size": None,
    "load_format": "auto",
    "logprobs_mode": "raw_logprobs",
    "long_prefill_token_threshold": 0,
    "max_logprobs": 20,
    "max_lora_rank": 16,
    "max_loras": 1,
    "max_model_len": None,
    "max_num_batched_tokens": None,
    "max_num_queued_reqs": None,
    "max_num_seqs": None,
    "model": "Qwen/Qwen3-0.6B",
    "num_gpu_blocks_override": None,
    "override_generation_config": None,
    "pooler_config": None,
    "quantization": None,
    "revision": None,
    "scheduling_policy": "fcfs",
    "seed": 0,
    "spec_method": None,
    "spec_model": None,
    "spec_tokens": None,
    "speculative_config": None,
    "structured_outputs_config": None,
    "tokenizer": None,
    "tokenizer_mode": "auto",
}

_DEVICES = "an engine uses one device"

_REFUSED: Mapping[str, Mapping[str, Any]] = {
    _DEVICES: {
        **dict.fromkeys(("data_parallel_external_lb", "data_parallel_hybrid_lb"), False),
        **dict.fromkeys(("data_parallel_address", "data_parallel_rank", "data_parallel_rpc_port"), None),
        **dict.fromkeys(("data_parallel_size_local", "data_parallel_start_rank"), None),
        **dict.fromkeys(("data_parallel_size", "decode_context_parallel_size", "nnodes"), 1),
        **dict.fromkeys(("pipeline_parallel_size", "prefill_context_parallel_size"), 1),
        "data_parallel_multi_port_external_lb": False,
        "node_rank": 0,
        "tensor_parallel_size": 1,
    },
    "images and other media are not supported yet": {
        **dict.fromkeys(("enable_mm_embeds", "enable_prompt_embeds", "mm_encoder_only"), False),
        "mm_processor_kwargs": None,
    },
    "the files are those of the model; penstock.Engine has options for others": {
        **dict.fromkeys(("download_dir", "hf_config_path", "model_loader_extra_config"), None),
        **dict.fromkeys(("quantization_config", "tokenizer_revision"), None),
        "config_format": "auto",
        "model_weights": "",
    },
    "set the variable HF_TOKEN": {"hf_token": None},
    "penstock.Engine(config_overrides=...) changes the model": {"disable_sliding_window": False},
    "an engine has a tokenizer; pass token ids, and detokenize=False": {"skip_tokenizer_init": False},
    "the weights are on the device": {"cpu_offload_gb": 0, "offload_group_size": 0},
    "all layers have the type kv_cache_dtype": {"kv_cache_dtype_skip_layers": None},
    "max_num_queued_reqs is the bound": {"max_num_queued_tokens": None},
    "the engine does not have this output": {
        **dict.fromkeys(("aux_output_config", "diffusion_config", "engram_config"), None),
        **dict.fromkeys(("enable_return_routed_experts", "enable_trace_replay"), False),
        **dict.fromkeys(("return_sampling_mask", "tokens_only"), False),
        "watermark_config": None,
    },
    "penstock.Engine.stats has the metrics, and the server makes traces": {
        **dict.fromkeys(("collect_detailed_traces", "otlp_traces_endpoint"), None),
        "per_request_spec_decode_metrics": "none",
    },
    "text is not parsed; penstock.Engine(reasoning_parser=...) parses it": {
        **dict.fromkeys(("reasoning_config", "reasoning_parser_plugin"), None),
        "reasoning_parser": "",
    },
    "penstock.SamplingParams(logits_processors=...) has those of a request": {"logits_processors": None},
    "there are no plugins, nor other classes of models, schedulers and workers": {
        **dict.fromkeys(("additional_config", "io_processor_plugin", "model_class_overrides"), None),
        "scheduler_cls": None,
        "worker_cls": "auto",
        "worker_extension_cls": "",
    },
    "the KV cache and the weights stay in the engine": dict.fromkeys(
        ("ec_transfer_config", "kv_events_config", "kv_transfer_config", "weight_transfer_config"), None
    ),
    "an adapter has its own modules, and the types of its files": {
        **dict.fromkeys(("default_mm_loras", "lora_target_modules", "max_lora_cls_labels"), None),
        "enable_tower_connector_lora": False,
        "lora_dtype": "auto",
    },
}
#: Arguments with the only value that is accepted, and the reason.
UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    name: (accepted, reason) for reason, fields in _REFUSED.items() for name, accepted in fields.items()
}

#: Arguments without an effect on results: of kernels, processes, logs, media, and models without support.
WITHOUT_EFFECT = {
    *("_api_process_count", "_api_process_rank", "aggregate_engine_logging", "all2all_backend"),
    *("allow_deprecated_quantization", "allowed_local_media_path", "allowed_media_domains"),
    *("async_scheduling", "attention_backend", "attention_config", "code_revision", "compilation_config"),
    *("cp_kv_cache_interleave_size", "cpu_distributed_timeout_seconds", "cpu_offload_params"),
    *("cudagraph_capture_sizes", "cudagraph_metrics", "custom_histogram_buckets", "data_parallel_backend"),
    *("dbo_decode_token_threshold", "dbo_prefill_token_threshold", "dcp_comm_backend"),
    *("dcp_kv_cache_interleave_size", "dcp_q_replicate", "disable_cascade_attn", "disable_chunked_mm_input"),
    *("disable_custom_all_reduce", "disable_hybrid_kv_cache_manager", "disable_log_stats"),
    *("disable_nccl_for_dp_synchronization", "distributed_executor_backend"),
    *("distributed_timeout_seconds", "dp_sync_interval", "ec_manager_config", "elastic_ep_max_dp_size"),
    *("enable_batch_sharded_sampling", "enable_chunked_prefill", "enable_cumem_allocator", "enable_dbo"),
    *("enable_elastic_ep", "enable_ep_weight_filter", "enable_eplb", "enable_expert_parallel"),
    *("enable_fault_tolerance", "enable_flashinfer_autotune", "enable_hc_sp"),
    *("enable_layerwise_nvtx_tracing", "enable_log_requests", "enable_logging_iteration_details"),
    *("enable_mamba_cache_stochastic_rounding", "enable_mamba_shared_prefix_checkpoint"),
    *("enable_mfu_metrics", "enable_mixed_moe_lora_format", "enable_mm_processor_stats"),
    *("enable_moe_shared_loras", "enable_nccl_comm_suspend", "enable_shm_tensor_arena"),
    *("enable_sleep_mode", "enforce_eager", "eplb_config", "expert_placement_strategy"),
    *("fail_on_environ_validation", "fault_tolerance_config", "fully_sharded_loras", "gdn_prefill_backend"),
    *("ignore_patterns", "interleave_mm_strings", "ir_op_priority", "jit_monitor_mode"),
    *("jit_monitor_verbose", "kda_decode_backend", "kda_prefill_backend", "kernel_config"),
    *("kv_cache_metrics", "kv_cache_metrics_sample", "kv_offloading_backend", "kv_sharing_fast_prefill"),
    *("language_model_only", "limit_mm_per_prompt", "linear_backend", "log_config_file", "log_level"),
    *("logging_config", "long_prefill_token_threshold_adaptive"),
    *("mamba_backend", "mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode"),
    *("mamba_cache_philox_rounds", "mamba_config", "mamba_ssm_cache_dtype", "mamba_ssu_algorithm"),
    *("master_addr", "master_port", "max_cpu_loras", "max_cudagraph_capture_size", "max_num_active_seqs"),
    *("max_num_scheduled_tokens", "max_parallel_loading_workers", "media_io_kwargs"),
    *("mm_device_do_normalize", "mm_encoder_attn_backend", "mm_encoder_attn_dtype"),
    *("mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path"),
    *("mm_encoder_tp_mode", "mm_hasher_algorithm", "mm_ipc_gpu_memory_gb", "mm_processor_cache_gb"),
    *("mm_processor_cache_type", "mm_processor_device", "mm_shm_cache_max_object_size_mb"),
    *("mm_tensor_ipc", "model_impl", "moe_backend", "monokernel", "numa_bind", "numa_bind_cpus"),
    *("numa_bind_nodes", "offload_backend", "offload_num_in_group", "offload_params"),
    *("offload_prefetch_step", "optimization_level", "performance_mode", "prefill_schedule_interval"),
    *("prefix_cache_retention_interval", "prefix_caching_hash_algo", "prefix_match_unit"),
    *("profiler_config", "pt_load_map_location", "ray_workers_use_nsight", "renderer_num_workers"),
    *("replayssm_buffer_len", "runner", "safetensors_load_strategy", "safetensors_prefetch_block_size"),
    *("safetensors_prefetch_num_threads", "scheduler_reserve_full_isl", "served_model_name"),
    *("show_hidden_metrics_for_version", "shutdown_timeout", "skip_mm_profiling", "sleep_mode_backend"),
    *("sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names", "sparse_indexer_topk_backend"),
    *("specialize_active_lora", "stream_interval", "swa_bounded_replay", "trust_remote_code"),
    *("ubatch_size", "use_fp64_gumbel", "use_replayssm", "use_tqdm_on_load", "video_pruning_method"),
    *("video_pruning_rate", "watchdog_config", "watermark"),
}

#: Arguments that are options of Penstock's engine with another name, or the same.
_OPTIONS = {
    "block_size": "block_size",
    "enable_prefix_caching": "prefix_cache",
    "gpu_memory_utilization": "memory_ratio",
    "kv_cache_dtype": "kv_cache_dtype",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "long_prefill_token_threshold": "max_prefill_chunk",
    "max_logprobs": "max_logprobs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_queued_reqs": "max_waiting",
    "max_num_seqs": "max_num_seqs",
    "num_gpu_blocks_override": "kv_cache_blocks",
    "tokenizer": "tokenizer",
}
#: The names of arguments in errors, by options.
_NAMES = {option: name for name, option in _OPTIONS.items()} | {
    "config_overrides": "hf_overrides",
    "device": "device_ids",
    "host_cache_bytes": "kv_offloading_size",
    "max_adapter_rank": "max_lora_rank",
    "max_adapters": "max_loras",
    "num_speculative_tokens": "speculative_config",
}
#: Values of arguments that are accepted, with those of Penstock.
_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "convert": dict.fromkeys(("auto", "none", "embed")),
    "dtype": {"auto": None, "half": "float16", "float": "float32"}
    | {name: name for name in ("float16", "bfloat16", "float32")},
    "generation_config": dict.fromkeys(("auto", "vllm")),
    "load_format": dict.fromkeys(("auto", "gguf", "hf", "safetensors")),
    "logprobs_mode": {"raw_logprobs": "raw", "processed_logprobs": "processed"},
    "quantization": dict.fromkeys(
        (None, "auto-round", "awq", "awq_marlin", "compressed-tensors", "gguf", "gptq", "gptq_marlin")
    )
    | {"fp8": "fp8"},
    "scheduling_policy": dict.fromkeys(("fcfs", "priority")),
    "tokenizer_mode": dict.fromkeys(("auto", "hf")),
}
#: Adapters stay in host memory while it has room for them.
_MAX_CPU_ADAPTERS = 65536


class EngineArgs:
    """The arguments of an engine as attributes, with vLLM's names and defaults.

    Raises `UnsupportedError` for a value that is not supported, `TypeError` for an unknown argument.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, model: str = HONOURED["model"], **arguments: Any) -> None:
        accepted = {name: value for name, (value, _) in UNSUPPORTED.items()}
        for name in arguments:
            if name not in HONOURED and name not in accepted and name not in WITHOUT_EFFECT:
                names = [*HONOURED, *accepted, *sorted(WITHOUT_EFFECT)]
                raise unexpected(type(self).__name__, name, names)
        self.__dict__.update({**HONOURED, **accepted, **arguments, "model": model})
        self.engine_config()

    def value(self, name: str) -> Any:
        """Penstock's value for an argument with few accepted ones. Raises `UnsupportedError` for others."""
        given, accepted = getattr(self, name), _VALUES[name]
        if given not in accepted:
            refuse(name, given, f"it must be one of {', '.join(map(repr, accepted))}")
        return accepted[given]

    @property
    def pooler(self) -> PoolerConfig:
        """The pooling of embeddings."""
        given = self.pooler_config
        return given if isinstance(given, PoolerConfig) else PoolerConfig(**given or {})

    @property
    def model_name(self) -> str:
        """The model as `penstock.Engine` takes it."""
        return f"{self.model}@{self.revision}" if self.revision else str(self.model)

    def engine_config(self) -> penstock.EngineConfig:
        """The configuration of Penstock's engine. Raises `penstock.ConfigError` for a value out of range."""
        # `None` stands for the empty value of an argument that is a mapping or an object.
        given = {name: value for name, value in vars(self).items() if value not in ({}, [])}
        refuse_all(given, UNSUPPORTED)
        for name in _VALUES:
            self.value(name)
        try:
            return penstock.EngineConfig(**self._options())
        except penstock.ConfigError as error:
            raise renamed(error, _NAMES) from None

    def _options(self) -> Any:
        given = vars(self)
        options: Any = {
            option: given[name] for name, option in _OPTIONS.items() if given[name] != HONOURED[name]
        }
        if self.tokenizer == self.model:
            options.pop("tokenizer", None)
        options["dtype"] = self.value("dtype")
        options["quantization"] = self.value("quantization")
        if self.max_model_len != -1:
            options["max_model_len"] = self.max_model_len
        if self.kv_offloading_size is not None:
            options["host_cache_bytes"] = int(self.kv_offloading_size * 2**30)
        options |= _device(self.device_ids)
        options |= _overrides(self.hf_overrides)
        options |= _speculation(self)
        _check_structured_outputs(self.structured_outputs_config)
        if self.enable_lora:
            options["max_adapters"] = self.max_loras
            options["max_adapter_rank"] = self.max_lora_rank
            options["max_cpu_adapters"] = _MAX_CPU_ADAPTERS
        return options


class AsyncEngineArgs(EngineArgs):
    """The same, for `AsyncLLM`."""


def _device(device_ids: Any) -> dict[str, Any]:
    if device_ids is None:
        return {}
    if len(device_ids) != 1:
        refuse("device_ids", device_ids, _DEVICES)
    return {"device": f"cuda:{device_ids[0]}"}


def _overrides(overrides: Any) -> dict[str, Any]:
    if callable(overrides):
        refuse("hf_overrides", overrides, "it must be a dict")
    if overrides and {"classifier_from_token", "is_original_qwen3_reranker"} & overrides.keys():
        refuse("hf_overrides", overrides, "penstock.Engine.rerank scores with Qwen3-Reranker")
    return {"config_overrides": overrides} if overrides else {}


def _speculation(args: EngineArgs) -> dict[str, Any]:
    given = {"method": args.spec_method, "model": args.spec_model, "num_speculative_tokens": args.spec_tokens}
    config = {**(args.speculative_config or {}), **{k: v for k, v in given.items() if v is not None}}
    if not config:
        return {}
    if config.get("method") != "ngram":
        refuse("speculative_config", config, 'its method must be "ngram"')
    return {"speculation": "ngram", "num_speculative_tokens": config.get("num_speculative_tokens")}


def _check_structured_outputs(config: Any) -> None:
    """The backend has no effect; the other fields of the configuration are refused."""
    others = {name: value for name, value in (config or {}).items() if name != "backend" and value}
    if others:
        refuse("structured_outputs_config", others, "each request has its own StructuredOutputsParams")
