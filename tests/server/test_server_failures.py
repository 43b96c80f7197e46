"""Requests that fail while they run, and engines that stop: errors for their clients only."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from penstock.server.models import Progress
from support import hooks
from support.api.engines import make_engine, wait_until
from support.server import scripted
from support.server.serving import Served, at_rest, held, post, scripted_server, serving

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


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("prompt", FAILING, ids=["one", "batch"])
def test_failed_request_is_status_500(server: Served, prompt: object) -> None:
    status, answer, _ = server.ask(PATH, {"prompt": prompt})
    assert (status, answer["error"]["code"]) == (500, "generation_failed")
    assert server.ask(PATH, SHORT)[0] == 200


@pytest.mark.needs("hooks")
def test_text_without_memory_is_status_503(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise penstock.OutOfMemoryError("a text of 7 bytes needs 9 bytes of memory")

    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine)) as server:
        monkeypatch.setattr(engine._session, "submit", refuse)
        status, answer, headers = server.ask(PATH, SHORT)
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert headers["retry-after"] == "5"


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("is_loading", [True, False])
def test_request_for_a_model_that_is_not_open_is_status_503(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, *, is_loading: bool
) -> None:
    application = penstock.server.app(penstock.Engine(tiny_model))
    application.state.models["default"].progress = Progress() if is_loading else None
    reason = "the model is still loading" if is_loading else "the model is not available now"
    with serving(application) as server:
        for path, fields in ((PATH, SHORT), ("/tokenize", {"prompt": "a"})):
            status, answer, headers = server.ask(path, fields)
            assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "unavailable", "5")
            assert answer["error"]["message"] == reason
    assert ("request refused: the model is still loading" in caplog.messages) == is_loading
    assert ("async with engine" in caplog.text) != is_loading


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("prompt", FAILING, ids=["one", "batch"])
def test_failed_stream_ends_with_an_error_event(server: Served, prompt: object) -> None:
    event = server.events(PATH, {"prompt": prompt})[-1]
    assert event["error"]["code"] == "generation_failed"
    assert server.events(PATH, SHORT)[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("path", "fields", "num_sent"),
    [
        ("/none", {}, 0),
        ("/none", {}, 1),
        (PATH, SHORT, 0),
        (PATH, SHORT, 1),
        *((PATH, {**SHORT, "stream": True}, number) for number in range(3)),
    ],
)
def test_server_that_raises_after_a_disconnect(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, path: str, fields: dict[str, Any], num_sent: int
) -> None:
    with make_engine(tiny_model) as engine:
        sent = _sent_until_error(penstock.server.app(engine), path, fields, num_sent)
        assert len(sent) == num_sent
        wait_until(lambda: at_rest(engine))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_server_that_raises_at_a_comment(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = penstock.server.ServerSettings(keep_alive_interval=0.01)
    with make_engine(tiny_model) as engine:
        application = penstock.server.app(engine, settings)
        with held(engine):
            sent = _sent_until_error(application, PATH, {**SHORT, "stream": True}, 1)
        assert sent[0]["status"] == 200
        wait_until(lambda: at_rest(engine))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def _sent_until_error(application: Any, path: str, fields: dict[str, Any], num_sent: int) -> list[Any]:
    """The messages before this number is reached and `send` raises, as ASGI 2.4 allows."""
    sent: list[Any] = []
    body = iter([{"type": "http.request", "body": json.dumps(fields).encode()}])

    async def receive() -> Any:
        message = next(body, None)
        if message is None:
            await asyncio.Event().wait()
        return message

    async def send(message: Any) -> None:
        if len(sent) == num_sent:
            raise ConnectionResetError
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    asyncio.run(application({**scope, "http_version": "1.1", "headers": headers}, receive, send))
    return sent


@pytest.mark.needs("hooks")
def test_lost_device_is_an_error_event_and_shown_by_health(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine)) as server:
        engine._session.adopt(hooks.losing_engine(tiny_model, engine.config, LOSING_TOKEN))
        with held(engine):
            body = {"prompt": [1], "max_tokens": 400, "bad_token_ids": [LOSING_TOKEN], "stream": True}
            connection = server.send(post(PATH, body))
            wait_until(lambda: engine.stats().running == 2)
            losing = server.send(post(PATH, {"prompt": [LOSING_TOKEN], "max_tokens": 1}))
            wait_until(lambda: len(server.application.state.calls.generations) == 2)
        assert b'data: {"error":{' in read_all(connection)
        assert b" 503 " in losing.recv(1000)
        connection.close()
        losing.close()
        assert server.ask("/health")[0] == 503
        assert server.ask("/ping")[0] == 503
        assert server.ask(PATH, SHORT)[0] == 503


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("body", [{}, {"n": 2}, {"n": 2, "best_of": 3}, {"prompt": [[1], [2]]}])
def test_request_that_takes_too_long_is_status_504(tiny_model: Path, body: dict[str, Any]) -> None:
    settings = penstock.server.ServerSettings(request_timeout=0.05)
    with make_engine(tiny_model, max_num_seqs=2) as engine:
        with serving(penstock.server.app(engine, settings)) as server, held(engine):
            request = {"prompt": [1], "max_tokens": 400, **body}
            status, answer, _ = server.ask(PATH, request)
            assert (status, answer["error"]["code"]) == (504, "request_timeout")
            if "best_of" not in body:
                event = server.events(PATH, request)[-1]
                assert event["error"]["code"] == "request_timeout"
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400}
            status, answer, _ = server.ask("/v1/messages", {**chat, "model": "default"})
            assert (status, answer["error"]["type"]) == (504, "timeout_error")
        wait_until(lambda: at_rest(engine))


@pytest.mark.needs("hooks")
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


# ---- ends from outside


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("fields", [{}, {"prompt": [[1], [2]]}, {"best_of": 2}], ids=["one", "batch", "best"])
def test_end_of_a_drain_is_status_503(tiny_model: Path, fields: dict[str, Any]) -> None:
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine)) as server:
        state = server.application.state
        with held(engine):
            body = {"prompt": [1], "max_tokens": 400, "ignore_eos": True, **fields}
            connection = server.send(post(PATH, body))
            wait_until(lambda: engine.stats().running > 1)
            state.calls.is_draining = True
            assert server.ask("/abort", {"request_id": list(state.calls.generations)})[1] == {"aborted": 1}
        received = connection.recv(1 << 16)
        connection.close()
    assert b" 503 " in received.partition(b"\r\n")[0]
    assert b"finish_reason" not in received


# ---- requests that do not disturb others


@pytest.mark.needs("hooks")
def test_parameters_of_a_request_leave_its_slot(tiny_model: Path) -> None:
    plain: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with make_engine(tiny_model, max_num_seqs=1) as engine, serving(penstock.server.app(engine)) as server:
        _, answer, _ = server.ask(PATH, {**plain, "return_token_ids": True})
        token_ids = answer["choices"][0]["token_ids"]
        masks: tuple[dict[str, Any], ...] = (
            {"allowed_token_ids": [7]},
            {"bad_token_ids": token_ids},
            {"logit_bias": {"7": 100}},
            {"structured_outputs": {"choice": ["yes"]}, "ignore_eos": False},
        )
        for mask in masks:
            status, masked, _ = server.ask(PATH, {**plain, **mask})
            assert status == 200
            assert masked["choices"][0]["text"] != answer["choices"][0]["text"]
            assert server.ask(PATH, plain)[1]["choices"][0]["text"] == answer["choices"][0]["text"]


@pytest.mark.needs("hooks")
@pytest.mark.parametrize(
    ("regex", "status"),
    [
        ("(a{1000}){1000}", 400),
        ("(" * 300 + "a" + ")" * 300, 400),
        ("a{99999999}", 400),
        ("(x+x+)+y" * 2000, 200),
    ],
)
def test_costly_regex_does_not_stop_a_stream(tiny_model: Path, regex: str, status: int) -> None:
    long = {"prompt": [1, 2], "max_tokens": 200, "seed": 1, "ignore_eos": True, "stream": True}
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine)) as server:
        with server.send(post(PATH, long)) as connection:
            fields = {**SHORT, "structured_outputs": {"regex": regex}}
            assert server.ask(PATH, fields)[0] == status
            received = read_all(connection)
        assert b'"finish_reason":"length"' in received
        assert b"[DONE]" in received


@pytest.mark.needs("hooks")
def test_text_of_a_malformed_call_is_content(tiny_model: Path, tmp_path: Path) -> None:
    pieces = ["<tool_call>", '{"name": ', "weather", "</tool_call>", "So."]
    with scripted_server(tiny_model, tmp_path, pieces) as server:
        body = {
            "messages": scripted.MESSAGES,
            "tools": scripted.TOOLS,
            "max_tokens": len(pieces),
            "temperature": 2.0,
            "ignore_eos": True,
            "seed": server.application.script.seed,
        }
        status, answer, _ = server.ask("/v1/chat/completions", body)
        events = server.events("/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    assert (status, message["content"]) == (200, "".join(pieces))
    assert "tool_calls" not in message
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "".join(pieces)
