"""The server against hostile and careless clients: keys, sizes, malformed bodies, overload, mounting."""

from __future__ import annotations

import gc
import http.client
import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import penstock.server
from penstock.server.errors import ApiError
from support.api.engines import make_engine, wait_until
from support.server.serving import Served, at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
SHORT = {"prompt": "Hello", "max_tokens": 1}
LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
SETTINGS = penstock.server.ServerSettings(
    api_keys=("secret",), admin_api_keys=("boss",), max_body_bytes=100_000, max_header_bytes=8192
)
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_num_seqs=2, max_waiting=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    with serving(penstock.server.app({"tiny": engine}, SETTINGS)) as server:
        yield server


@pytest.fixture(scope="module")
def narrow_server(tiny_model: Path) -> Iterator[tuple[penstock.Engine, Served]]:
    """An engine that computes one request at a time, and its server."""
    with make_engine(tiny_model, max_num_seqs=1) as engine, serving(penstock.server.app(engine)) as server:
        yield engine, server


@pytest.fixture(scope="module", params=["h11", "httptools"])
def open_server(engine: penstock.Engine, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server without keys, with each HTTP parser."""
    settings = penstock.server.ServerSettings(max_body_bytes=100_000, max_header_bytes=8192)
    with serving(penstock.server.app({"tiny": engine}, settings), http=request.param) as server:
        yield server


# ---- keys


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer secre"},
        {"Authorization": "Bearer secret2"},
        {"Authorization": "Basic secret"},
        {"Authorization": "secret"},
        {"X-Api-Key": "no"},
    ],
)
def test_wrong_key_is_status_401(server: Served, headers: dict[str, str]) -> None:
    status, answer, found = server.ask(PATH, SHORT, headers=headers)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert found["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("headers", [KEY, {"X-Api-Key": "secret"}, {"Authorization": "bearer boss"}])
def test_right_key_is_accepted(server: Served, headers: dict[str, str]) -> None:
    assert server.ask(PATH, SHORT, headers=headers)[0] == 200


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1/models//", "/V1/models", "/health/../v1/models", "/x", "/docs"],
)
def test_variant_of_a_path_without_key_is_status_401(server: Served, path: str) -> None:
    for headers in ({}, {"Host": "/health"}):
        assert server.ask(path, headers=headers)[0] == 401
    assert server.ask(path, headers=KEY)[0] == 404
    assert server.ask("/v1%2Fmodels")[0] == 401


def test_health_needs_no_key(server: Served) -> None:
    status, answer, _ = server.ask("/health")
    assert (status, answer["status"], answer["models"]["tiny"]["status"]) == (200, "ok", "ok")
    assert server.ask("/ping")[0] == 200


@pytest.mark.parametrize(
    "keys", ["secret", ["secret"], ("",), ("a b",), ("schl\u00fcssel",), ("a\n",), (None,)]
)
def test_key_that_no_request_can_have_is_refused(keys: object) -> None:
    for name in ("api_keys", "admin_api_keys"):
        with pytest.raises(penstock.ConfigError, match=name) as caught:
            penstock.server.ServerSettings(**{name: keys})  # type: ignore[arg-type]
        assert "secret" not in str(caught.value)


def test_key_has_a_bound_of_unfinished_outputs(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(api_keys=("a", "b"), max_outputs_per_key=1)
    with serving(penstock.server.app(engine, settings)) as server:
        body = json.dumps(SHORT)
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: a\r\nContent-Type: application/json\r\n"
        )
        with held(engine):
            running = server.send(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: server.application.state.calls.num_active == 1)
            status, answer, headers = server.ask(PATH, SHORT, headers={"X-Api-Key": "a"})
            assert (status, answer["error"]["code"], headers["retry-after"]) == (
                429,
                "too_many_requests",
                "1",
            )
            assert server.ask("/v1/models", headers={"X-Api-Key": "b"})[0] == 200
        assert b" 200 " in running.recv(1000)
        running.close()
        wait_until(lambda: server.application.state.calls.num_active == 0)
        assert server.ask(PATH, SHORT, headers={"X-Api-Key": "a"})[0] == 200


def test_requests_without_keys_share_one_bound(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(max_outputs_per_key=1)
    with serving(penstock.server.app(engine, settings)) as server, held(engine):
        with server.send(post(PATH, SHORT)):
            wait_until(lambda: server.application.state.calls.num_active == 1)
            assert server.ask(PATH, SHORT, headers={"X-Api-Key": "other"})[0] == 429
        wait_until(lambda: server.application.state.calls.num_active == 0)


def test_only_generating_requests_count(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(max_outputs_per_key=1)
    with serving(penstock.server.app(engine, settings)) as server, held(engine):
        state = server.application.state
        with server.send(post(PATH, SHORT)):
            wait_until(lambda: len(state.calls.generations) == 1)
            for path in ("/v1/models", "/version", "/metrics"):
                assert server.ask(path)[0] == 200
            assert server.ask("/tokenize", {"prompt": "a"})[0] == 200
            assert server.ask("/detokenize", {"tokens": [1]})[0] == 200
            count = {"messages": [{"role": "user", "content": "a"}]}
            assert server.ask("/v1/messages/count_tokens", count)[0] == 200
            assert server.ask(PATH, SHORT)[0] == 429
            assert server.ask("/abort", {"request_id": list(state.calls.generations)})[1] == {"aborted": 1}
            state.calls.is_draining = True
            assert server.ask("/v1/models")[0] == 200
            assert server.ask(PATH, SHORT)[0] == 503
        wait_until(lambda: state.calls.num_active == 0)


def test_refusal_in_a_drain_ends_the_connection_once(engine: penstock.Engine) -> None:
    application = penstock.server.app(engine)
    application.state.calls.is_draining = True
    with serving(application) as server, server.send(post(PATH, SHORT)) as connection:
        received = connection.recv(1 << 16).lower()
    assert received.startswith(b"http/1.1 503 ")
    assert received.count(b"connection: close\r\n") == 1


# ---- malformed requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"a":' * 15_000,
        b"[" * 90_000,
        b'{"prompt": "a", "max_tokens": 1} x',
    ],
    ids=["empty", "short", "list", "null", "bytes", "utf8", "surrogate", "deep", "deep-list", "rest"],
)
def test_malformed_body_is_status_400(open_server: Served, body: bytes) -> None:
    status, answer, _ = open_server.ask(PATH, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert open_server.ask(PATH, SHORT)[0] == 200


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (PATH, {"prompt": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
@pytest.mark.parametrize("field", ["prediction", "unknown", "stop"])
def test_decoded_fields_are_not_kept_while_a_request_waits(
    narrow_server: tuple[penstock.Engine, Served], path: str, prompt: dict[str, Any], field: str
) -> None:
    engine, server = narrow_server
    body = post(path, {**prompt, "max_tokens": 1, "stream": True, field: ["mark"]})
    with held(engine), server.send(body):
        wait_until(lambda: engine.stats().waiting == 1)
        gc.collect()
        assert [found for found in gc.get_objects() if type(found) is list and found == ["mark"]] == []


@pytest.mark.parametrize("number", [b"NaN", b"1e999", b"-Infinity", b'"hot"', b"3", b"[0]"])
def test_number_out_of_range_is_status_400_with_its_name(open_server: Served, number: bytes) -> None:
    for path, prompt in ((PATH, b'"prompt":"a"'), ("/v1/chat/completions", b'"messages":[{"role":"user"}]')):
        status, answer, _ = open_server.ask(path, b'{"temperature":' + number + b"," + prompt + b"}")
        assert (status, answer["error"]["param"]) == (400, "temperature"), answer


def test_schema_nested_deeply_is_status_400(open_server: Served) -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    body = {**SHORT, "structured_outputs": {"json": schema}}
    assert open_server.ask(PATH, body)[0] == 400
    assert open_server.ask(PATH, SHORT)[0] == 200


def test_body_beyond_the_limit_is_status_413(open_server: Served) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    announced = open_server.send(f"{head}Content-Length: 1073741824\r\n\r\n".encode())
    assert b" 413 " in announced.recv(1000)
    announced.close()
    chunked = open_server.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    for _ in range(3):
        chunked.sendall(b"c350\r\n" + b" " * 50_000 + b"\r\n")
    assert b" 413 " in chunked.recv(1000)
    chunked.close()


def test_headers_beyond_the_limit_are_refused(open_server: Served) -> None:
    status, answer, _ = open_server.ask("/v1/models", headers={"X-Long": "a" * 9000})
    assert (status, answer["error"]["type"]) == (431, "invalid_request_error")


def head(num_headers: int = 1, query: str = "") -> bytes:
    """A request with this number of headers."""
    lines = (f"GET /ping?{query} HTTP/1.1", "Host: localhost", *["a: b"] * (num_headers - 1))
    return "\r\n".join((*lines, "", "")).encode()


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (head(num_headers=100), 200),
        (head(num_headers=101), 431),
        (head(query="a" * 4096), 200),
        (head(query="a" * 4097), 414),
        (head(query="a=1&" * 63), 200),
        (head(query="a=1&" * 64), 414),
    ],
    ids=["headers", "too-many-headers", "query", "too-long-query", "fields", "too-many-fields"],
)
def test_head_has_limits_by_number(open_server: Served, request_head: bytes, status: int) -> None:
    with open_server.send(request_head) as connection:
        assert connection.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


class Counted(list[tuple[bytes, bytes]]):
    """Headers that count how often they are looked through."""

    num_reads = 0

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        self.num_reads += 1
        return super().__iter__()


@pytest.mark.parametrize("mount", ["", "/mounted"])
def test_headers_beyond_the_limit_are_not_looked_at(engine: penstock.Engine, mount: str) -> None:
    settings = penstock.server.ServerSettings(cors_origins=("http://a",), api_keys=("secret",))
    application: Any = penstock.server.app(engine, settings)
    if mount:
        application = Starlette(routes=[Mount(mount, application)])
    headers = Counted([(b"a", b"b")] * 101)
    scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": headers}
    scope |= {"path": f"{mount}/v1/completions", "query_string": b"", "http_version": "1.1"}
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    anyio.run(application, scope, receive, send)
    assert (sent[0]["status"], headers.num_reads) == (431, 0)
    assert b"the request has too many headers: the limit is 100" in sent[1]["body"]


def test_body_that_does_not_arrive_is_status_408(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(receive_timeout=0.1)
    with (
        serving(penstock.server.app(engine, settings)) as server,
        server.send(post(PATH, b"{", length=100)) as connection,
    ):
        assert b" 408 " in connection.recv(1000)


def test_other_content_type_is_status_415(open_server: Served) -> None:
    status, _, _ = open_server.ask(PATH, SHORT, headers={"Content-Type": "text/plain"})
    assert status == 415


@pytest.mark.parametrize(
    ("path", "methods", "allowed"),
    [
        (PATH, ("GET", "PUT", "DELETE", "PATCH"), "OPTIONS, POST"),
        ("/v1/models", ("POST", "PUT", "DELETE", "PATCH"), "GET, HEAD, OPTIONS"),
        ("/health", ("POST", "DELETE"), "GET, HEAD, OPTIONS"),
    ],
)
def test_other_method_is_status_405_with_the_allowed_ones(
    open_server: Served, path: str, methods: tuple[str, ...], allowed: str
) -> None:
    for method in methods:
        status, _, headers = open_server.ask(path, method=method)
        assert (status, headers["allow"]) == (405, allowed)
    status, text, headers = open_server.ask(path, method="OPTIONS")
    assert (status, text, headers["allow"]) == (204, b"", allowed)
    assert "content-length" not in headers


def test_head_is_the_head_of_get(open_server: Served) -> None:
    for path in ("/v1/models", "/health", "/version"):
        status, answer, found = open_server.ask(path)
        connection = http.client.HTTPConnection("127.0.0.1", open_server.port)
        connection.request("HEAD", path)
        response = connection.getresponse()
        assert (response.status, response.read()) == (status, b"")
        assert response.getheader("content-length") == found["content-length"]
        connection.request("GET", path)  # on the same connection
        assert json.loads(connection.getresponse().read()) == answer
        connection.close()


def test_other_method_without_key_is_status_401(server: Served) -> None:
    for method in ("PUT", "OPTIONS", "DELETE"):
        assert server.ask("/v1/models", method=method)[0] == 401
    assert server.ask("/health", method="OPTIONS")[0] == 204


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/none", KEY, b"404"),
        ("/v1/models", KEY, b"405"),
        (PATH, {}, b"401"),
        ("/sleep", KEY, b"401"),
        (PATH, {**KEY, "Content-Type": "text/plain"}, b"415"),
    ],
)
def test_error_with_an_unread_body_closes_the_connection(
    server: Served, path: str, headers: dict[str, str], status: bytes
) -> None:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *(f"{name}: {headers[name]}" for name in headers)]
    for length in ("Content-Length: 1000", "Transfer-Encoding: chunked"):
        head = "\r\n".join((*lines, length, "", "")).encode()
        with server.send(head) as connection:
            received = b""
            while data := connection.recv(1000):
                received += data
        assert received.split()[1] == status
        assert b"connection: close" in received


def test_error_with_a_read_body_keeps_the_connection(server: Served) -> None:
    bad, good = post(PATH, {**SHORT, "model": "none"}), post(PATH, SHORT)
    key = b"\r\nX-Api-Key: secret\r\nHost:"
    with server.send(bad.replace(b"\r\nHost:", key)) as connection:
        received = connection.recv(10_000)
        assert b" 404 " in received
        assert b"connection: close" not in received
        connection.sendall(good.replace(b"\r\nHost:", key))
        assert b" 200 " in connection.recv(1000)


def test_connection_closed_without_a_request_leaves_nothing(open_server: Served) -> None:
    for data in (b"", b"POST /v1", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n"):
        open_server.send(data).close()
    assert open_server.ask(PATH, SHORT)[0] == 200
    wait_until(lambda: open_server.application.state.calls.num_active == 0)


def test_garbage_is_status_400(open_server: Served) -> None:
    with open_server.send(b"\x16\x03\x01 garbage\r\n\r\n") as connection:
        assert b" 400 " in connection.recv(1000)


def test_unknown_field_is_ignored_with_one_warning(
    open_server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    field = f"future_{open_server.port}"
    with caplog.at_level(logging.WARNING, logger="penstock.server"):
        for _ in range(3):
            assert open_server.ask(PATH, {**SHORT, field: 1, "user": "me"})[0] == 200
    assert [field in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.needs("memory_limit")
def test_template_in_a_request_is_refused_by_default(open_server: Served, engine: penstock.Engine) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}", "max_tokens": 1}
    status, answer, _ = open_server.ask("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "chat_template")
    settings = penstock.server.ServerSettings(request_templates=True)
    with serving(penstock.server.app(engine, settings)) as server:
        assert server.ask("/v1/chat/completions", body)[0] == 200


# ---- responses


def test_request_id_is_returned_if_it_is_a_label(open_server: Served) -> None:
    assert open_server.ask("/health", headers={"X-Request-Id": "a-1"})[2]["x-request-id"] == "a-1"
    for label in ("a b", "a" * 129, ""):
        assert open_server.ask("/health", headers={"X-Request-Id": label})[2]["x-request-id"] != label


def test_error_has_no_path_and_no_address() -> None:
    body = ApiError(500, "cannot read /home/me/model.bin at 0x7fe9395b4490").body()
    assert body["error"]["message"] == "cannot read ... at ..."
    route = "left out: it is for /v1/completions"
    assert ApiError(400, route).body()["error"]["message"] == route


def test_full_engine_is_status_429(open_server: Served, engine: penstock.Engine) -> None:
    with held(engine):
        running = open_server.send(post(PATH, LONG))
        wait_until(lambda: engine.stats().running == 2)
        waiting = open_server.send(post(PATH, LONG))
        wait_until(lambda: engine.stats().waiting == 1)
        status, answer, headers = open_server.ask(PATH, SHORT)
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "overloaded", "1")
        running.close()
        waiting.close()
    wait_until(lambda: at_rest(engine))
    assert open_server.ask(PATH, SHORT)[0] == 200


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"best_of": 2}])
def test_batch_can_be_larger_than_the_queue(open_server: Served, fields: dict[str, Any]) -> None:
    body = {"max_tokens": 2, "seed": 1, **fields}
    prompts = [[number] for number in range(30)]
    status, answer, _ = open_server.ask(PATH, {**body, "prompt": prompts})
    assert status == 200
    texts = [choice["text"] for choice in answer["choices"]]
    width = len(texts) // len(prompts)
    for number in (0, 17, 29):
        _, single, _ = open_server.ask(PATH, {**body, "prompt": prompts[number]})
        expected = [choice["text"] for choice in single["choices"]]
        assert texts[number * width : (number + 1) * width] == expected


def test_refused_prompt_of_a_batch_is_computed_later(open_server: Served, engine: penstock.Engine) -> None:
    with held(engine):
        running = open_server.send(post(PATH, LONG))
        wait_until(lambda: engine.stats().running == 2)
        num_rejected = engine.stats().requests_rejected
        batch = open_server.send(post(PATH, {**SHORT, "prompt": [[1], [2], [3]]}))
        wait_until(lambda: engine.stats().requests_rejected > num_rejected)
    received = batch.recv(1 << 16)
    assert b" 200 " in received.partition(b"\r\n")[0]
    assert received.count(b'"finish_reason":"length"') == 3
    batch.close()
    running.close()
    wait_until(lambda: at_rest(engine))


def test_batch_for_a_full_engine_is_status_429(open_server: Served, engine: penstock.Engine) -> None:
    with held(engine):
        running = open_server.send(post(PATH, LONG))
        wait_until(lambda: engine.stats().running == 2)
        waiting = open_server.send(post(PATH, LONG))
        wait_until(lambda: engine.stats().waiting == 1)
        assert open_server.ask(PATH, {**SHORT, "prompt": [[1], [2], [3]]})[0] == 429
        running.close()
        waiting.close()
    wait_until(lambda: at_rest(engine))


def test_engine_that_is_not_open_is_status_503(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    with serving(penstock.server.app({"tiny": engine})) as server:
        status, answer, headers = server.ask(PATH, SHORT)
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "unavailable", "5")
        assert server.ask("/health")[0] == 503
        with engine:
            assert server.ask(PATH, SHORT)[0] == 200
            assert server.ask("/health")[0] == 200
        assert server.ask(PATH, SHORT)[0] == 503


def test_idle_stream_has_comments(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(keep_alive_interval=0.02)
    with serving(penstock.server.app(engine, settings)) as server:
        received = b""
        with held(engine):
            connection = server.send(post(PATH, {**SHORT, "stream": True}))
            while b": keep-alive\n\n" not in received:
                received += connection.recv(1000)
        while b"[DONE]" not in received:
            received += connection.recv(1000)
        connection.close()


# ---- several models, mounting


def test_models_are_chosen_by_name(tiny_model: Path) -> None:
    with (
        make_engine(tiny_model) as first,
        make_engine(tiny_model, max_model_len=64) as second,
        serving(penstock.server.app({"a": first, "alias": first, "b": second})) as server,
    ):
        rows = server.ask("/v1/models")[1]["data"]
        assert [(row["id"], row["root"], row["max_model_len"]) for row in rows] == [
            ("a", "a", 512),
            ("alias", "a", 512),
            ("b", "b", 64),
        ]
        assert server.ask(PATH, {**SHORT, "model": "alias"})[1]["model"] == "alias"
        assert server.ask(PATH, {**SHORT, "model": "b", "prompt": "a" * 100})[0] == 400
        assert server.ask("/v1/models/b")[1] == rows[2]
        assert server.ask("/v1/models/c")[0] == 404
        status, answer, _ = server.ask(PATH, {**SHORT, "model": "c"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert server.ask(PATH, SHORT)[1]["error"]["param"] == "model"


def test_application_is_mounted_in_another(engine: penstock.Engine) -> None:
    outer = Starlette(routes=[Mount("/llm", penstock.server.app({"tiny": engine}, SETTINGS))])
    with serving(outer) as server:
        assert server.ask(f"/llm{PATH}", SHORT, headers=KEY)[0] == 200
        assert server.ask(f"/llm{PATH}", SHORT)[0] == 401
        assert server.ask("/llm/health")[0] == 200
        assert server.ask(PATH, SHORT, headers=KEY)[0] == 404


@pytest.mark.parametrize(
    "code",
    ["import penstock.server; penstock.server.app", "from penstock.cli import main; main(['serve', 'x'])"],
)
def test_missing_extra_is_named(code: str) -> None:
    setup = "import sys; sys.modules |= dict.fromkeys(['starlette', 'uvicorn', 'msgspec']); "
    result = subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert 'the extra "server" of penstock-llm' in result.stderr


def test_importing_penstock_imports_no_part_of_the_server() -> None:
    code = "import sys, penstock.cli; print(*{'starlette', 'uvicorn', 'msgspec'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""
