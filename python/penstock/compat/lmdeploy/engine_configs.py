"""`TurbomindEngineConfig`, `PytorchEngineConfig` and the two earlier classes named `EngineConfig`.

docs/lmdeploy.md describes the fields; `engine_options` translates them.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

from penstock.compat.lmdeploy.adapters import adapters_of
from penstock.compat.lmdeploy.checks import check_choice, check_flags, check_integer, check_number, refuse

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = [
    "AnyEngineConfig",
    "EarlyPytorchConfig",
    "EarlyTurbomindConfig",
    "PytorchEngineConfig",
    "QuantPolicy",
    "TurbomindEngineConfig",
]


class QuantPolicy(enum.IntEnum):
    """Type of the KV cache."""

    NONE = 0
    INT4 = 4
    INT8 = 8
    FP8 = 16
    FP8_E5M2 = 17
    TURBO_QUANT = 42


_DTYPES = ("auto", "float16", "bfloat16")
_MIN_KERNEL_BLOCK_SIZE = 16


@dataclasses.dataclass
class TurbomindEngineConfig:
    """The configuration of LMDeploy's TurboMind engine.

    Raises `ArgumentError`, which is an `AssertionError` and a `ValueError`, for a value of the wrong type or
    out of range. Values that Penstock does not support are refused when the pipeline is opened.
    """

    dtype: str = "auto"
    model_format: str | None = None
    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    device_num: int | None = None
    attn_tp_size: int | None = None
    attn_cp_size: int | None = None
    attn_dp_size: int | None = None
    mlp_tp_size: int | None = None
    mlp_dp_size: int | None = None
    outer_dp_size: int | None = None
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    devices: list[int] | None = None
    session_len: int | None = None
    max_batch_size: int | None = None
    cache_max_entry_count: float = 0.8
    cache_chunk_size: int = -1
    cache_block_seq_len: int = 64
    enable_prefix_caching: bool = False
    cache_checkpoint_interval: int = 4096
    cache_prompt: str = "auto"
    cache_prompt_boundary_skip: int = 1
    cache_generation: str = "auto"
    quant_policy: int = 0
    rope_scaling_factor: float = 0.0
    use_logn_attn: bool = False
    download_dir: str | None = None
    revision: str | None = None
    max_prefill_token_num: int = 8192
    num_tokens_per_iter: int = 0
    max_prefill_iters: int = 1
    async_: int = 1
    empty_init: bool = False
    language_model_only: bool = False
    communicator: str = "nccl"
    hf_overrides: Mapping[str, Any] | None = None
    enable_metrics: bool = True

    def __post_init__(self) -> None:
        check_choice(self, "dtype", _DTYPES)
        check_integer(self, "tp", "dp", "cp", "ep", "nnodes", "cache_checkpoint_interval", low=1)
        check_integer(self, "cache_prompt_boundary_skip", "max_prefill_iters", "cache_block_seq_len", low=1)
        check_integer(self, *_PARALLEL_SIZES, low=1, optional=True)
        check_integer(self, "session_len", "max_batch_size", low=1, optional=True)
        check_integer(self, "node_rank", "max_prefill_token_num", "num_tokens_per_iter")
        check_integer(self, "cache_chunk_size", low=-1)
        check_integer(self, "async_", high=1)
        check_number(self, "cache_max_entry_count", low=0, above_low=True)
        check_number(self, "rope_scaling_factor", low=0)
        check_flags(self, "enable_prefix_caching", "use_logn_attn", "empty_init", "language_model_only")
        check_flags(self, "enable_metrics")
        check_choice(self, "cache_prompt", ("all", "auto"))
        check_choice(self, "cache_generation", ("all", "auto", "none"))
        self.quant_policy = _quant_policy(self.quant_policy, without=(QuantPolicy.FP8, QuantPolicy.FP8_E5M2))


@dataclasses.dataclass
class PytorchEngineConfig:
    """The configuration of LMDeploy's PyTorch engine; see `TurbomindEngineConfig`."""

    dtype: str = "auto"
    tp: int = 1
    dp: int = 1
    dp_rank: int = 0
    ep: int = 1
    session_len: int | None = None
    max_batch_size: int | None = None
    attn_tp_size: int | None = None
    mlp_tp_size: int | None = None
    moe_tp_size: int | None = None
    cache_max_entry_count: float = 0.8
    prefill_interval: int = 16
    block_size: int = 64
    kernel_block_size: int = -1
    num_cpu_blocks: int = 0
    num_gpu_blocks: int = 0
    adapters: Mapping[str, str | os.PathLike[str]] | str | os.PathLike[str] | None = None
    max_prefill_token_num: int = 8192
    cudagraph_capture_batch_sizes: list[int] | None = None
    thread_safe: bool = False
    enable_prefix_caching: bool = False
    prefix_cache_state_budget: int = 0
    prefix_cache_decode_state_interval: int = 0
    device_type: str = "cuda"
    eager_mode: bool = False
    custom_module_map: Mapping[str, str] | None = None
    download_dir: str | None = None
    revision: str | None = None
    quant_policy: int = QuantPolicy.NONE
    distributed_executor_backend: str | None = None
    empty_init: bool = False
    enable_microbatch: bool = False
    enable_eplb: bool = False
    enable_mp_engine: bool = False
    mp_engine_backend: str = "mp"
    model_format: str | None = None
    enable_metrics: bool = True
    hf_overrides: Mapping[str, Any] | None = None
    language_model_only: bool = False
    logprobs_mode: str | None = None
    enable_return_routed_experts: bool = False
    enable_transfer_obj_ref: bool = False
    dllm_block_length: int | None = None
    dllm_unmasking_strategy: str = "low_confidence_dynamic"
    dllm_denoising_steps: int | None = None
    dllm_confidence_threshold: float = 0.85
    role: str = "Hybrid"
    migration_backend: str = "DLSlime"

    def __post_init__(self) -> None:
        if self.kernel_block_size == -1:
            self.kernel_block_size = self.block_size
        check_choice(self, "dtype", _DTYPES)
        check_integer(self, "tp", "dp", "ep", "prefill_interval", "block_size", low=1)
        check_integer(self, "attn_tp_size", "mlp_tp_size", "moe_tp_size", low=1, optional=True)
        check_integer(self, "session_len", "max_batch_size", low=1, optional=True)
        check_integer(self, "dllm_block_length", "dllm_denoising_steps", low=1, optional=True)
        check_integer(self, "dp_rank", "num_cpu_blocks", "num_gpu_blocks", "max_prefill_token_num")
        check_integer(self, "prefix_cache_state_budget", "prefix_cache_decode_state_interval")
        check_number(self, "cache_max_entry_count", low=0, high=1, above_low=True)
        if self.cache_max_entry_count == 1:
            refuse("cache_max_entry_count", 1, "a number above 0 and below 1")
        check_number(self, "dllm_confidence_threshold", low=0, high=1)
        check_flags(self, "thread_safe", "enable_prefix_caching", "eager_mode", "empty_init")
        check_flags(self, "enable_microbatch", "enable_eplb", "enable_mp_engine", "enable_metrics")
        check_flags(self, "language_model_only", "enable_return_routed_experts", "enable_transfer_obj_ref")
        adapters_of(self.adapters)
        check_choice(self, "device_type", ("cuda", "cpu", "ascend", "maca", "camb"))
        self.quant_policy = _quant_policy(self.quant_policy)
        size = self.kernel_block_size
        check_integer(self, "kernel_block_size", low=_MIN_KERNEL_BLOCK_SIZE)
        if size & (size - 1):
            refuse("kernel_block_size", size, "a power of two")
        if self.block_size % size:
            refuse("block_size", self.block_size, f"a multiple of kernel_block_size, {size}")
        if self.prefix_cache_decode_state_interval % self.block_size:
            limit = f"a multiple of block_size, {self.block_size}"
            refuse("prefix_cache_decode_state_interval", self.prefix_cache_decode_state_interval, limit)


