"""The environment variables of DashInfer that have an effect; docs/dashinfer.md lists them all.

`BFC_MEM_RATIO` and `BFC_LEFTOVER_MB` are read by Penstock's core.
"""

from __future__ import annotations

import math
import os

from penstock import Host

#: `cpu`: models with a compute unit of CUDA run on the CPU.
DEVICE = "PENSTOCK_DASHINFER_DEVICE"
CPU_CACHE_RATIO = "CPU_CACHE_RATIO"
PROFILE = "AS_PROFILE"


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
