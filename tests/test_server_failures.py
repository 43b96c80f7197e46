"""Requests that fail while they run, and engines that stop: errors for their clients only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from api_support import make_engine, wait_until
from support import hooks
from support.serving import Served, held, post, serving

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
SHORT = {"prompt": [1, 2], "max_tokens": 1}
LOSING_TOKEN = 77
FAILING_TOKEN = 78
FAILING: tuple[Any, ...] = ([FAILING_TOKEN], [[FAILING_TOKEN], [FAILING_TOKEN]])


def read_all(connection: socket.socket) -> bytes:
    """Everything until the end of a chunked response."""
    received = b""
    while not received.endswith(b"0\r\n\r\n") and (data := connection.recv(1 << 16)):
        received += data
    return received


@pytest.fixture
def server(tiny_model: Path) -> Iterator[Served]:
    """A server with steps that fail if they compute `FAILING_TOKEN`."""
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine)) as server:
        engine._session.adopt(hooks.failing_engine(tiny_model, engine.config, FAILING_TOKEN))
        yield server


@pytest.mark.parametrize("prompt", FAILING, ids=["one", "batch"])
def test_failed_request_is_status_500(server: Served, prompt: object) -> None:
    status, answer, _ = server.ask(PATH, {"prompt": prompt})
    assert (status, answer["error"]["code"]) == (500, "generation_failed")
    assert server.ask(PATH, SHORT)[0] == 200


@pytest.mark.parametrize("prompt", FAILING, ids=["one", "batch"])
def test_failed_stream_ends_with_an_error_event(server: Served, prompt: object) -> None:
    event = server.events(PATH, {"prompt": prompt})[-1]
    assert event["error"]["code"] == "generation_failed"
    assert server.events(PATH, SHORT)[-1] == "[DONE]"


def test_lost_device_is_an_error_event_and_shown_by_health(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine)) as server:
        engine._session.adopt(hooks.losing_engine(tiny_model, engine.config, LOSING_TOKEN))
        with held(engine):
            body = {"prompt": [1], "max_tokens": 400, "bad_token_ids": [LOSING_TOKEN], "stream": True}
            connection = server.send(post(PATH, body))
            wait_until(lambda: engine.stats().running == 2)
            losing = server.send(post(PATH, {"prompt": [LOSING_TOKEN], "max_tokens": 1}))
            wait_until(lambda: len(server.application.state.generations) == 2)
        assert b'data: {"error":{' in read_all(connection)
        assert b" 503 " in losing.recv(1000)
        connection.close()
        losing.close()
        assert server.ask("/health")[0] == 503
        assert server.ask("/ping")[0] == 503
        assert server.ask(PATH, SHORT)[0] == 503


def test_stuck_step_is_shown_by_health(tiny_model: Path) -> None:
    settings = penstock.server.ServerSettings(stall_timeout=0.001)
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine, settings)) as server:
        with held(engine):
            wait_until(lambda: is_stuck(server))
            assert server.ask("/ping")[0] == 503
        wait_until(lambda: server.ask("/health")[0] == 200)


def is_stuck(server: Served) -> bool:
    """Whether health says that a step does not end."""
    status, answer, _ = server.ask("/health")
    return (status, answer["models"]["default"]["status"]) == (503, "stuck")
