"""`penstock serve` as a process: listening, draining on signals, keys, errors; limits of its connections."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import penstock.server
from penstock.cli import main
from penstock.server.connection import limited_protocol
from penstock.server.models import Progress
from support.api.engines import make_engine, wait_until
from support.server.process import Process, started
from support.server.serving import Served, at_rest, post, serving

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 4000, "ignore_eos": True, "stream": True}
LONGER = '{"max_position_embeddings": 8192}'


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection or ends the response."""
    received = b""
    while not received.endswith(b"0\r\n\r\n") and (data := connection.recv(1 << 16)):
        received += data
    return received


@pytest.mark.needs("signals")
def test_served_model_answers_under_its_names(tiny_model: Path) -> None:
    names = ("--served-model-name", "a", "--served-model-name", "b", "--model", f"other={tiny_model}")
    with started(tiny_model, *names) as server:
        rows = server.ask("/v1/models")[1]["data"]
        assert {(row["id"], row["root"]) for row in rows} == {("a", "a"), ("b", "a"), ("other", "other")}
        for name in ("a", "b", "other"):
            status, answer, _ = server.ask(PATH, {"model": name, "prompt": "Hi", "max_tokens": 1})
            assert (status, answer["model"]) == (200, name)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


def test_name_of_a_path_is_its_last_part(tiny_model: Path) -> None:
    with started(f"{tiny_model}/.") as server:
        rows = server.ask("/v1/models")[1]["data"]
        assert [row["id"] for row in rows] == [tiny_model.name]
        health = server.ask("/health")[1]
        assert health["models"].keys() == {tiny_model.name}
        for host, status in (("localhost", 200), ("evil.example", 403)):
            assert server.ask("/health", headers={"Host": host})[0] == status


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "a=x", "--model", "a=y"],
        ["x", "--model", "x=y"],
        ["x", "--served-model-name", "a", "--model", "a=y"],
        ["x", "--served-model-name", "b", "--served-model-name", "a", "--model", "a=y"],
    ],
)
def test_name_of_two_models_is_invalid_usage(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["serve", *arguments])
    assert result.exit_code == 2
    assert "name" in result.output


@pytest.mark.needs("signals")
def test_termination_lets_a_stream_finish(tiny_model: Path) -> None:
    with started(tiny_model, "--config-overrides", LONGER) as server:
        with server.send(post(PATH, LONG)) as connection:
            received = connection.recv(1000)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_refused(server))
            received += read_all(connection)
        assert b'"finish_reason":"length"' in received
        assert b"data: [DONE]" in received
        assert server.end() == 0


def is_refused(server: Process) -> bool:
    """Whether new requests get status 503, or the server has ended."""
    try:
        return server.ask(PATH, {"prompt": "Hi", "max_tokens": 1})[0] == 503
    except OSError:
        return True


@pytest.mark.needs("signals")
def test_deadline_ends_a_stream_with_an_error(tiny_model: Path) -> None:
    with started(tiny_model, "--config-overrides", LONGER, "--drain-timeout", 0) as server:
        with server.send(post(PATH, {**LONG, "n": 32})) as connection:
            received = connection.recv(1000)
            server.process.send_signal(signal.SIGTERM)
            received += read_all(connection)
        assert b'data: {"error":{"message":"the server is stopping"' in received
        assert b"[DONE]" not in received
        assert server.end() == 0


@pytest.mark.needs("signals")
def test_second_signal_ends_the_process_at_once(tiny_model: Path) -> None:
    with (
        started(tiny_model, "--config-overrides", LONGER) as server,
        server.send(post(PATH, {**LONG, "n": 32})) as connection,
    ):
        connection.recv(1000)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_refused(server))
        server.process.send_signal(signal.SIGTERM)
        received = read_all(connection)
        assert server.end() == 0
        assert b"[DONE]" not in received
        assert b"the server is stopping" not in received  # the deadline of the drain would end it with this


def test_keys_come_from_files(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\ntwo\n")
    with started(tiny_model, "--api-key-file", tmp_path / "keys", "--admin-api-key", "boss") as server:
        assert server.ask("/v1/models")[0] == 401
        for key in ("one", "two", "boss"):
            assert server.ask("/v1/models", headers={"X-Api-Key": key})[0] == 200
        assert server.ask("/sleep", method="POST", headers={"X-Api-Key": "one"})[0] == 401


def test_key_file_or_variable_without_a_key_is_invalid_usage(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n \n")
    for option in ("--api-key-file", "--admin-api-key-file"):
        result = CliRunner().invoke(main, ["serve", str(tiny_model), option, str(tmp_path / "keys")])
        assert result.exit_code == 2, result.output
        assert "has no key" in result.output


@pytest.mark.parametrize(
    ("options", "key", "source"),
    [
        ([], "", "PENSTOCK_API_KEY has an empty key"),
        ([], "se cret", "PENSTOCK_API_KEY has a key with other characters"),
        (["--api-key", "se cret"], None, "--api-key has a key with other characters"),
        (["--admin-api-key", ""], None, "--admin-api-key has an empty key"),
        (["--api-key-file", "keys"], None, "keys has a key with other characters"),
    ],
)
def test_source_of_a_key_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], key: str | None, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("one\nse cret\n")
    result = CliRunner().invoke(main, ["serve", "model", *options], env={"PENSTOCK_API_KEY": key})
    assert result.exit_code == 2, result.output
    assert f"{source}: a key must be printable ASCII characters without blanks" in result.output
    assert "cret" not in result.output


def test_model_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["serve", str(tmp_path), "--port", "0"])
    assert result.exit_code == 1
    assert "Error: " in result.output


