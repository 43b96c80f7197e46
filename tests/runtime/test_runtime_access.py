"""Access to the runtime: tokens, clients of this machine, and the engine's key."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest
from openapi_spec_validator import validate
from starlette.requests import Request

from penstock.runtime import RuntimeSettings
from penstock.runtime.access import Access
from penstock.runtime.errors import ApiError
from support.runtime.runtime import Answer, FakeEngine, runtime_of

LOAD = "/v1/lora_adapter/load"
ENGINE_LOAD = "/v1/load_lora_adapter"
BODY = {"lora_name": "a", "lora_path": "org/repo"}
TOKEN = {"Authorization": "Bearer secret"}


def request_from(client: str | None, **headers: str) -> Request:
    """A request of a client at this address."""
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    address = None if client is None else (client, 1)
    return Request({"type": "http", "method": "POST", "headers": pairs, "client": address})


LEVELS = ("open", "read", "change", "engines")


def is_allowed(settings: RuntimeSettings, level: Any, client: str | None, **headers: str) -> bool:
    """Whether a request of this client is allowed."""
    try:
        Access(settings).check(request_from(client, **{"host": "localhost", **headers}), level)
    except ApiError as error:
        return error.status not in (401, 403)
    return True


@pytest.mark.parametrize("client", ["127.0.0.1", "::1"])
def test_clients_of_this_machine_may_change_without_tokens(client: str) -> None:
    for host in ("localhost", "LOCALHOST:8080", "localhost.", "127.0.0.1:8080", "[::1]:8080", "127.0.0.2"):
        found = {level: is_allowed(RuntimeSettings(), level, client, host=host) for level in LEVELS}
        assert found == {"open": True, "read": True, "change": True, "engines": False}


@pytest.mark.parametrize(
    "client",
    ["10.0.0.1", "2001:db8::1", "::ffff:10.0.0.1", None, "localhost", "", "127.0.0.6", "127.9.9.9"],
)
def test_other_clients_may_read_only_without_tokens(client: str | None) -> None:
    found = {level: is_allowed(RuntimeSettings(), level, client) for level in LEVELS}
    assert found == {"open": True, "read": True, "change": False, "engines": False}


@pytest.mark.parametrize("client", ["127.0.0.1", "10.0.0.1"])
def test_engines_always_need_a_token(client: str) -> None:
    assert is_allowed(RuntimeSettings(tokens=("secret",)), "engines", client, authorization="Bearer secret")
    assert not is_allowed(RuntimeSettings(tokens=("secret",)), "engines", client)
    assert not is_allowed(RuntimeSettings(open_changes=True), "engines", client)
    with runtime_of(FakeEngine(), open_changes=True) as runtime:
        body = {"model_name": "m", "artifact_url": "org/name"}
        for path, sent in (("/v1/runtime/models/activate", body), ("/v1/runtime/snapshot", None)):
            status, error, _ = runtime.ask(path, sent)
            assert (status, error["type"]) == (403, "PermissionError")
            assert "start it with --token-file or PENSTOCK_RUNTIME_TOKEN" in error["message"]


def test_open_changes_do_not_open_the_lifecycle() -> None:
    settings = RuntimeSettings(open_changes=True)
    assert is_allowed(settings, "change", "10.0.0.1")
    assert not is_allowed(settings, "engines", "10.0.0.1")


@pytest.mark.parametrize(
    "headers",
    [
        {"x_forwarded_for": "127.0.0.1"},
        {"x_forwarded_host": "localhost"},
        {"X_Forwarded_Proto": "http"},
        {"forwarded": "for=127.0.0.1"},
        {"via": "1.1 proxy"},
        {"x_real_ip": "127.0.0.1"},
        {"x_client_ip": "127.0.0.1"},
        {"x_envoy_expected_rq_timeout_ms": "15000"},
        {"cf_connecting_ip": "127.0.0.1"},
        {"true_client_ip": "127.0.0.1"},
        {"x_original_forwarded_for": "127.0.0.1"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ],
)
def test_proxies_and_web_pages_of_this_machine_are_not_local(headers: dict[str, str]) -> None:
    assert not is_allowed(RuntimeSettings(), "change", "127.0.0.1", **headers)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "10.1.2.3:8080",
        "[2001:db8::1]",
        "169.254.169.254",
        "localhost.evil.example",
        "",
        "x.localhost",
    ],
)
def test_other_name_of_this_machine_is_refused(host: str) -> None:
    access = Access(RuntimeSettings())
    with pytest.raises(ApiError, match="Host or Origin"):
        access.check(request_from("127.0.0.1", host=host), "change")
    with pytest.raises(ApiError, match="Host or Origin"):
        access.check(request_from("127.0.0.1"), "change")


def test_client_of_a_proxy_on_this_machine_changes_nothing() -> None:
    engine = FakeEngine()
    engine.answer(ENGINE_LOAD, Answer())
    with runtime_of(engine) as runtime:
        for headers in ({"Via": "1.1 proxy"}, {"Host": "10.1.2.3:8080"}, {"X-Envoy-Attempt-Count": "1"}):
            assert runtime.ask(LOAD, BODY, headers=headers)[0] == 403
        connection = http.client.HTTPConnection(
            "127.0.0.1", runtime.port, timeout=60, source_address=("127.0.0.6", 0)
        )
        connection.request("POST", LOAD, json.dumps(BODY), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 403
        connection.close()
        assert engine.calls == []
        assert runtime.ask(LOAD, BODY)[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/model/list", LOAD, "/unknown", "//v1/models"])
def test_with_tokens_all_but_probes_need_one(path: str) -> None:
    engine = FakeEngine()
    body = BODY if path == LOAD else None
    with runtime_of(engine, tokens=("secret", "other")) as runtime:
        for headers in (
            {},
            {"Authorization": "Bearer secre"},
            {"Authorization": "Basic secret"},
            {"X-API-Key": ""},
        ):
            status, found, sent = runtime.ask(path, body, headers=headers)
            assert (status, found["type"], sent["www-authenticate"]) == (401, "AuthenticationError", "Bearer")
        for headers in (TOKEN, {"X-API-Key": "other"}):
            assert runtime.ask(path, body, headers=headers)[0] != 401
        for probe in ("/healthz", "/ready", "/metrics"):
            assert runtime.ask(probe)[0] == 200


def engine_header(headers: dict[str, str], **settings: Any) -> str | None:
    """The key of the engine's call for a load with these headers."""
    engine = FakeEngine()
    engine.answer(ENGINE_LOAD, Answer())
    with runtime_of(engine, **settings) as runtime:
        assert runtime.ask(LOAD, BODY, headers=headers)[0] == 200
    return engine.calls[0].headers.get("authorization")