@dataclasses.dataclass
class EarlyTurbomindConfig:
    """`lmdeploy.turbomind.EngineConfig`, the earlier configuration of the TurboMind engine.

    `quant_policy=4` stores the KV cache with `kv_bits` bits. See `TurbomindEngineConfig`.
    """

    model_name: str | None = None
    model_format: str | None = None
    tp: int = 1
    session_len: int | None = None
    max_batch_size: int = 128
    group_size: int = 128
    kv_bits: int = 8
    max_context_token_num: int = 1
    cache_max_entry_count: float = 0.5
    cache_block_seq_len: int = 128
    cache_chunk_size: int = -1
    num_tokens_per_iter: int = 0
    max_prefill_iters: int = 1
    use_context_fmha: int = 1
    quant_policy: int = 0
    rope_scaling_factor: float = 0.0
    use_dynamic_ntk: bool = False
    use_logn_attn: bool = False

    def __post_init__(self) -> None:
        check_integer(self, "tp", "max_batch_size", "max_context_token_num", "max_prefill_iters", low=1)
        check_integer(self, "cache_block_seq_len", low=1)
        check_integer(self, "session_len", low=1, optional=True)
        check_integer(self, "group_size", "num_tokens_per_iter")
        check_integer(self, "cache_chunk_size", low=-1)
        check_number(self, "cache_max_entry_count", low=0, above_low=True)
        check_number(self, "rope_scaling_factor", low=0)
        check_flags(self, "use_context_fmha", "use_dynamic_ntk", "use_logn_attn")
        check_choice(self, "quant_policy", (0, 4))
        check_choice(self, "kv_bits", (4, 8))


@dataclasses.dataclass
class EarlyPytorchConfig:
    """`lmdeploy.pytorch.EngineConfig`, the earlier configuration of the PyTorch engine.

    See `TurbomindEngineConfig`.
    """

    model_name: str | None = ""
    tp: int = 1
    session_len: int | None = None
    max_batch_size: int = 128
    eviction_type: str = "recompute"
    prefill_interval: int = 16
    block_size: int = 64
    num_cpu_blocks: int = 0
    num_gpu_blocks: int = 0

    def __post_init__(self) -> None:
        check_integer(self, "tp", "max_batch_size", "prefill_interval", "block_size", low=1)
        check_integer(self, "session_len", low=1, optional=True)
        check_integer(self, "num_cpu_blocks", "num_gpu_blocks")
        check_choice(self, "eviction_type", ("recompute", "copy"))


PYTORCH_CONFIGS = (PytorchEngineConfig, EarlyPytorchConfig)
AnyEngineConfig = TurbomindEngineConfig | PytorchEngineConfig | EarlyTurbomindConfig | EarlyPytorchConfig

_PARALLEL_SIZES = (
    "device_num",
    "attn_tp_size",
    "attn_cp_size",
    "attn_dp_size",
    "mlp_tp_size",
    "mlp_dp_size",
    "outer_dp_size",
)

for _kind, _package in ((EarlyTurbomindConfig, "turbomind"), (EarlyPytorchConfig, "pytorch")):
    _kind.__name__ = _kind.__qualname__ = "EngineConfig"
    _kind.__module__ = f"{__package__}.{_package}"


def _quant_policy(value: int, without: tuple[QuantPolicy, ...] = ()) -> QuantPolicy:
    choices = [policy for policy in QuantPolicy if policy not in without]
    if isinstance(value, bool) or value not in choices:
        refuse("quant_policy", value, "0, 4 or 8")
    return QuantPolicy(value)
