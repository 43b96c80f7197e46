"""The parts of the operating system that differ between Linux, macOS and Windows."""

from __future__ import annotations

import os
import select
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: The flag of `os.open` to read and write bytes as they are; only Windows has it.
O_BINARY: int = getattr(os, "O_BINARY", 0)
#: The family of Unix sockets; `None` where Python has none.
AF_UNIX: int | None = getattr(socket, "AF_UNIX", None)

#: Descriptors where the hard limit is infinity, which macOS refuses as a soft limit: its `OPEN_MAX`.
_OPEN_MAX = 10_240
#: Options of TCP that are like `TCP_USER_TIMEOUT` of Linux, in seconds: `TCP_RXT_CONNDROPTIME` of macOS and
#: `TCP_MAXRT` of Windows.
_SEND_TIMEOUTS = {"darwin": 0x80, "win32": 5}
#: The most sockets for `select` of Windows.
_SELECT_SIZE = 500
#: The byte of a file that is locked on Windows, where locked bytes cannot be read.
_LOCKED_BYTE = 1 << 62


def after_fork_in_child(function: Callable[[], object]) -> None:
    """Call a function in the child of each fork. Windows has no forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as the system lets this process have. Windows has no such limit."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    for limit in (hard, max(soft, _OPEN_MAX)):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def set_send_timeout(connection: socket.socket, seconds: float) -> None:
    """Let the system end a connection if its peer acknowledges nothing for this time."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    elif sys.platform in _SEND_TIMEOUTS:
        option = _SEND_TIMEOUTS[sys.platform]
        connection.setsockopt(socket.IPPROTO_TCP, option, max(round(seconds), 1))


def readable(descriptors: Iterable[int]) -> set[int]:
    """Those sockets of these descriptors that have bytes to read, an end or an error."""
    if hasattr(select, "poll"):
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll(0)}
    rest, found = list(descriptors), set[int]()
    while rest:
        found.update(select.select(rest[:_SELECT_SIZE], [], [], 0)[0])
        del rest[:_SELECT_SIZE]
    return found


def lock_file(descriptor: int, *, wait: bool = False) -> None:
    """Lock a file until it is closed. Without `wait`, raises `OSError` if another process has locked it."""
    if sys.platform == "win32":
        import msvcrt

        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
