"""Connections of the server: pipelining and disconnects in every phase, with each parser and event loop."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import penstock.server
from penstock.server.connection import limited_protocol
from support.api.engines import make_engine, resident_bytes, resources, wait_until
from support.marks import rare_except
from support.server.edge import (
    CHUNKED,
    HEAD,
    LONG,
    PATH,
    PING,
    SETTINGS,
    SHORT,
    VARIANTS,
    limited,
    long_engine,
    read,
    read_until,
)
from support.server.serving import Served, at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with long_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module", params=VARIANTS)
def server(engine: penstock.Engine, request: pytest.FixtureRequest) -> Iterator[Served]:
    with limited(engine, request.param) as server:
        yield server


# ---- pipelining


def test_pipelined_requests_are_answered_in_order(server: Served) -> None:
    version = PING.replace(b"ping", b"version")
    with server.send(post(PATH, SHORT) + PING + post(PATH, SHORT) + version + PING) as connection:
        received = read_until(connection, b'{"status":"ok"}', 2)
    parts = [b'"text_completion"', b'{"status":"ok"}', b'"text_completion"', b'{"version":']
    places = [received.index(parts[0])]
    for part in parts[1:]:
        places.append(received.index(part, places[-1] + 1))
    assert places == sorted(places)
    assert received.count(b"HTTP/1.1 200 OK") == 5


def test_pipelined_body_in_pieces_is_read(server: Served) -> None:
    second = post(PATH, {"prompt": [3] * 5000, "max_tokens": 1})
    with server.send(post(PATH, SHORT) + second[:100]) as connection:
        read_until(connection, b'"usage"')
        connection.sendall(second[100:9000])
        connection.sendall(second[9000:])
        read_until(connection, b'"prompt_tokens":5000')


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "ahead", [b"GET /ping HT", PING, PING * 10, b"x" * 30_000], ids=["part", "one", "ten", "garbage"]
)
def test_bytes_ahead_do_not_hide_a_disconnect(
    server: Served, engine: penstock.Engine, ahead: bytes, *, is_streamed: bool
) -> None:
    before = engine.stats().generation_tokens
    with server.send(post(PATH, {**LONG, "stream": is_streamed})) as connection:
        wait_until(lambda: engine.stats().generation_tokens > before)
        connection.sendall(ahead)
    wait_until(lambda: server.application.state.calls.num_active == 0 and at_rest(engine))
    assert engine.stats().generation_tokens - before < 8000


def test_too_many_bytes_ahead_end_the_connection(server: Served, engine: penstock.Engine) -> None:
    before = engine.stats().generation_tokens
    with server.send(post(PATH, LONG)) as connection, suppress(ConnectionError):
        wait_until(lambda: engine.stats().generation_tokens > before)
        for _ in range(1000):
            connection.sendall(PING * 100)
        pytest.fail("3 MB were accepted")
    wait_until(lambda: server.application.state.calls.num_active == 0 and at_rest(engine))
    assert engine.stats().generation_tokens - before < 8000


def test_too_many_pipelined_requests_end_the_connection(tiny_model: Path) -> None:
    application = penstock.server.app(make_engine(tiny_model), SETTINGS)
    with serving(application, http=limited_protocol(SETTINGS, HttpToolsProtocol)) as server:
        with server.send(PING * 400) as connection:
            assert read(connection).count(b"HTTP/1.1 ") <= 16
        assert server.ask("/version")[0] == 200


# ---- disconnects


def disconnect(server: Served, engine: penstock.Engine, connection: socket.socket, before: int) -> None:
    """Close a connection; its request ends before it has generated much."""
    connection.close()
    wait_until(lambda: server.application.state.calls.num_active == 0)
    wait_until(partial(at_rest, engine))
    assert engine.stats().generation_tokens - before < 8000


@pytest.mark.parametrize("is_trailer", [False, True], ids=["head", "trailers"])
def test_many_headers_are_refused_before_they_end(
    server: Served,
    request: pytest.FixtureRequest,
    is_trailer: bool,  # noqa: FBT001
) -> None:
    """h11 keeps bytes, which have a limit; httptools makes an object of each line."""
    is_h11 = "h11" in request.node.callspec.params["server"]
    num_bytes = SETTINGS.max_header_bytes + 2000 if is_h11 else SETTINGS.max_header_bytes // 2
    start = CHUNKED + b"1\r\n \r\n0\r\n" if is_trailer else HEAD
    with server.send(start + b"ab:cd\r\n" * (num_bytes // 7)) as connection:
        assert read(connection)[9:12] in (b"431", b"400")


def test_long_trailer_is_refused(server: Served) -> None:
    body = b" " * 300_000
    with server.send(CHUNKED + b"%x\r\n%b\r\n0\r\nab: " % (len(body), body)) as connection:
        with suppress(OSError):  # the server closes the connection
            connection.sendall(b"c" * 250_000)
        assert read(connection)[9:12] in (b"431", b"400")


@pytest.mark.parametrize(
    "data", [b"POST /v1/compl", HEAD, post(PATH, b'{"pro', length=100), CHUNKED + b"9\r\n{"]
)
def test_disconnect_in_head_or_body_leaves_nothing(
    server: Served, engine: penstock.Engine, data: bytes
) -> None:
    before = engine.stats().requests_admitted
    server.send(data).close()
    wait_until(lambda: server.application.state.calls.num_active == 0)
    assert server.ask("/ping")[0] == 200
    assert engine.stats().requests_admitted == before


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_disconnect_of_a_queued_request_removes_it(
    server: Served, engine: penstock.Engine, *, is_streamed: bool
) -> None:
    body = {**LONG, "stream": is_streamed}
    with held(engine), server.send(post(PATH, body)) as running:
        wait_until(lambda: engine.stats().running == 2)
        waiting = server.send(post(PATH, body))
        wait_until(lambda: engine.stats().waiting == 1)
        waiting.close()
        wait_until(lambda: engine.stats().waiting == 0)
        running.close()
        wait_until(lambda: server.application.state.calls.num_active == 0)
    wait_until(partial(at_rest, engine))


def test_disconnect_while_tokenising_starts_no_request(
    server: Served, engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_running, may_continue = threading.Event(), threading.Event()

    def encode(*_arguments: object, **_options: object) -> list[int]:
        is_running.set()
        may_continue.wait(60)
        return [1]

    before = engine.stats().requests_admitted
    monkeypatch.setattr(type(engine), "encode", encode)
    connection = server.send(post(PATH, {**LONG, "prompt": "a", "add_special_tokens": False}))
    assert is_running.wait(60)
    connection.close()
    assert server.ask("/ping")[0] == 200
    may_continue.set()
    wait_until(lambda: server.application.state.calls.num_active == 0)
    wait_until(partial(at_rest, engine))
    assert engine.stats().requests_admitted - before <= 1


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("length", [2, 4000], ids=["decode", "prefill"])
def test_disconnect_of_a_running_request_frees_its_blocks(
    server: Served, engine: penstock.Engine, length: int, *, is_streamed: bool
) -> None:
    body = {**LONG, "prompt": [7] * length, "max_tokens": 4000, "stream": is_streamed, "cache_salt": "a"}
    before = engine.stats()
    connection = server.send(post(PATH, body))
    if length == 2:
        wait_until(lambda: engine.stats().generation_tokens > before.generation_tokens)
    else:
        wait_until(lambda: engine.stats().prompt_tokens > before.prompt_tokens)
    disconnect(server, engine, connection, before.generation_tokens)
    engine.reset_prefix_cache()


def test_disconnect_between_pipelined_requests_ends_both(server: Served, engine: penstock.Engine) -> None:
    before = engine.stats().generation_tokens
    with server.send(post(PATH, SHORT) + post(PATH, {**LONG, "stream": True}) + PING) as connection:
        read_until(connection, b"data: {")
    disconnect(server, engine, connection, before)


def test_half_closed_connection_is_a_disconnect(server: Served, engine: penstock.Engine) -> None:
    before = engine.stats().generation_tokens
    with server.send(post(PATH, LONG)) as connection:
        wait_until(lambda: engine.stats().generation_tokens > before)
        connection.shutdown(socket.SHUT_WR)
        assert read(connection) == b""
    disconnect(server, engine, connection, before)


def test_reset_connections_are_not_logged(
    server: Served, engine: penstock.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(40):
            request = post(PATH, {**LONG, "n": 2, "stream": number % 2 == 0})
            connection = server.send(request + PING * (number % 3))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if number % 4:
                wait_until(lambda: server.application.state.calls.num_active > 0)
            if number % 4 == 2:
                connection.recv(1000)
            connection.close()
        wait_until(lambda: server.application.state.calls.num_active == 0 and at_rest(engine))
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.needs("proc")
@pytest.mark.parametrize("variant", rare_except(["h11-asyncio", "httptools-uvloop"], "httptools-uvloop"))
def test_ten_thousand_connections_leave_nothing(engine: penstock.Engine, variant: str) -> None:
    with limited(engine, variant) as server:

        def burst(count: int) -> None:
            for _ in range(count // 100):
                connections = [server.send(data) for data in (b"", b"GET /p", PING, HEAD) * 25]
                for connection in connections:
                    connection.close()
                assert server.ask("/ping")[0] == 200

        burst(1000)
        descriptors, memory = resources().descriptors, resident_bytes()
        burst(9000)
        wait_until(lambda: resources().descriptors <= descriptors)
        assert resident_bytes() - memory < 8 << 20
