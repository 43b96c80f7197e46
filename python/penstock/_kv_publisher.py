"""The publication of KV events on ZMQ sockets, in vLLM's format, by a thread of its own.

A message has three frames: the topic, its number in 8 bytes, and the payload. The first message, and the
first after events were lost, begins with `AllBlocksCleared` and has all blocks in the cache. Messages are
kept for the replay socket; if a reader asks for one that is no longer kept, all blocks are published again.
"""

from __future__ import annotations

import ipaddress
import os
import threading
import time
import warnings
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock._core import Port
from penstock._install import missing_extra
from penstock.errors import ConfigError, EngineStoppedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import zmq

    from penstock import _core

__all__ = ["KvPublisher"]

#: Messages that wait for a slow reader, as in vLLM. A reader that leaves more unread loses them.
_HIGH_WATER_MARK = 100_000
#: The messages that are kept for replays.
_MAX_KEPT = 10_000
_MAX_KEPT_BYTES = 64 << 20
#: Milliseconds for which the last messages are sent after the engine was closed.
_LINGER = 1000
#: The number that ends a replay: -1.
_END = b"\xff" * 8


class KvPublisher:
    """The sockets of an engine, and the thread that publishes, until `stop`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        try:
            import zmq
        except ModuleNotFoundError as error:
            message = missing_extra("kv_events", error.name, "kv-events")
            raise ConfigError(message, "kv_events", options["endpoint"], "used with pyzmq") from error
        self._topic = options["topic"].encode()
        self._process = os.getpid()
        self._zmq = zmq
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._socket = self._open(zmq.PUB, options["endpoint"])
            if options["replay_endpoint"] is not None:
                self._replay = self._open(zmq.ROUTER, options["replay_endpoint"])
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._port = Port()
        self._native: _core.Engine | None = None
        self._events: _core.KvEvents | None = None
        self._is_stopped = False
        self._number = 0
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        #: Whether the first message that is kept has all blocks.
        self._is_complete = True
        #: Readers to which messages are repeated once all blocks have been published again.
        self._waiting: list[tuple[zmq.Socket[bytes], bytes]] = []
        self._thread = threading.Thread(target=self._run, name="penstock-kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, address: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.SNDHWM, _HIGH_WATER_MARK)
        socket.setsockopt(self._zmq.LINGER, _LINGER)
        host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if address.startswith("tcp://") and ":" in host:
            socket.setsockopt(self._zmq.IPV6, 1)
        try:
            if _is_bound(address, host):
                socket.bind(address)
            else:
                socket.connect(address)
        except self._zmq.ZMQError as error:
            limit = "an address that can be used"
            message = f"kv_events: {address} cannot be used: {error}"
            raise ConfigError(message, "kv_events", address, limit) from error
        if address.startswith("tcp://") and not _is_loopback(host):
            message = (
                f"KV events contain the tokens of prompts; all programs that reach {address} can read them"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return socket

    def attach(self, native: _core.Engine) -> None:
        """Publish the events of an engine from now on; the former one has stopped."""
        self._native = native
        self._port.ring()

    def stop(self) -> None:
        """Publish what is left, close the sockets, and end the thread. Never waits."""
        if os.getpid() == self._process:
            self._is_stopped = True
            self._port.ring()

    def join(self) -> None:
        """Wait until the sockets are closed. In the child of a fork, there is nothing to wait for."""
        if os.getpid() == self._process:
            self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        try:
            poller = self._zmq.Poller()
            poller.register(self._port.fileno(), self._zmq.POLLIN)
            if self._replay is not None:
                poller.register(self._replay, self._zmq.POLLIN)
            while not self._is_stopped:
                self._port.drain()
                self._publish()
                ready = dict(poller.poll())
                if self._replay is not None and self._replay in ready:
                    self._take_request(self._replay)
            if self._events is not None:
                self._send(self._events.cleared(time.time()), is_complete=True)
        finally:
            self._context.destroy()

    def _publish(self) -> None:
        """Publish the new events, if there are some."""
        native, self._native = self._native, None
        if native is not None:
            with suppress(EngineStoppedError):
                self._events = native.kv_events(self._port)
        if self._events is None:
            return
        new = self._events.payload(time.time())
        if new is not None and new[0]:
            self._send(*new)
        elif new is None:
            self._send(self._events.cleared(time.time()), is_complete=True)
            self._events = None

    def _send(self, payload: bytes, is_complete: bool) -> None:  # noqa: FBT001 - see `_core.KvEvents.payload`
        """Publish a message. A complete one makes all before it needless."""
        self._socket.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
        self._number += 1
        if is_complete:
            self._kept.clear()
            self._kept_bytes, self._is_complete = 0, True
        self._kept.append(payload)
        self._kept_bytes += len(payload)
        while len(self._kept) > _MAX_KEPT or (self._kept_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft())
            self._is_complete = False
        if is_complete:
            waiting, self._waiting = self._waiting, []
            for socket, reader in waiting:
                self._repeat(socket, reader, 0)

    def _take_request(self, socket: zmq.Socket[bytes]) -> None:
        """Answer a reader that asks for the messages from a number on: an empty frame and the number."""
        match socket.recv_multipart():
            case [reader, b"", frame] if len(frame) == len(_END):
                start = int.from_bytes(frame, "big")
            case _:
                return
        if start >= self._first_kept or self._is_complete or self._events is None:
            self._repeat(socket, reader, start)
        else:
            if not self._waiting:
                self._events.restart()
            self._waiting.append((socket, reader))

    @property
    def _first_kept(self) -> int:
        return self._number - len(self._kept)

    def _repeat(self, socket: zmq.Socket[bytes], reader: bytes, start: int) -> None:
        for number, payload in enumerate(self._kept, self._first_kept):
            if number >= start:
                socket.send_multipart((reader, b"", number.to_bytes(8, "big"), payload))
        socket.send_multipart((reader, b"", _END, b""))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_bound(address: str, host: str) -> bool:
    """Whether the socket is bound: to all interfaces, the loopback interface, or a file. Else it connects."""
    return not address.startswith("tcp://") or host in ("*", "::", "0.0.0.0") or _is_loopback(host)  # noqa: S104
