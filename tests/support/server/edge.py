"""A server with narrow limits, with each HTTP parser on each event loop, and reading from its connections."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import penstock.server
from penstock.server.connection import limited_protocol
from support.api.engines import make_engine
from support.server.serving import Served, serving

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
SHORT: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 1}
LONG: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 8000, "ignore_eos": True}
PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SETTINGS = penstock.server.ServerSettings(max_header_bytes=32 << 10, max_body_bytes=1 << 20)
PARSERS = {"h11": H11Protocol, "httptools": HttpToolsProtocol}
VARIANTS = ["h11-asyncio", "h11-uvloop", "httptools-asyncio", "httptools-uvloop"]


def long_engine(model: Path) -> penstock.Engine:
    """An engine with room for two requests of 8000 tokens."""
    options = {"config_overrides": {"max_position_embeddings": 8192}, "max_num_batched_tokens": 64}
    return make_engine(model, max_num_seqs=2, **options)


@contextmanager
def limited(engine: penstock.Engine, variant: str) -> Iterator[Served]:
    """A server with the limits of `SETTINGS`, and the parser and event loop of one of `VARIANTS`."""
    parser, loop = variant.split("-")
    application = penstock.server.app({"tiny": engine}, SETTINGS)
    with serving(application, http=limited_protocol(SETTINGS, PARSERS[parser]), loop=loop) as server:
        yield server


def read(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            received += data
    return received


def read_until(connection: socket.socket, end: bytes, count: int = 1) -> bytes:
    """Everything until this has come `count` times."""
    received = b""
    while received.count(end) < count:
        data = connection.recv(1 << 16)
        assert data, received
        received += data
    return received
