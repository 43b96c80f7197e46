"""Log records of the server: the request they belong to, the line of each request, their forms."""

from __future__ import annotations

import json
import logging
import re
import signal
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from penstock.server.keys import digest_of
from penstock.server.logs import (
    AccessRecord,
    client_of,
    configure_logging,
    request_id,
    unknown_path_of,
)
from support import hooks
from support.api.engines import make_engine, wait_until
from support.server.process import started
from support.server.serving import Served, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
SHORT = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
KEY = {"Authorization": "Bearer secret"}
SETTINGS = penstock.server.ServerSettings(api_keys=("secret",))
ACCESS = "penstock.server.access"
TOKEN = 78


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture
def server(engine: penstock.Engine, caplog: pytest.LogCaptureFixture) -> Iterator[Served]:
    with (
        caplog.at_level(logging.INFO, ACCESS),
        serving(penstock.server.app({"tiny": engine}, SETTINGS)) as server,
    ):
        yield server


def access(caplog: pytest.LogCaptureFixture, count: int = 1) -> list[AccessRecord]:
    """The records of requests that have ended, after `count` of them."""

    def found() -> list[AccessRecord]:
        return [record.msg for record in caplog.records if isinstance(record.msg, AccessRecord)]

    wait_until(lambda: len(found()) >= count)
    assert len(found()) == count
    return found()


