"""Hostile and unusual HTTP: sizes, malformed requests, versions, upgrades; with each parser and loop."""

from __future__ import annotations

import http.client
import json
import logging
import random
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

import penstock.server
from penstock.server.connection import limited_protocol
from support.api.engines import resident_bytes, wait_until
from support.server.edge import (
    CHUNKED,
    HEAD,
    PARSERS,
    PATH,
    PING,
    SHORT,
    VARIANTS,
    limited,
    long_engine,
    read,
    read_until,
)
from support.server.serving import Served, held, post, serving

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


# ---- sizes


ENDLESS = {
    "head": (b"GET /ping HTTP/1.1\r\n", b"a: b\r\n"),
    "header": (b"GET /ping HTTP/1.1\r\na: ", b"b" * 1000),
    "target": (b"GET /", b"b" * 1000),
    "lines": (b"", b"\r\n" * 100),
    "extension": (CHUNKED + b"1;a=", b"b" * 1000),
    "chunks": (CHUNKED, b"1\r\n \r\n" * 100),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n"),
    "trailer": (CHUNKED + b"0\r\na: ", b"b" * 1000),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_head_framing_or_trailer_is_refused(server: Served, name: str) -> None:
    begin, rest = ENDLESS[name]
    for pause in (b"", PING):
        with server.send(pause) as connection:
            if pause:
                read_until(connection, b"}")
            with suppress(ConnectionError):
                connection.sendall(begin)
                for _ in range(200_000 // len(rest)):
                    connection.sendall(rest)
            assert read(connection)[9:12] in (b"431", b"400")
    assert server.ask("/ping")[0] == 200
    wait_until(lambda: server.application.state.calls.num_active == 0)


@pytest.mark.needs("proc")
def test_header_of_a_mebibyte_takes_no_memory(server: Served) -> None:
    def ask() -> None:
        with server.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\na: ") as connection:
            with suppress(ConnectionError):
                connection.sendall(b"b" * (1 << 20) + b"\r\n\r\n")
            assert read(connection)[9:12] in (b"431", b"400")

    ask()
    before = resident_bytes()
    for _ in range(30):
        ask()
    assert resident_bytes() - before < 4 << 20


@pytest.mark.needs("proc")
@pytest.mark.parametrize("is_announced", [True, False], ids=["length", "chunked"])
def test_client_that_sends_a_gibibyte_reads_status_413(server: Served, *, is_announced: bool) -> None:
    head = HEAD + b"Content-Length: 1073741824\r\n\r\n" if is_announced else CHUNKED
    piece = b" " * (1 << 16) if is_announced else b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    before = resident_bytes()
    with server.send(head) as connection:
        num_sent = 0
        with suppress(ConnectionError):
            for _ in range(100):
                num_sent += connection.send(piece)
        assert read(connection).startswith(b"HTTP/1.1 413 ")
    assert resident_bytes() - before < 4 << 20
    assert server.ask("/ping")[0] == 200


def test_bodies_of_all_requests_have_a_limit(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(
        api_keys=("a", "b"), max_body_bytes=100_000, max_total_body_bytes=150_000
    )
    application = penstock.server.app(engine, settings)
    key, other = b"X-Api-Key: a\r\n", {"X-Api-Key": "b"}
    state = application.state
    with serving(application, http=limited_protocol(settings)) as server:
        body = json.dumps(SHORT).encode() + b" " * 80_000
        for data in (b" " * 80_000, body):  # the first one is incomplete, the second one is computed
            request = post(PATH, data, length=len(body)).replace(b"Host", key + b"Host", 1)
            with held(engine), server.send(request):
                wait_until(lambda: state.body_bytes.total >= 80_000)
                status, answer, headers = server.ask(PATH, body, headers=other)
                assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
                assert server.ask("/ping")[0] == 200
            wait_until(lambda: state.body_bytes.total == 0)
            assert server.ask(PATH, body, headers=other)[0] == 200
        metrics = server.ask("/metrics", headers=other)[1]
    assert b"http_bodies_rejected_total 2.0\n" in metrics
    assert b"http_body_bytes 0.0\n" in metrics
    assert state.body_bytes.total == 0


def test_values_of_waiting_requests_count_towards_the_limit(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(max_total_body_bytes=4_000_000)
    application = penstock.server.app(engine, settings)
    state = application.state
    body = json.dumps({**SHORT, "metadata": ["ab"] * 20_000}).encode()
    size = len(body) + 20_000 * (32 + 48)
    with serving(application, http=limited_protocol(settings)) as server:
        with held(engine), server.send(post(PATH, body)):
            wait_until(lambda: size <= state.body_bytes.total < size + 1000)
            status, answer, headers = server.ask(PATH, body)
            assert (status, answer["error"]["code"], headers["retry-after"]) == (
                429,
                "too_many_requests",
                "1",
            )
        wait_until(lambda: state.body_bytes.total == 0)
        assert server.ask(PATH, body)[0] == 200


# ---- malformed requests and versions


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}", (400,)),
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", (400,)),
        (HEAD + b"Content-Length: -2\r\n\r\n", (400,)),
        (HEAD + b"Content-Length: 9" + b"9" * 30 + b"\r\n\r\n", (400,)),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}", (400,)),
        (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", (400,)),
        (CHUNKED + b"zz\r\n{}\r\n", (400,)),
        (CHUNKED + b"-2\r\n{}\r\n", (400,)),
        (CHUNKED + b"f" * 30 + b"\r\n{}\r\n", (400,)),
        (b"GET /ping HTTP/2.0\r\nHost: localhost\r\n\r\n", (505,)),
        (b"GET /ping HTTP/9.9\r\nHost: localhost\r\n\r\n", (400, 505)),
        (b"GET /ping\r\n\r\n", (400, 505)),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 505)),
        (b"GET /ping HTTP/1.1\r\nHost: localhost\r\na: b\0c\r\n\r\n", (400,)),
        (b"GET /pi\0ng HTTP/1.1\r\nHost: localhost\r\n\r\n", (400,)),
        (b"GET /ping HTTP/1.1\r\nHost : localhost\r\n\r\n", (400,)),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", (400,)),
    ],
)
def test_malformed_request_is_refused_and_closed(
    server: Served, data: bytes, statuses: tuple[int, ...]
) -> None:
    with server.send(data) as connection:
        received = read(connection)
    assert int(received[9:12]) in statuses
    assert received.count(b"HTTP/1.1 ") == 1
    wait_until(lambda: server.application.state.calls.num_active == 0)


