"""kvcached: elastic KV caches of vLLM and SGLang. Engines on one GPU share its memory, within limits."""

from __future__ import annotations

import os
import re
import shutil
import stat
import struct
from pathlib import Path
from typing import NamedTuple

import anyio

from penstock.runtime.errors import ApiError

__all__ = ["Segment", "ipc_name_of", "read_segment", "set_limit"]

#: The folder of the segments of shared memory.
_FOLDER = Path("/dev/shm")  # noqa: S108 - of shared memory, which kvcached creates
#: The beginning of a segment, in bytes: in total, in use, and allocated in advance.
_SEGMENT = struct.Struct("<3q")
_TIMEOUT = 10.0
_MAX_NAME = 104


class Segment(NamedTuple):
    """The KV cache of an engine."""

    capacity: int
    used: int


def ipc_name_of(name: str) -> str:
    """The name of a segment as kvcached writes it: letters, digits, `_` and `-`."""
    return re.sub("[^A-Za-z0-9_-]", "-", name)[:_MAX_NAME]


def read_segment(name: str) -> Segment | None:
    """The numbers of a segment; nothing without one."""
    try:
        # All users may create files in the folder, also such as block the process that opens or reads them.
        descriptor = os.open(_FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = file.read(_SEGMENT.size)
    if len(content) < _SEGMENT.size:
        return None
    capacity, used, allocated = _SEGMENT.unpack(content)
    return Segment(capacity, used + allocated)


async def set_limit(name: str, limit: int) -> None:
    """Set the limit of a segment in bytes, with the command of kvcached."""
    program = shutil.which("kvctl")
    if program is None or read_segment(name) is None:
        message = f"the engine has a KV cache of fixed size: kvcached has no {name!r}"
        raise ApiError(409, "ConflictError", message, param="limit_bytes")
    try:
        with anyio.fail_after(_TIMEOUT):
            process = await anyio.run_process([program, "limit", name, str(limit)], check=False)
    except TimeoutError:
        message = f"kvctl did not end within {_TIMEOUT:g} seconds"
        raise ApiError(502, "ServerError", message) from None
    if process.returncode:
        text = (process.stderr or process.stdout)[-500:].decode(errors="replace").strip()
        raise ApiError(502, "ServerError", f"kvctl ended with status {process.returncode}: {text}")
