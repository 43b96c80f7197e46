"""The GPUs of this machine and the memory of processes on them, if `nvidia-ml-py` is installed."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Accelerator", "observed"]

logger = logging.getLogger("penstock.runtime")

#: The library has one state for the process.
_lock = threading.Lock()


class Accelerator(NamedTuple):
    """A GPU. Sizes are in bytes; `used` has those of its processes."""

    id: str
    total: int
    free: int
    used: dict[int, int]

    def used_by(self, pid: int) -> int:
        """The memory of a process and of its descendants."""
        return sum(self.used.get(found, 0) for found in _tree(pid))


def observed() -> list[Accelerator]:
    """The GPUs; none without the library or a driver. This blocks for some milliseconds."""
    try:
        import pynvml
    except ImportError:
        return []
    with _lock:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.debug("no GPU is visible: %s", error)
            return []
        found = []
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                try:
                    found.append(_accelerator(pynvml, index))
                except pynvml.NVMLError as error:  # one without these numbers does not hide the others
                    logger.debug("GPU %d cannot be read: %s", index, error)
        except pynvml.NVMLError as error:
            logger.debug("the GPUs cannot be counted: %s", error)
        finally:
            pynvml.nvmlShutdown()
        return found


def _accelerator(pynvml: Any, index: int) -> Accelerator:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    used: Counter[int] = Counter()
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        used[process.pid] += process.usedGpuMemory or 0  # None in some containers
    return Accelerator(pynvml.nvmlDeviceGetUUID(handle), int(memory.total), int(memory.free), dict(used))


def _tree(pid: int) -> set[int]:
    """A process and its descendants."""
    found, waiting = {pid}, [pid]
    while waiting:
        parent = waiting.pop()
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()
        except OSError:  # it has ended
            continue
        waiting += {int(child) for child in children} - found
        found.update(waiting)
    return found
