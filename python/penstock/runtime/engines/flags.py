"""Flags that a request may give to an engine: those that change neither files, addresses, code nor memory."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING

from penstock.runtime.errors import not_allowed

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["arguments_of"]

#: Of `penstock serve` and `vllm serve`.
_ALLOWED = frozenset(
    f"--{name}"
    for name in (
        *("block-size", "dtype", "enable-auto-tool-choice", "enable-chunked-prefill", "enable-lora"),
        *(
            "enable-prefix-caching",
            "enable-sleep-mode",
            "enforce-eager",
            "kv-cache-dtype",
            "max-adapter-rank",
        ),
        *(
            "max-adapters",
            "max-logprobs",
            "max-lora-rank",
            "max-loras",
            "max-model-len",
            "max-num-batched-tokens",
        ),
        *("max-num-seqs", "max-waiting", "num-speculative-tokens", "pipeline-parallel-size", "prefix-cache"),
        *("quantization", "reasoning-parser", "revision", "seed", "speculation", "tensor-parallel-size"),
        *("data-parallel-size", "threads", "tool-call-parser", "tool-parser"),
    )
)
_VALUE = re.compile(r"[\w.,:+-]{1,128}", re.ASCII)
_MAX_FLAGS = 64


def arguments_of(args: Mapping[str, str], more: tuple[str, ...] = ()) -> list[str]:
    """The arguments of a command for these flags and values; a flag with an empty value stands alone."""
    field = "engine_config.args"
    if len(args) > _MAX_FLAGS:
        raise not_allowed("ValidationError", field, len(args), f"at most {_MAX_FLAGS} flags")
    allowed = _ALLOWED | {f"--{flag.removeprefix('--')}" for flag in more}
    found: list[str] = []
    for name, value in args.items():
        flag = f"--{name.removeprefix('--')}".replace("_", "-")
        if "gpu-memory-utilization" in flag:
            limit = "given to the engines by the operator: they share the memory"
            raise not_allowed("ValidationError", field, name, limit)
        if flag not in allowed:
            limit = "one of " + ", ".join(sorted(allowed))
            raise not_allowed("ValidationError", field, name, limit)
        if value and not (_VALUE.fullmatch(value) and not value.startswith("-")):
            raise not_allowed("ValidationError", f"{field}.{name}", value, "letters, digits and . , : + - _")
        # One argument, so a value is never read as a flag.
        found.append(f"{flag}={value}" if value else flag)
    _check_devices({flag.partition("=")[0]: flag.partition("=")[2] for flag in found})
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