def test_key_of_the_engine_replaces_a_token_of_the_runtime() -> None:
    both = {"tokens": ("secret",), "engine_key": "key"}
    assert engine_header(TOKEN, **both) == "Bearer key"
    assert engine_header({"X-API-Key": "secret"}, **both) == "Bearer key"
    assert engine_header({"X-API-Key": "secret", "Authorization": "Bearer mine"}, **both) == "Bearer mine"
    assert engine_header(TOKEN, tokens=("secret",)) is None
    assert engine_header({}, engine_key="key") == "Bearer key"


def test_key_of_the_engine_is_not_used_for_other_readers() -> None:
    engine = FakeEngine()
    engine.answer("/v1/models", Answer(body=b"{}"))
    with runtime_of(engine, engine_key="key") as runtime:
        for headers in ({"X-Forwarded-For": "10.0.0.1"}, {}, TOKEN):
            assert runtime.ask("/v1/models", headers=headers)[0] == 200
    found = [call.headers.get("authorization") for call in engine.calls]
    assert found == [None, "Bearer key", "Bearer secret"]


def test_key_of_the_engine_does_not_follow_a_redirect() -> None:
    engine, stranger = FakeEngine(), FakeEngine()
    from support.server.serving import serving

    with serving(stranger) as other:
        engine.answer(ENGINE_LOAD, Answer(307, headers={"location": f"{other.url}/x"}))
        with runtime_of(engine, engine_key="key") as runtime:
            assert runtime.ask(LOAD, BODY)[0] == 502
    assert stranger.calls == []


def test_wrong_methods_and_paths_have_typed_errors() -> None:
    with runtime_of(FakeEngine()) as runtime:
        status, body, headers = runtime.ask("/healthz", {}, method="DELETE")
        assert (status, body["type"], headers["allow"]) == (
            405,
            "MethodNotAllowedError",
            "GET, HEAD, OPTIONS",
        )
        assert runtime.ask("/healthz", method="OPTIONS")[0] == 204
        with runtime.send(b"HEAD /healthz HTTP/1.0\r\n\r\n") as connection:
            assert connection.makefile("rb").read().startswith(b"HTTP/1.1 200 OK\r\n")
        status, body, _ = runtime.ask("/docs")
        assert (status, body["type"], body["detail"]) == (404, "NotFoundError", "Not Found")


def test_routes_are_described_on_request() -> None:
    with runtime_of(FakeEngine(), enable_fastapi_docs=True) as runtime:
        status, document, _ = runtime.ask("/openapi.json")
        assert status == 200
        validate(document)
        assert {"/healthz", "/v1/lora_adapter/load", "/v1/runtime/models/wake"} <= document["paths"].keys()
        download = document["paths"]["/v1/model/download"]
        required = {found["name"]: found["required"] for found in download["delete"]["parameters"]}
        assert required == {"model_name": True, "local_dir": False}
        assert "requestBody" in download["post"]
        assert b"/v1/lora_adapter/load" in runtime.ask("/docs")[1]
    with runtime_of(FakeEngine()) as runtime:
        assert [runtime.ask(path)[0] for path in ("/openapi.json", "/docs")] == [404, 404]


def test_request_id_is_echoed_unless_it_is_malformed() -> None:
    with runtime_of(FakeEngine()) as runtime:
        assert runtime.ask("/healthz", headers={"X-Request-Id": "abc-1"})[2]["x-request-id"] == "abc-1"
        assert len(runtime.ask("/healthz", headers={"X-Request-Id": "a b"})[2]["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/model/list", {str(number): "a" for number in range(100)}, 431),
        ("/healthz", {str(number): "a" for number in range(100)}, 431),
        ("/v1/model/list?local_dir=" + "a" * 4096, {}, 414),
        ("/v1/model/list?" + "a=1&" * 64, {}, 414),
    ],
)
def test_head_has_limits_by_number(path: str, headers: dict[str, str], status: int) -> None:
    with runtime_of(FakeEngine(), tokens=("secret",)) as runtime:
        found, answer, _ = runtime.ask(path, headers=headers)
        assert (found, answer["type"]) == (status, "HeadTooLargeError")
