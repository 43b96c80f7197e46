"""The environment variables of DashInfer that have an effect; docs/dashinfer.md lists them all.

Penstock's core reads `BFC_MEM_RATIO` and `BFC_LEFTOVER_MB`; DashInfer's default of the former is here.
"""

from __future__ import annotations

import math
import os

from penstock import Host

#: `cpu`: models with a compute unit of CUDA run on the CPU.
DEVICE = "PENSTOCK_DASHINFER_DEVICE"
CPU_CACHE_RATIO = "CPU_CACHE_RATIO"
PROFILE = "AS_PROFILE"
_MEMORY_RATIOS = ("PENSTOCK_MEMORY_RATIO", "BFC_MEM_RATIO")
#: The documented default of `BFC_MEM_RATIO`.
_GPU_MEMORY_RATIO = 0.975


def replaces_cuda() -> bool:
    """Whether `CUDA` stands for the CPU. Raises `ValueError`."""
    value = os.environ.get(DEVICE, "")
    if value.lower() not in ("", "cpu"):
        message = f"{DEVICE} is {value!r}; it must be 'cpu' or unset"
        raise ValueError(message)
    return bool(value)


def is_profiling() -> bool:
    """Whether operations are measured: `AS_PROFILE=ON`."""
    return os.environ.get(PROFILE, "").upper() in ("ON", "1")


def gpu_memory_ratio() -> float | None:
    """The share of a GPU's memory for a model; `None` if the environment has one, which the core reads."""
    return None if any(name in os.environ for name in _MEMORY_RATIOS) else _GPU_MEMORY_RATIO


def host_cache_bytes() -> int:
    """The size of the host tier of the prefix cache: `CPU_CACHE_RATIO` of the available memory.

    Raises `ValueError` for a ratio outside 0 to 1.
    """
    text = os.environ.get(CPU_CACHE_RATIO, "0")
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not 0 <= ratio <= 1:
        message = f"{CPU_CACHE_RATIO} is {text!r}; it must be a number from 0 to 1"
        raise ValueError(message)
    return int(ratio * _available_memory()) if ratio else 0


def _available_memory() -> int:
    """The bytes of memory that this process may still allocate."""
    return Host().available_bytes
