"""The environment variables of DashInfer that have an effect; docs/dashinfer.md lists them all.

`BFC_MEM_RATIO` and `BFC_LEFTOVER_MB` are read by Penstock's core.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

#: `cpu` lets models with a compute unit of CUDA run on the CPU.
DEVICE = "PENSTOCK_DASHINFER_DEVICE"
CPU_CACHE_RATIO = "CPU_CACHE_RATIO"
PROFILE = "AS_PROFILE"

_CGROUP = Path("/sys/fs/cgroup")


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
    available = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        available.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii")
        used = (_CGROUP / "memory.current").read_text(encoding="ascii")
        available.append(int(limit) - int(used))
    return max(0, min(available))