def test_random_bytes_are_answered_or_closed(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(1)
    valid = post(PATH, SHORT)
    with caplog.at_level(logging.ERROR):
        for number in range(150):
            data = bytearray(valid if number % 2 else chance.randbytes(chance.randint(1, 2000)))
            for _ in range(chance.randint(1, 8)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            with server.send(bytes(data)) as connection, suppress(ConnectionError):
                connection.shutdown(socket.SHUT_WR)
                read(connection)
        assert server.ask(PATH, SHORT)[0] == 200
        wait_until(lambda: server.application.state.calls.num_active == 0)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_http_1_0_gets_the_same_text_without_chunks(server: Served, *, is_streamed: bool) -> None:
    body = {"prompt": [1, 2], "max_tokens": 20, "seed": 1, "stream": is_streamed}
    texts = []
    for version in (10, 11):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection._http_vsn, connection._http_vsn_str = version, f"HTTP/1.{version - 10}"  # type: ignore[attr-defined]
        connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert (response.status, response.headers["Transfer-Encoding"]) == (
            200,
            "chunked" if is_streamed and version == 11 else None,
        )
        assert (response.headers["Connection"] == "close") == (version == 10)
        lines = response.read().replace(b"data: [DONE]", b"").replace(b"data: ", b"").split(b"\n\n")
        answers = [json.loads(line) for line in lines if line]
        texts.append("".join(answer["choices"][0]["text"] for answer in answers))
        connection.close()
    assert texts[0] == texts[1] != ""


def test_connection_close_is_honoured(server: Served) -> None:
    for stream in (False, True):
        body = json.dumps({**SHORT, "stream": stream}).encode()
        head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        with server.send(head + body + PING) as connection:
            received = read(connection)
        assert b"\r\nconnection: close\r\n" in received.lower()
        assert received.count(b"HTTP/1.1 ") == 1


def test_trailer_is_no_header(server: Served) -> None:
    body = json.dumps(SHORT).encode()
    for gap in (b"", b"\r\n"):  # h11 takes the trailers with the body, httptools one by one
        request = CHUNKED + b"%x\r\n%s\r\n0\r\nX-Request-Id: trailer\r\n\r\n" % (len(body), body) + gap
        with server.send(request) as connection:
            received = read_until(connection, b"}}")
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b"trailer" not in received


@pytest.mark.parametrize("size", [0, 40], ids=["one piece", "two pieces"])
def test_offer_of_http2_is_ignored_and_the_body_read(server: Served, size: int) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    request = post(PATH, SHORT).replace(b"Host:", offer + b"Host:")
    end = len(request) - size
    with server.send(request[:end]) as connection:
        connection.sendall(request[end:])
        assert read_until(connection, b"}}").startswith(b"HTTP/1.1 200 ")


def test_websocket_needs_a_key_and_is_never_opened(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(api_keys=("secret",))
    lines = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\n"
    request = PING.replace(b"ping", b"version").replace(b"Host:", lines + b"Host:")
    for parser in PARSERS.values():
        application = penstock.server.app(engine, settings)
        with serving(application, http=limited_protocol(settings, parser), ws="none") as server:
            for key, status in ((b"", b" 401 "), (b"Authorization: Bearer secret\r\n", b" 200 ")):
                with server.send(request.replace(b"Host:", key + b"Host:")) as connection:
                    assert status in read_until(connection, b"\r\n\r\n")
