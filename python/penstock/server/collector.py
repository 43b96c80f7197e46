"""The HTTP session of the exporter of traces. It bounds what the SDK reads of a collector's response."""

from __future__ import annotations

import io
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bounded_session"]

#: A longer body is not read to its end, and its connection is closed.
_MAX_BODY = 64 << 10


def bounded_session() -> requests.Session:
    """A session for the exporter; its timeout is that of a whole response, not of each read."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, _Adapter(pool_connections=1, pool_maxsize=1))
    return session


class _Adapter(HTTPAdapter):
    """Sends one request at a time, over a connection that it can end from another thread."""

    _connection: Any = None

    def get_connection_with_tls_context(self, *arguments: Any, **options: Any) -> Any:
        """Called by the base class. The pool makes connections that this adapter knows."""
        pool: Any = super().get_connection_with_tls_context(*arguments, **options)
        make = type(pool).ConnectionCls

        def connection(*arguments: Any, **options: Any) -> Any:
            self._connection = make(*arguments, **options)
            return self._connection

        pool.ConnectionCls = connection
        return pool

    def send(self, *arguments: Any, **options: Any) -> requests.Response:
        """Called by the session. The exporter needs the status alone."""
        with self._ending_after(options["timeout"]):
            response = super().send(*arguments, **{**options, "stream": True})
            raw: Any = response.raw
            with suppress(HTTPError, OSError):
                raw.read(_MAX_BODY, decode_content=False)  # to its end, the connection can be used again
            raw.close()
        response.raw = io.BytesIO()
        return response

    @contextmanager
    def _ending_after(self, seconds: float) -> Iterator[None]:
        """End the connections of a block that takes longer."""
        is_done = threading.Event()

        def watch() -> None:
            while not is_done.wait(seconds):
                with suppress(AttributeError, OSError):  # it is not connected yet, or not any more
                    self._connection.sock.shutdown(socket.SHUT_RDWR)

        with suppress(RuntimeError):  # while the interpreter ends, no thread begins
            threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            is_done.set()