@contextmanager
def configured(kind: str) -> Iterator[None]:
    """Logging as `penstock serve` configures it; then that of the test run."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    configure_logging("info", kind, has_access=True)  # type: ignore[arg-type]
    try:
        yield
    finally:
        root.handlers, root.level = handlers, level


@pytest.mark.parametrize("streams", [False, True])
def test_request_is_logged_when_it_ends(
    server: Served,
    engine: penstock.Engine,
    caplog: pytest.LogCaptureFixture,
    streams: bool,  # noqa: FBT001
) -> None:
    status, answer, _ = server.ask(PATH, {**SHORT, "stream": streams}, headers=KEY)
    [found] = access(caplog)
    text = answer if isinstance(answer, bytes) else b""
    assert (found.method, found.path, found.status) == ("POST", PATH, status)
    assert found.key == digest_of(b"secret").hex()[:8]
    assert (found.model, found.completion_tokens) == ("tiny", 3)
    assert found.prompt_tokens == len(engine.encode("Hello"))
    assert found.client.startswith("127.0.0.1:")
    assert 0 < found.milliseconds < 60_000
    if streams:
        assert found.bytes == len(text)
    assert "Hello" not in str(found)
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": ["Hello", "world"]}),
        ("/v1/completions", {"prompt": "Hello", "echo": True, "max_tokens": 0}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 3, "n": 2, "ignore_eos": True}),
    ],
)
def test_logged_tokens_are_those_of_the_response(
    server: Served, caplog: pytest.LogCaptureFixture, path: str, fields: dict[str, Any]
) -> None:
    _, answer, _ = server.ask(path, fields, headers=KEY)
    [found] = access(caplog)
    usage = answer["usage"]
    assert (found.prompt_tokens, found.completion_tokens) == (
        usage["prompt_tokens"],
        usage.get("completion_tokens", 0),
    )


def test_bytes_are_those_of_the_body(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    _, _, headers = server.ask("/v1/models", headers=KEY)
    assert access(caplog)[0].bytes == int(headers["content-length"])


def test_refused_request_is_logged_without_its_key(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    server.ask("/v1/models?key=query", headers={"Authorization": "Bearer wrong"})
    server.ask("/v1/models/a%20b", headers=KEY)
    server.ask("/none%0Ax" + "y" * 500 + "?key=query", headers=KEY)
    refused, model, unknown = access(caplog, 3)
    assert (refused.status, refused.key, refused.model, refused.prompt_tokens) == (401, None, None, None)
    assert (model.path, model.status) == ("/v1/models/{name:path}", 404)
    assert (unknown.path, unknown.status) == (("/none%0Ax" + "y" * 500)[:128], 404)
    text = "".join(map(str, (refused, model, unknown)))
    assert "wrong" not in text
    assert "query" not in text
    assert "\n" not in text


FORGED = [
    "FAKE client=1.2.3.4 key=admin",
    "fe80::1%eth0 client=1.2.3.4",
    "1.2.3.4 ",
    "[::1",
    "a.example",
    "1.2.3.4:70000",
    "1.2.3.4:x",
]


@pytest.mark.parametrize("header", FORGED)
def test_client_is_logged_as_an_address_only(
    server: Served, caplog: pytest.LogCaptureFixture, header: str
) -> None:
    server.ask(
        "/v1/models", headers={**KEY, "X-Forwarded-For": header}
    )  # the outer server trusts this machine
    [found] = access(caplog)
    assert found.client in ("", "1.2.3.4", "[fe80::1]")
    assert str(found).count("client=") == 1


@pytest.mark.parametrize(
    ("client", "text"),
    [
        (None, ""),
        (("", 0), ""),
        (("testclient", 5), ""),
        (("10.0.0.1", 80), "10.0.0.1:80"),
        (("10.0.0.1", 0), "10.0.0.1"),
        (("10.0.0.1", None), "10.0.0.1"),
        (("10.0.0.1", -5), "10.0.0.1"),
        (("::1", 80), "[::1]:80"),
        (("0:0::1", 0), "[::1]"),
        (("fe80::1%a b=c", 80), "[fe80::1]:80"),
    ],
)
def test_client_has_one_form(client: Any, text: str) -> None:
    assert client_of({"client": client}) == text


def test_unknown_path_is_logged_in_printable_ascii() -> None:
    path = "/a\x85b c\u2028\x1b[0m"
    assert unknown_path_of({"raw_path": path.encode()}) == "/a%C2%85b%20c%E2%80%A8%1B[0m"
    assert len(unknown_path_of({"raw_path": b"\x85" * 1000})) == 128
    assert unknown_path_of({}) == ""


def test_disconnected_request_is_logged_with_its_tokens(
    server: Served, engine: penstock.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    body = post(PATH, {"prompt": [1, 2, 3], "max_tokens": 500, "ignore_eos": True})
    with held(engine):
        with server.send(body.replace(b"\r\nHost:", b"\r\nX-Api-Key: secret\r\nHost:")):
            wait_until(lambda: engine.stats().running == 2)
        [found] = access(caplog)
    assert (found.status, found.bytes, found.prompt_tokens, found.completion_tokens) == (499, 0, 3, 0)


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics", "/version"])
def test_probe_is_logged_for_debugging_only(
    server: Served, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    with caplog.at_level(logging.DEBUG, ACCESS):
        server.ask(path, headers=KEY)
        access(caplog)  # a request is logged after its response
    server.ask(path, headers=KEY)
    server.ask("/v1/models", headers=KEY)
    assert [found.path for found in access(caplog, 2)] == [path, "/v1/models"]


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("kind", ["text", "json"])
def test_every_record_of_a_request_has_its_id(
    tiny_model: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    application = penstock.server.app(make_engine(tiny_model))
    engine = application.state.models["default"].engine
    with engine, configured(kind):
        engine._session.adopt(hooks.failing_engine(tiny_model, engine.config, TOKEN))
        body = {"prompt": [TOKEN], "max_tokens": 1, "unknown\nfield": 1}
        with serving(application, log_config=None) as server:
            assert server.ask(PATH, body, headers={"X-Request-Id": "request-7"})[0] == 500
        logging.getLogger("penstock.server").warning("outside")
        lines = [line for line in capfd.readouterr().err.splitlines() if "penstock.server" in line]
    assert request_id.get() == ""
    if kind == "json":
        records = [json.loads(line) for line in lines]
        inside = [record["message"] for record in records if record.get("request_id") == "request-7"]
        access = next(record for record in records if record["logger"] == ACCESS)
        assert access["status"] == 500
        assert datetime.fromisoformat(access["time"]).tzinfo is not None
    else:
        inside = [line for line in lines if "[request-7]: " in line]
    assert len(inside) == len(lines) - 1
    for part in ("is unknown and ignored", "request failed", "POST /v1/completions"):
        assert any(part in message for message in inside), part


@pytest.mark.parametrize("kind", ["text", "json"])
def test_exception_is_in_its_record(capfd: pytest.CaptureFixture[str], kind: str) -> None:
    with configured(kind):
        logging.getLogger("other").error("failed", exc_info=ValueError("broken\n\ud800"))
    text = capfd.readouterr().err
    assert "ValueError: broken" in text
    if kind == "json":
        assert json.loads(text)["message"] == "failed"


def test_level_and_access_are_options(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger(ACCESS)
    with configured("text"):
        logger.debug("hidden")
        logger.info("first")
        configure_logging("debug", "text", has_access=False)
        logger.info("hidden")
        logging.getLogger("penstock.server").debug("second")
        logger.setLevel(logging.NOTSET)
    text = capfd.readouterr().err
    assert [word in text for word in ("hidden", "first", "second")] == [False, True, True]


@pytest.mark.needs("signals")
def test_process_logs_json_lines(tiny_model: Path) -> None:
    with started(tiny_model, "--log-format", "json", "--api-key", "secret") as server:
        assert server.ask(PATH, {"prompt": "Hidden", "max_tokens": 1}, headers=KEY)[0] == 200
        assert server.ask("/none", headers={**KEY, "X-Request-Id": "mine"})[0] == 404
        server.process.send_signal(signal.SIGTERM)
        log = server.log()
    records: list[dict[str, Any]] = [json.loads(line) for line in log.splitlines()]
    assert {record["level"] for record in records} == {"INFO"}
    assert "uvicorn.error" in {record["logger"] for record in records}
    requests = [record for record in records if record["logger"] == ACCESS]
    assert [(found["path"], found["status"]) for found in requests] == [(PATH, 200), ("/none", 404)]
    assert requests[1]["request_id"] == "mine"
    assert not re.search(rb"Hidden|secret", log)


@pytest.mark.needs("signals")
@pytest.mark.parametrize(
    ("proxies", "client"),
    [
        (None, "127.0.0.1:"),
        ("10.0.0.0/8", "127.0.0.1:"),
        ("10.0.0.0/8, 127.0.0.1", "9.9.9.9"),
        ("*", "8.8.8.8"),
    ],
)
def test_process_knows_clients_of_its_proxies_only(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, proxies: str | None, client: str
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # of uvicorn
    options = () if proxies is None else ("--forwarded-allow-ips", proxies)
    with started(tiny_model, "--log-format", "json", *options) as server:
        headers = {"X-Forwarded-For": "8.8.8.8, 9.9.9.9, 10.1.2.3"}
        server.ask("/v1/models", headers=headers)
        server.process.send_signal(signal.SIGTERM)
        log = server.log()
    [found] = [line for line in map(json.loads, log.splitlines()) if line["logger"] == ACCESS]
    assert found["client"].startswith(client)


@pytest.mark.parametrize("proxies", ["", "localhost", "10.0.0.1/8", "10.0.0.1,*", "1.2.3.4,"])
def test_names_of_proxies_are_no_addresses(proxies: str) -> None:
    with pytest.raises(penstock.ConfigError, match="forwarded_allow_ips="):
        penstock.server.ServerSettings(forwarded_allow_ips=proxies)


@pytest.mark.needs("signals")
def test_process_logs_no_requests_on_demand(tiny_model: Path) -> None:
    with started(tiny_model, "--no-access-log") as server:
        assert server.ask("/v1/models")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        log = server.log()
    assert b"draining" in log
    assert b"/v1/models" not in log
