"""Requests that offer an upgrade, in pieces of every size; their bodies are never requests."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio.lowlevel
import pytest
import uvicorn
from uvicorn.server import ServerState

from penstock.server.connection import limited_protocol
from support.server.edge import PARSERS, SETTINGS

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
POST = b"POST /%d?a=b HTTP/1.1\r\nHost: localhost\r\n%s%s\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(HIDDEN)
CHUNKS = b"%x\r\n%s\r\n0\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n" % (len(HIDDEN), HIDDEN)
FIRST = POST % (1, OFFER, LENGTH) + HIDDEN
SECOND = (
    POST % (2, b"Transfer-Encoding: chunked\r\n", b"uPGRADE:\twebsocket\r\nconnection:upgrade\r\n") + CHUNKS
)
THIRD = b"GET /3 HTTP/1.1\r\nHost: localhost\r\n" + OFFER + b"\r\n"
LAST = b"GET /4 HTTP/1.1\r\nHost: localhost\r\n\r\n"
ALL = FIRST + SECOND + THIRD + LAST
RECEIVED = [("/1", HIDDEN), ("/2", HIDDEN), ("/3", b""), ("/4", b"")]


class _Transport(asyncio.Transport):
    """A transport in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def _served(parser: str, pieces: list[bytes]) -> tuple[list[tuple[str, bytes]], _Transport]:
    """The requests that a server receives in these pieces: their paths and bodies."""
    received = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        received.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    protocol_type: Any = limited_protocol(SETTINGS, PARSERS[parser])
    config = uvicorn.Config(application, http=protocol_type, ws="none", lifespan="off", log_config=None)
    protocol = protocol_type(config=config, server_state=ServerState(), app_state={})
    transport = _Transport()
    protocol.connection_made(transport)
    for piece in pieces:
        protocol.data_received(piece)
        for _ in range(20):  # turns of the loop, in which requests are answered
            await anyio.lowlevel.checkpoint()
    protocol.connection_lost(None)
    return received, transport


@pytest.fixture(params=PARSERS)
def parser(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_body_is_no_request_at_any_split(parser: str) -> None:
    async def run() -> None:
        for end in range(len(ALL)):
            received, transport = await _served(parser, [ALL[:end], ALL[end:]])
            assert (end, received) == (end, RECEIVED)
            assert transport.written.count(b"HTTP/1.1 200 OK\r\n") == len(RECEIVED)

    asyncio.run(run())


def test_body_is_no_request_in_single_bytes(parser: str) -> None:
    received, _ = asyncio.run(_served(parser, [ALL[i : i + 1] for i in range(len(ALL))]))
    assert received == RECEIVED


def test_body_is_no_request_in_a_head_of_two_pieces(parser: str) -> None:
    async def run() -> None:
        for size in range((16 << 10) - len(FIRST), 16 << 10):
            filler = b"Host: localhost\r\nA: " + b"a" * size
            received, _ = await _served(parser, [ALL.replace(b"Host: localhost", filler, 1)])
            assert (size, received) == (size, RECEIVED)

    asyncio.run(run())


def test_offer_that_closes_the_connection_has_its_body(parser: str) -> None:
    for line in (b"Connection: close, upgrade\r\nUpgrade: h2c\r\n", b"Connection: upgrade\r\nUpgrade: a\r\n"):
        request = POST % (1, line, LENGTH) + HIDDEN
        for data in (request, request.replace(b"HTTP/1.1", b"HTTP/1.0", 1)):
            received, _ = asyncio.run(_served(parser, [data + LAST]))
            is_kept = b"close" not in line and b"HTTP/1.0" not in data
            assert received == [RECEIVED[0], RECEIVED[-1]][: 1 + is_kept]


def test_body_of_connect_is_no_request(parser: str) -> None:
    data = b"CONNECT /1 HTTP/1.1\r\nHost: localhost\r\n" + LENGTH + b"\r\n" + HIDDEN
    for end in range(len(data)):
        received, _ = asyncio.run(_served(parser, [data[:end], data[end:] + LAST]))
        assert "/hidden" not in dict(received)
