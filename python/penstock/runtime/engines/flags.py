"""Flags that a request may give to an engine: those that change neither files, addresses, code nor memory."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING

from penstock.runtime.errors import not_allowed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.runtime.engines.commands import Kind

__all__ = ["arguments_of"]

_PENSTOCK_FLAGS = """
    block-size dtype enable-lora kv-cache-dtype max-adapter-rank max-adapters max-lora-rank max-loras
    max-model-len max-num-batched-tokens max-num-seqs max-waiting num-speculative-tokens prefix-cache
    quantization reasoning-parser speculation threads tool-parser
"""
_VLLM_FLAGS = """
    block-size data-parallel-size dtype enable-auto-tool-choice enable-chunked-prefill enable-lora
    enable-prefix-caching enable-sleep-mode enforce-eager kv-cache-dtype max-logprobs max-lora-rank max-loras
    max-model-len max-num-batched-tokens max-num-seqs num-speculative-tokens pipeline-parallel-size
    quantization reasoning-parser revision seed tensor-parallel-size tool-call-parser
"""
_SGLANG_FLAGS = """
    chunked-prefill-size context-length data-parallel-size disable-cuda-graph disable-radix-cache dp-size
    dtype enable-lora enable-metrics kv-cache-dtype max-lora-rank max-loras-per-batch max-prefill-tokens
    max-running-requests page-size pipeline-parallel-size pp-size quantization random-seed reasoning-parser
    revision schedule-conservativeness schedule-policy tensor-parallel-size tool-call-parser tp-size
"""
_ALLOWED = {
    kind: frozenset(f"--{name}" for name in flags.split())
    for kind, flags in (("penstock", _PENSTOCK_FLAGS), ("vllm", _VLLM_FLAGS), ("sglang", _SGLANG_FLAGS))
}
#: Shares of the memory of a GPU, which the engines on it divide.
_MEMORY = ("gpu-memory-utilization", "mem-fraction-static")
#: Short names of SGLang.
_NAMES = {
    f"--{letter}-size": f"--{word}-parallel-size"
    for letter, word in (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline"))
}
_VALUE = re.compile(r"[\w.,:+-]{1,128}", re.ASCII)
_MAX_FLAGS = 64


def arguments_of(kind: Kind, args: Mapping[str, str], more: tuple[str, ...] = ()) -> list[str]:
    """The arguments of a command for these flags and values; a flag with an empty value stands alone."""
    field = "engine_config.args"
    if len(args) > _MAX_FLAGS:
        raise not_allowed("ValidationError", field, len(args), f"at most {_MAX_FLAGS} flags")
    allowed = _ALLOWED[kind] | {f"--{flag.removeprefix('--')}" for flag in more}
    found: list[str] = []
    for name, value in args.items():
        flag = f"--{name.removeprefix('--')}".replace("_", "-")
        if any(name in flag for name in _MEMORY):
            limit = "given to the engines by the operator: they share the memory"
            raise not_allowed("ValidationError", field, name, limit)
        if flag not in allowed:
            limit = "one of " + ", ".join(sorted(allowed))
            raise not_allowed("ValidationError", field, name, limit)
        if value and not (_VALUE.fullmatch(value) and not value.startswith("-")):
            raise not_allowed("ValidationError", f"{field}.{name}", value, "letters, digits and . , : + - _")
        # One argument, so a value is never read as a flag.
        found.append(f"{flag}={value}" if value else flag)
    values = {flag.partition("=")[0]: flag.partition("=")[2] for flag in found}
    _check_devices({_NAMES.get(flag, flag): value for flag, value in values.items()})
    return found


def _check_devices(flags: Mapping[str, str]) -> None:
    """An engine is one process group on all devices of the container."""
    if flags.get("--data-parallel-size", "1") != "1":
        raise not_allowed("ValidationError", "data-parallel-size", flags["--data-parallel-size"], "1")
    names = ("--tensor-parallel-size", "--pipeline-parallel-size")
    sizes = [flags.get(name, "1") for name in names]
    if not all(re.fullmatch("[1-9][0-9]{0,3}", size) for size in sizes):
        raise not_allowed("ValidationError", "tensor-parallel-size", sizes, "1 to 9999")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = math.prod(map(int, sizes))
    if visible and any(name in flags for name in names) and number != len(visible.split(",")):
        limit = f"the number of visible devices, {len(visible.split(','))}, together"
        raise not_allowed("ValidationError", "tensor-parallel-size, pipeline-parallel-size", number, limit)
