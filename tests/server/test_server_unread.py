"""Responses that a client does not read: they count towards the limit of all bodies until they are sent."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock.server
from penstock.server.connection import limited_protocol
from support.api.engines import make_engine, wait_until
from support.server.edge import PARSERS, VARIANTS, read
from support.server.serving import Served, at_rest, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/responses"
COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "Hello", "max_tokens": 1}
#: Larger than the buffers of a connection in the system.
SIZE = 4_000_000
#: Room for three responses with the stored items that they list, and for two of the same client.
TOTAL = 26_000_000


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


def settings_of(**settings: Any) -> penstock.server.ServerSettings:
    chosen = {"api_keys": ("a", "b", "c"), "max_body_bytes": 2 * SIZE, "max_total_body_bytes": TOTAL}
    return penstock.server.ServerSettings(**{**chosen, **settings})


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def store_items(server: Served, key: str) -> str:
    """The path of the items of a stored response, which have more than `SIZE` bytes."""
    body = {"input": [{"role": "user", "content": "Hello", "note": "x" * SIZE}], "max_output_tokens": 1}
    status, answer, _ = server.ask(PATH, body, headers=header(key))
    assert status == 200
    return f"{PATH}/{answer['id']}/input_items"


def request(path: str, key: str, version: str = "1.1") -> bytes:
    return f"GET {path} HTTP/{version}\r\nHost: localhost\r\nX-Api-Key: {key}\r\n\r\n".encode()


def unread(server: Served, path: str, key: str) -> socket.socket:
    """A connection with a response of which the client has read the first bytes only."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(request(path, key))
    assert connection.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
    return connection


@pytest.mark.parametrize("variant", VARIANTS)
def test_unread_responses_of_a_client_leave_room(engine: penstock.Engine, variant: str) -> None:
    parser, loop = variant.split("-")
    settings = settings_of()
    application = penstock.server.app(engine, settings)
    state, protocol = application.state, limited_protocol(settings, PARSERS[parser])
    with serving(application, http=protocol, loop=loop) as server, ExitStack() as stack:
        paths = {key: store_items(server, key) for key in "abc"}
        connections = [stack.enter_context(closing(unread(server, paths["a"], "a"))) for _ in range(2)]
        assert state.body_bytes.total >= 4 * SIZE
        status, answer, headers = server.ask(paths["a"], headers=header("a"))
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "too_many_requests", "1")
        assert server.ask(COMPLETIONS, SHORT, headers=header("a"))[0] == 200, "small requests are answered"
        status, answer, _ = server.ask(paths["b"], headers=header("b"))
        assert (status, len(answer["data"][0]["note"])) == (200, SIZE)
        wait_until(lambda: state.body_bytes.total < 5 * SIZE)
        with unread(server, paths["b"], "b"):
            status, answer, headers = server.ask(paths["c"], headers=header("c"))
            assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
        wait_until(lambda: state.body_bytes.total < 5 * SIZE)
        assert server.ask(paths["c"], headers=header("c"))[0] == 200
        connections[0].close()
        wait_until(lambda: state.body_bytes.total < 3 * SIZE)
        assert server.ask(paths["a"], headers=header("a"))[0] == 200, "it has read or closed the others"
        stack.close()
        wait_until(lambda: state.body_bytes.total == 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_large_response_is_the_same_in_pieces(engine: penstock.Engine, variant: str) -> None:
    parser, loop = variant.split("-")
    settings = settings_of()
    protocol = limited_protocol(settings, PARSERS[parser])
    with serving(penstock.server.app(engine, settings), http=protocol, loop=loop) as server:
        path = store_items(server, "a")
        pipelined = request(path, "a") + request("/ping", "a") + request(path, "a", "1.0")
        with server.send(pipelined) as connection:
            received = read(connection)
    first, ping, last = received.split(b"HTTP/1.1 200 OK")[1:]
    assert ping.endswith(b'{"status":"ok"}')
    for response in (first, last):
        head, _, body = response.partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert len(json.loads(body)["data"][0]["note"]) == SIZE


@pytest.mark.parametrize("is_limited", [False, True], ids=["application", "connection"])
def test_client_that_reads_nothing_loses_its_response(engine: penstock.Engine, *, is_limited: bool) -> None:
    settings = settings_of(send_timeout=0.2)
    application = penstock.server.app(engine, settings)
    protocol: Any = limited_protocol(settings) if is_limited else "auto"
    with serving(application, http=protocol) as server:
        path = store_items(server, "a")
        with unread(server, path, "a"):
            wait_until(lambda: application.state.body_bytes.total == 0)


@pytest.mark.anyio
async def test_any_server_may_hold_a_piece_of_a_response(engine: penstock.Engine) -> None:
    """The application counts a response until the ASGI server has taken its last piece."""
    application = penstock.server.app(engine, settings_of())
    body = json.dumps({"tokens": [40] * 200_000}).encode()
    headers = [(b"content-type", b"application/json"), (b"x-api-key", b"a"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": "/detokenize", "query_string": b"", "headers": headers}
    is_read, taken, counts = anyio.Event(), list[int](), list[int]()

    async def receive() -> dict[str, Any]:
        if is_read.is_set():
            await anyio.sleep_forever()
        is_read.set()
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        counts.append(application.state.body_bytes.total)
        if message["type"] == "http.response.body":
            taken.append(len(message["body"]))
            assert message["more_body"] == (sum(taken) < 200_013)

    await application(scope, receive, send)
    assert max(taken) <= 64 << 10
    assert min(counts) >= 200_000 + len(body)
    assert application.state.body_bytes.total == 0


# ---- streams


def stream_fields(**fields: Any) -> dict[str, Any]:
    body = {"input": "Hello", "max_output_tokens": 100, "ignore_eos": True, "stream": True}
    return {**body, "top_logprobs": 20, **fields}


def test_large_last_event_of_a_stream_is_complete(engine: penstock.Engine) -> None:
    application = penstock.server.app(engine, settings_of())
    with serving(application) as server:
        _, text, _ = server.ask(PATH, stream_fields(), headers=header("a"))
        last = text[text.rindex(b"data: ") :]
        assert len(last) > 64 << 10
        response = json.loads(last.removeprefix(b"data: "))["response"]
        status, stored, _ = server.ask(f"{PATH}/{response['id']}", headers=header("a"))
    assert (status, stored) == (200, response)
    assert len(response["output"][0]["content"][0]["logprobs"]) == 100
    assert application.state.body_bytes.total == 0


def test_stream_ends_when_its_log_probabilities_have_no_room(engine: penstock.Engine) -> None:
    application = penstock.server.app(engine, settings_of(max_total_body_bytes=100_000))
    with serving(application) as server:
        _, text, _ = server.ask(PATH, stream_fields(), headers=header("a"))
        events = [line.removeprefix("event: ") for line in text.decode().splitlines() if line[:6] == "event:"]
        assert "response.output_text.delta" in events
        assert events[-2:] == ["error", "response.failed"]
        wait_until(lambda: at_rest(engine) and application.state.body_bytes.total == 0)
        assert server.ask(PATH, stream_fields(top_logprobs=0), headers=header("a"))[0] == 200
    assert application.state.body_bytes.total == 0
