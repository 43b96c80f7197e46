"""Requests that web pages make a browser send: other hosts, other origins, CORS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from support.api.engines import make_engine
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
SHORT = {"prompt": "Hello", "max_tokens": 1}
SITE = "https://chat.example"


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


def status_of(engine: penstock.Engine, headers: dict[str, str], **settings: Any) -> int:
    """The status of a completion with these headers."""
    application = penstock.server.app(engine, penstock.server.ServerSettings(**settings))
    with serving(application) as server:
        return server.ask(PATH, SHORT, headers=headers)[0]


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(allowed_hosts=("Llm.Local",), cors_origins=(SITE,))
    with serving(penstock.server.app(engine, settings)) as server:
        yield server


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "LOCALHOST:8000",
            "127.0.0.1",
            "127.0.0.1:80",
            "[::1]:8000",
            "192.168.0.7",
            "10.1.2.3:1",
        ),
        *("a.localhost", "llm.local", "llm.local.:80", "localhost."),
    ],
)
def test_own_name_or_address_is_accepted(server: Served, host: str) -> None:
    assert server.ask(PATH, SHORT, headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[x",
        "",
        "x/127.0.0.1",
    ],
)
@pytest.mark.parametrize("path", [PATH, "/health", "/none"])
def test_other_name_is_status_403_without_keys(server: Served, host: str, path: str) -> None:
    body = SHORT if path == PATH else None
    status, answer, _ = server.ask(path, body, headers={"Host": host})
    assert (status, answer["error"]["code"]) == (403, "host_not_allowed")
    assert (
        "allowed_hosts; if it is yours, add it to allowed_hosts of ServerSettings, "
        "or start penstock serve with --allowed-host "
    ) in answer["error"]["message"]


def test_second_host_is_checked_too(server: Served) -> None:
    with server.send(b"GET /health HTTP/1.0\r\nHost: localhost\r\nHost: evil.example\r\n\r\n") as connection:
        assert connection.recv(1000).split()[1] in (b"400", b"403")  # the first one by some parsers


def test_request_without_host_is_accepted(server: Served) -> None:
    with server.send(b"GET /health HTTP/1.0\r\n\r\n") as connection:
        assert b" 200 " in connection.recv(1000)


def test_keys_or_a_star_allow_all_names(engine: penstock.Engine) -> None:
    headers = {"Host": "any.example", "X-Api-Key": "a"}
    assert status_of(engine, headers) == 403
    assert status_of(engine, headers, allowed_hosts=("*",)) == 200
    assert status_of(engine, headers, api_keys=("a",)) == 200
    assert status_of(engine, headers, api_keys=("a",), allowed_hosts=("other.example",)) == 403
    assert status_of(engine, headers, admin_api_keys=("a",)) == 403


def test_name_of_the_listening_socket_is_accepted(engine: penstock.Engine) -> None:
    application = penstock.server.app(engine)
    application.state.hosts.add("Machine.example")
    with serving(application) as server:
        for host, status in (("machine.example:80", 200), ("other.example", 403)):
            assert server.ask(PATH, SHORT, headers={"Host": host})[0] == status


def test_origin_of_another_site_is_status_403(server: Served) -> None:
    for origin in ("https://evil.example", "null", "http://localhost", f"{SITE}.evil.example", "localhost"):
        status, answer, headers = server.ask(PATH, SHORT, headers={"Origin": origin})
        assert (status, answer["error"]["code"]) == (403, "origin_not_allowed"), origin
        for name in ("cors_origins of ServerSettings", f"--cors-origin {origin}"):
            assert name in answer["error"]["message"]
        assert "access-control-allow-origin" not in headers


def test_own_origin_is_accepted(server: Served) -> None:
    headers = {"Origin": "http://llm.local:8000", "Host": "LLM.local:8000"}
    status, _, found = server.ask(PATH, SHORT, headers=headers)
    assert status == 200
    assert "access-control-allow-origin" not in found


def test_allowed_site_reads_answers_and_errors(server: Served) -> None:
    for body, expected in ((SHORT, 200), ({}, 400)):
        status, _, headers = server.ask(PATH, body, headers={"Origin": SITE})
        assert (status, headers["access-control-allow-origin"]) == (expected, SITE)
        exposed = headers["access-control-expose-headers"].split(", ")
        assert exposed == ["X-Request-Id", "Request-Id", "Retry-After"]
        assert headers["vary"] == "Origin"


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}


def test_preflight_of_an_allowed_site_needs_no_key(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(api_keys=("a",), cors_origins=(SITE,))
    with serving(penstock.server.app(engine, settings)) as server:
        status, _, headers = server.ask(PATH, method="OPTIONS", headers={**PREFLIGHT, "Origin": SITE})
        assert (status, headers["access-control-allow-origin"]) == (200, SITE)
        assert "POST" in headers["access-control-allow-methods"]
        assert "authorization" in headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in headers
        other = {**PREFLIGHT, "Origin": "https://evil.example"}
        status, _, headers = server.ask(PATH, method="OPTIONS", headers=other)
        assert (status, "access-control-allow-origin" in headers) == (400, False)


def test_preflight_without_the_setting_is_status_403(engine: penstock.Engine) -> None:
    with serving(penstock.server.app(engine)) as server:
        status, _, headers = server.ask(PATH, method="OPTIONS", headers={**PREFLIGHT, "Origin": SITE})
    assert (status, "access-control-allow-origin" in headers) == (403, False)


def test_star_allows_all_sites(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(cors_origins=("*",))
    with serving(penstock.server.app(engine, settings)) as server:
        status, _, headers = server.ask(PATH, SHORT, headers={"Origin": "https://any.example"})
    assert (status, headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize("name", ["allowed_hosts", "cors_origins"])
@pytest.mark.parametrize("value", ["a", ["a"], ("",), (1,)])
def test_setting_that_is_no_tuple_of_texts_is_refused(name: str, value: object) -> None:
    with pytest.raises(penstock.ConfigError, match=name):
        penstock.server.ServerSettings(**{name: value})  # type: ignore[arg-type]