@pytest.mark.parametrize("arguments", [[], ["--model", "a"], ["--model", "a=b", "--served-model-name", "c"]])
def test_missing_model_is_invalid_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["serve", *arguments]).exit_code == 2


def test_setting_out_of_range_is_invalid_usage(tiny_model: Path) -> None:
    for option in ("--max-body-bytes=0", "--receive-timeout=nan", "--keep-alive-interval=-1"):
        result = CliRunner().invoke(main, ["serve", str(tiny_model), option])
        assert result.exit_code == 2, result.output
        assert "finite number above 0" in result.output


def test_loading_is_status_503_with_progress(tiny_model: Path) -> None:
    application = penstock.server.app({"tiny": make_engine(tiny_model)})
    progress = application.state.models["tiny"].progress = Progress()
    progress(5, 10)
    with serving(application) as server:
        status, answer, _ = server.ask("/health")
        expected = {"status": "loading", "bytes_loaded": 5, "bytes": 10}
        assert (status, answer["models"]["tiny"]) == (503, expected)
        assert server.ask("/ping")[0] == 200
        assert server.ask("/v1/models")[1]["data"][0]["max_model_len"] is None
        assert server.ask("/tokenize", {"prompt": "a"})[0] == 503


# ---- connections


@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "plain"])
def test_heads_have_the_same_bound_with_each_parser(tiny_model: Path, *, is_fast: bool) -> None:
    with started(tiny_model, "--max-header-bytes", "64K", is_fast=is_fast) as server:
        assert server.ask("/ping", headers={"X-Long": "a" * 60_000})[0] == 200
        assert server.ask("/ping", headers={"X-Long": "a" * 70_000})[0] == 431


def test_idle_connection_is_closed_after_its_time(tiny_model: Path) -> None:
    settings = penstock.server.ServerSettings(keep_alive_timeout=0.2)
    application = penstock.server.app(make_engine(tiny_model), settings)
    with (
        serving(application, http=limited_protocol(settings)) as server,
        server.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection,
    ):
        begin = time.monotonic()
        received = b""
        while data := connection.recv(1000):
            received += data
        assert received.startswith(b"HTTP/1.1 503")
        assert 0.15 < time.monotonic() - begin < 5  # uvicorn's own time


@pytest.fixture(params=[H11Protocol, HttpToolsProtocol], ids=["h11", "httptools"])
def limited(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server with narrow limits, with each HTTP parser."""
    settings = penstock.server.ServerSettings(max_header_bytes=4096, receive_timeout=0.2)
    application = penstock.server.app(make_engine(tiny_model), settings)
    with serving(application, http=limited_protocol(settings, request.param)) as server:
        yield server


def test_endless_head_is_status_431(limited: Served) -> None:
    with limited.send(b"GET /ping HTTP/1.1\r\nX-Long: " + b"a" * 5000) as connection:
        assert b" 431 " in connection.recv(1000)
        assert connection.recv(1000) == b""


def test_slow_head_closes_the_connection(limited: Served) -> None:
    for data in (b"", b"GET /ping HTTP/1.1\r\n"):
        with limited.send(data) as connection, suppress(ConnectionResetError):
            assert connection.recv(1000) == b""


def test_second_request_of_a_connection_has_the_same_limits(limited: Served) -> None:
    ping = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with limited.send(ping + ping) as connection:
        received = b""
        while received.count(b"}") < 2:
            received += connection.recv(10_000)
        connection.sendall(b"GET /ping HTTP/1.1\r\nX-Long: " + b"a" * 5000)
        while data := connection.recv(10_000):
            received += data
        assert b" 431 " in received


@pytest.mark.parametrize("is_limited", [False, True], ids=["application", "connection"])
def test_client_that_does_not_read_loses_its_stream(tiny_model: Path, *, is_limited: bool) -> None:
    interval = 1000 if is_limited else 0.1
    settings = penstock.server.ServerSettings(send_timeout=0.2, keep_alive_interval=interval)
    longer = {"max_position_embeddings": 8192}
    with make_engine(tiny_model, config_overrides=longer) as engine:
        application = penstock.server.app(engine, settings)
        with (
            serving(application, http=limited_protocol(settings) if is_limited else "auto") as server,
            server.send(post(PATH, {**LONG, "max_tokens": 8000, "n": 32})),
        ):
            wait_until(lambda: application.state.calls.num_active == 1)
            wait_until(lambda: application.state.calls.num_active == 0 and at_rest(engine))
            assert engine.stats().generation_tokens < 32 * 8000


def test_connection_beyond_the_limit_is_closed(tiny_model: Path) -> None:
    settings = penstock.server.ServerSettings(max_connections=3)
    application = penstock.server.app(make_engine(tiny_model), settings)
    with serving(application, http=limited_protocol(settings)) as server:
        connections = [server.send(b"") for _ in range(3)]
        with server.send(b"") as refused, suppress(ConnectionResetError):
            assert refused.recv(1000) == b""
        for connection in connections:
            connection.close()
        wait_until(partial(answers, server))


def answers(server: Served) -> bool:
    try:
        return server.ask("/ping")[0] == 503
    except OSError:
        return False
