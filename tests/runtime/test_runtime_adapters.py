"""Adapters of the runtime by name or path, and the engine's list of models."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from penstock import ConfigError
from penstock.runtime import RuntimeSettings, handlers
from penstock.runtime.engine import EngineClient
from penstock.runtime.errors import ApiError
from support.api.engines import wait_until
from support.paths import DATA
from support.runtime.runtime import Answer, FakeEngine, Runtime, closed_port, running, runtime_of
from support.server.edge import read, read_until
from support.server.serving import post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWERS = DATA / "aibrix"
LOAD, UNLOAD = "/v1/lora_adapter/load", "/v1/lora_adapter/unload"
ENGINE_LOAD, ENGINE_UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "lora-2", "lora_path": "org/repo"}
#: A request of which the body is not complete.
UNFINISHED_LIST = post("/v1/model/list", b"{", length=60_000).replace(b"POST", b"GET", 1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A runtime with the default settings."""
    folder = tmp_path_factory.mktemp("adapters")
    with runtime_of(FakeEngine(), adapter_dir=str(folder)) as runtime:
        yield runtime


@pytest.fixture
def engine(shared: Runtime) -> FakeEngine:
    """The engine of `runtime`, without calls."""
    engine = shared.engine
    engine.calls.clear()
    engine.answers = {ENGINE_LOAD: [Answer(body=b"loaded")], ENGINE_UNLOAD: [Answer(body=b"unloaded")]}
    return engine


@pytest.fixture
def runtime(shared: Runtime, engine: FakeEngine) -> Runtime:
    """The shared runtime, of which the engine has no calls."""
    assert engine.calls == []
    return shared


def error_of(reply: tuple[int, Any, dict[str, str]]) -> tuple[int, str, str | None]:
    """The status, the type and the parameter of an error, which has the form of AIBrix's runtime."""
    status, body, _ = reply
    assert body["object"] == "error"
    assert body["code"] == status
    assert body["message"]
    return status, body["type"], body["param"]


# ---- health and models


def test_healthz_and_ready_answer_as_aibrix(runtime: Runtime) -> None:
    assert runtime.ask("/healthz")[:2] == (200, {"status": "ok"})
    assert runtime.ask("/ready")[:2] == (200, {"status": "ready"})


def test_ready_does_not_depend_on_the_engine_by_default() -> None:
    endpoint = f"http://127.0.0.1:{closed_port()}"
    with running(RuntimeSettings(engine_endpoint=endpoint)) as runtime:
        assert runtime.ask("/ready")[:2] == (200, {"status": "ready"})
    with running(RuntimeSettings(engine_endpoint=endpoint, ready_checks_engine=True)) as runtime:
        body = {"status": "not ready", "reason": "the engine does not answer"}
        assert runtime.ask("/ready")[:2] == (503, body)
    with running(RuntimeSettings(engine_endpoint=endpoint, strict_compat=True)) as runtime:
        assert runtime.ask("/ready")[:2] == (200, {"status": "ready"})
    with pytest.raises(ConfigError, match="ready_checks_engine"):
        RuntimeSettings(strict_compat=True, ready_checks_engine=True)


def test_ready_needs_the_name_and_address_of_the_engine() -> None:
    with running(RuntimeSettings(engine="", engine_endpoint="")) as runtime:
        assert runtime.ask("/ready")[:2] == (503, {"status": "not ready"})
        assert runtime.ask("/healthz")[0] == 200


def test_ready_with_the_check_asks_the_engine_for_its_health(engine: FakeEngine) -> None:
    engine.answer("/health", Answer(503), Answer(404), Answer(200))
    with runtime_of(engine, ready_checks_engine=True) as runtime:
        assert [runtime.ask("/ready")[0] for _ in range(3)] == [503, 503, 200]
    assert {call.path for call in engine.calls} == {"/health"}


def test_probes_at_the_same_time_share_one_request(engine: FakeEngine) -> None:
    engine.answer("/health", Answer(200))
    with runtime_of(engine, ready_checks_engine=True, scrape_timeout=20) as runtime:
        engine.may_answer.clear()
        answers: list[int] = []
        ask = lambda: answers.append(runtime.ask("/ready")[0])  # noqa: E731 - for the threads
        threads = [threading.Thread(target=ask) for _ in range(40)]
        for thread in threads:
            thread.start()
        wait_until(lambda: runtime.application.state.health.num_requests("engine") == 40)
        engine.may_answer.set()
        for thread in threads:
            thread.join()
    assert (answers, len(engine.calls)) == ([200] * 40, 1)


def test_models_of_the_document_are_returned_byte_for_byte(runtime: Runtime) -> None:
    text = (ANSWERS / "vllm_models.json").read_bytes()
    runtime.engine.answer("/v1/models", Answer(body=text))
    assert runtime.ask("/v1/models")[:2] == (200, json.loads(text))
    with runtime.send(b"GET /v1/models HTTP/1.0\r\n\r\n") as connection:
        assert connection.makefile("rb").read().endswith(b"\r\n\r\n" + text)


def test_owner_of_models_is_that_of_the_document_in_strict_mode(engine: FakeEngine) -> None:
    rows = [{"id": "a", "owned_by": "penstock"}, {"id": "b", "owned_by": "me"}]
    engine.answer("/v1/models", *[Answer(body=json.dumps({"data": rows}).encode()), Answer(body=b"[1]")] * 2)
    with runtime_of(engine) as runtime:
        assert runtime.ask("/v1/models")[1] == {"data": rows}
        assert runtime.ask("/v1/models")[1] == [1]
    with runtime_of(engine, strict_compat=True) as runtime:
        owners = [row["owned_by"] for row in runtime.ask("/v1/models")[1]["data"]]
        assert owners == ["vllm", "me"]
        assert runtime.ask("/v1/models")[1] == [1]


def test_models_of_a_stopped_engine_is_502() -> None:
    endpoint = f"http://127.0.0.1:{closed_port()}"
    with running(RuntimeSettings(engine_endpoint=endpoint)) as runtime:
        assert error_of(runtime.ask("/v1/models")) == (502, "ConnectionError", None)
    with running(RuntimeSettings(engine_endpoint=endpoint, strict_compat=True)) as runtime:
        reply = runtime.ask("/v1/models")
        assert error_of(reply) == (500, "ServerError", None)
        assert reply[1]["message"] == "Unexpected error listing models"


def test_models_of_a_hanging_engine_is_408(engine: FakeEngine) -> None:
    with runtime_of(engine, engine_timeout=0.05) as runtime:
        engine.may_answer.clear()
        assert error_of(runtime.ask("/v1/models")) == (408, "TimeoutError", None)


def test_models_of_an_engine_that_breaks_off_is_500(engine: FakeEngine) -> None:
    engine.answer("/v1/models", Answer(body=b"{}", headers={"content-length": "100"}))
    with runtime_of(engine) as runtime:
        assert error_of(runtime.ask("/v1/models")) == (500, "RequestError", None)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm", "llamacpp"])
def test_every_engine_has_a_list_of_models(engine: FakeEngine, kind: str) -> None:
    engine.answer("/v1/models", Answer(body=b'{"data": []}'))
    with runtime_of(engine, engine=kind) as runtime:
        assert runtime.ask("/v1/models")[:2] == (200, {"data": []})


# ---- loading


def test_load_asks_the_engine_once(runtime: Runtime, engine: FakeEngine) -> None:
    status, text, headers = runtime.ask(LOAD, BODY)
    assert status == 200
    assert text.startswith(b"Success: LoRA adapter 'lora-2' loaded successfully from 'org/repo'.")
    assert headers["content-type"] == "text/plain; charset=utf-8"
    [call] = engine.calls
    assert (call.method, call.path, call.body) == ("POST", ENGINE_LOAD, BODY)
    assert "authorization" not in call.headers


@pytest.mark.parametrize("name", ["", "x" * 101, "a b", "a.b", "../evil", "a/b", "ä", "a\n", "a\x00"])
def test_load_refuses_a_bad_name(runtime: Runtime, engine: FakeEngine, name: str) -> None:
    reply = runtime.ask(LOAD, {**BODY, "lora_name": name})
    assert error_of(reply) == (400, "ValidationError", "lora_name")
    assert engine.calls == []


@pytest.mark.parametrize(
    "path",
    [
        "",
        " ",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/b/c",
        "a",
        "ADAPTERS/../x",
        "ftp://x/y",
        "x\x00",
        "/" * 5000,
    ],
)
def test_load_refuses_a_path_outside_of_the_folders(runtime: Runtime, engine: FakeEngine, path: str) -> None:
    folder = runtime.application.state.settings.adapter_dir
    reply = runtime.ask(LOAD, {**BODY, "lora_path": path.replace("ADAPTERS", folder)})
    assert error_of(reply)[:2] == (400, "ValidationError")
    assert engine.calls == []


def test_load_refuses_a_link_out_of_the_folders(runtime: Runtime) -> None:
    folder = Path(runtime.application.state.settings.adapter_dir)
    (folder / "link").symlink_to("/etc")
    reply = runtime.ask(LOAD, {**BODY, "lora_path": str(folder / "link" / "passwd")})
    assert error_of(reply) == (400, "ValidationError", "lora_path")


def test_load_accepts_a_path_in_an_allowed_folder(engine: FakeEngine, tmp_path: Path) -> None:
    path = str(tmp_path / "shared" / "adapter")
    with runtime_of(engine, allowed_roots=(str(tmp_path / "shared"),)) as runtime:
        assert runtime.ask(LOAD, {**BODY, "lora_path": path})[0] == 200
    assert engine.calls[0].body["lora_path"] == path


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "ServerError"), (404, "NotFoundError"), (409, "ConflictError"), (401, "ServerError")],
)
def test_load_reports_the_error_of_the_engine(
    runtime: Runtime, engine: FakeEngine, status: int, kind: str
) -> None:
    engine.answer(ENGINE_LOAD, Answer(status, b"no such adapter"))
    reply = runtime.ask(LOAD, BODY)
    assert error_of(reply)[:2] == (status, kind)
    assert "no such adapter" in reply[1]["message"]
    assert len(engine.calls) == 1


async def waits_of(engine: FakeEngine, *answers: Answer) -> tuple[list[float], int]:
    """The waits of a client that loads an adapter, and the status of the error, or 200."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    engine.answer(ENGINE_LOAD, *answers)
    with serving(engine) as served:
        client = EngineClient(RuntimeSettings(engine_endpoint=served.url), sleep)
        try:
            await client.load_adapter("a", "org/repo", None)
        except ApiError as error:
            return waits, error.status
        finally:
            await client.close()
    return waits, 200


def test_load_repeats_errors_of_the_server() -> None:
    engine = FakeEngine()
    assert anyio.run(waits_of, engine, Answer(500), Answer(500), Answer()) == ([1, 2], 200)
    assert len(engine.calls) == 3
    assert anyio.run(waits_of, engine, Answer(503)) == ([1, 2], 500)
    assert len(engine.calls) == 6
    assert anyio.run(waits_of, engine, Answer(400)) == ([], 400)


@pytest.mark.parametrize(
    ("body", "location", "kind"),
    [
        ({**BODY, "foo": 1}, ["body", "foo"], "extra_forbidden"),
        ({"lora_name": "a"}, ["body", "lora_path"], "missing"),
        ({**BODY, "lora_name": 1}, ["body", "lora_name"], "value_error"),
        ({**BODY, "lora_name": None}, ["body", "lora_name"], "missing"),
        ({"lora_name": "a", "artifact_url": "s3://b/a/", "x": 1}, ["body", "x"], "extra_forbidden"),
        (
            {"lora_name": "a", "artifact_url": "s3://b/a/", "credentials": {"a": 1}},
            ["body", "credentials", "..."],
            "value_error",
        ),
        (b"{not json", ["body"], "json_invalid"),
        (b"", ["body"], "json_invalid"),
        (b"[1]", ["body"], "model_attributes_type"),
        (b'{"lora_name": "\xff"}', ["body"], "json_invalid"),
        (b"[" * 50_000, ["body"], "json_invalid"),
    ],
)
def test_malformed_body_is_422(
    runtime: Runtime, engine: FakeEngine, body: object, location: list[str], kind: str
) -> None:
    reply = runtime.ask(LOAD, body)
    assert error_of(reply)[:2] == (422, "RequestValidationError")
    [detail] = reply[1]["detail"]
    assert (detail["loc"], detail["type"]) == (location, kind)
    assert detail["msg"]
    assert engine.calls == []


def test_large_body_and_other_content_types_are_refused(runtime: Runtime, engine: FakeEngine) -> None:
    assert error_of(runtime.ask(LOAD, {**BODY, "lora_path": "x" * 70_000}))[:2] == (413, "BodyTooLargeError")
    reply = runtime.ask(LOAD, BODY, headers={"Content-Type": "text/plain"})
    assert error_of(reply)[:2] == (415, "UnsupportedMediaTypeError")
    assert reply[2]["connection"] == "close"
    assert engine.calls == []


@pytest.mark.parametrize("data", [post(LOAD, b'{"lora', length=100), UNFINISHED_LIST], ids=["load", "list"])
def test_body_that_does_not_arrive_in_time_is_408(engine: FakeEngine, data: bytes) -> None:
    with runtime_of(engine, receive_timeout=0.2) as runtime:
        with runtime.send(data) as connection:
            received = read(connection)
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not arrive within 0.2 seconds" in received
        assert b"connection: close" in received
        assert runtime.ask("/healthz")[0] == 200
    assert engine.calls == []


# ---- tokens and keys of the engine


def test_concurrent_loads_carry_their_own_tokens(engine: FakeEngine) -> None:
    with runtime_of(engine) as runtime:
        engine.may_answer.clear()

        def load(number: int) -> None:
            body = {**BODY, "lora_name": f"lora-{number}"}
            runtime.ask(LOAD, body, headers={"Authorization": f"Bearer token-{number}"})

        threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(engine.calls) == 8)
        engine.may_answer.set()
        for thread in threads:
            thread.join()
    found = {call.body["lora_name"]: call.headers["authorization"] for call in engine.calls}
    assert found == {f"lora-{number}": f"Bearer token-{number}" for number in range(8)}


# ---- other engines


def test_sglang_is_asked_at_its_routes() -> None:
    engine = FakeEngine()
    engine.answer("/load_lora_adapter", Answer(body=b"{}"))
    engine.answer("/unload_lora_adapter", Answer(body=b"{}"))
    with runtime_of(engine, engine="sglang") as runtime:
        assert runtime.ask(LOAD, BODY)[0] == 200
        assert runtime.ask(UNLOAD, {"lora_name": "lora-2"})[0] == 200
    assert [call.path for call in engine.calls] == ["/load_lora_adapter", "/unload_lora_adapter"]


@pytest.mark.parametrize(
    "settings",
    [{"engine": "trtllm"}, {"engine": "llamacpp"}, {"engine_version": "0.6.0"}, {"engine_version": "0.5"}],
)
def test_engine_without_adapters_is_501(engine: FakeEngine, settings: dict[str, str]) -> None:
    with runtime_of(engine, **settings) as runtime:
        assert error_of(runtime.ask(LOAD, BODY))[:2] == (501, "NotImplementedError")
        assert error_of(runtime.ask(UNLOAD, {"lora_name": "a"}))[:2] == (501, "NotImplementedError")
        assert runtime.ask("/healthz")[0] == 200


@pytest.mark.parametrize("version", ["0.6.1", "0.6.1.post1", "0.33.0", "1.0", "nightly"])
def test_engine_version_with_adapters_is_asked(engine: FakeEngine, version: str) -> None:
    with runtime_of(engine, engine_version=version) as runtime:
        assert runtime.ask(LOAD, BODY)[0] == 200


# ---- unloading


def test_unload_answers_with_success(runtime: Runtime, engine: FakeEngine) -> None:
    body = {"status": "success", "message": "Successfully unloaded adapter lora-1", "was_loaded": True}
    assert runtime.ask(UNLOAD, {"lora_name": "lora-1"})[:2] == (200, body)
    assert [call.body for call in engine.calls] == [{"lora_name": "lora-1"}]


@pytest.mark.parametrize(
    "unknown",
    [
        Answer(404),
        Answer(400, b'{"message": "The lora adapter \'a\' cannot be found.", "code": 400}'),
    ],
    ids=["404", "400 of older vLLM"],
)
def test_unload_of_an_unknown_adapter_is_a_success_that_says_so(engine: FakeEngine, unknown: Answer) -> None:
    engine.answer(ENGINE_UNLOAD, unknown)
    answer = {"status": "success", "message": "Successfully unloaded adapter a"}
    with runtime_of(engine) as runtime:
        assert runtime.ask(UNLOAD, {"lora_name": "a"})[:2] == (200, {**answer, "was_loaded": False})
    with runtime_of(engine, strict_compat=True) as runtime:
        assert runtime.ask(UNLOAD, {"lora_name": "a"})[:2] == (200, answer)


def test_unload_by_number_reports_an_unknown_adapter(runtime: Runtime, engine: FakeEngine) -> None:
    status, text, _ = runtime.ask(UNLOAD, {"lora_name": "n", "lora_int_id": 1})
    assert (status, text) == (200, b"Success: LoRA adapter 'n' unloaded successfully.")
    assert engine.calls[0].body == {"lora_name": "n", "lora_int_id": 1}
    engine.answer(ENGINE_UNLOAD, Answer(404))
    reply = runtime.ask(UNLOAD, {"lora_name": "n", "lora_int_id": 1})
    assert error_of(reply)[:2] == (404, "NotFoundError")


@pytest.mark.parametrize("name", ["../x", "", ".", "..", ".hidden", "a/b", "x" * 129])
def test_unload_refuses_a_bad_name(runtime: Runtime, engine: FakeEngine, name: str) -> None:
    reply = runtime.ask(UNLOAD, {"lora_name": name})
    assert error_of(reply) == (400, "ValidationError", "lora_name")
    assert engine.calls == []


def test_unload_of_a_stopped_engine_is_502() -> None:
    endpoint = f"http://127.0.0.1:{closed_port()}"
    with running(RuntimeSettings(engine_endpoint=endpoint)) as runtime:
        assert error_of(runtime.ask(UNLOAD, {"lora_name": "a"}))[:2] == (502, "ConnectionError")


def test_operations_of_one_adapter_wait_for_each_other(engine: FakeEngine) -> None:
    with runtime_of(engine) as runtime:
        engine.may_answer.clear()
        first = threading.Thread(target=runtime.ask, args=(LOAD, BODY))
        first.start()
        wait_until(lambda: len(engine.calls) == 1)
        second = threading.Thread(target=runtime.ask, args=(UNLOAD, {"lora_name": "lora-2"}))
        second.start()
        wait_until(lambda: runtime.application.state.adapters.operations.num_requests("lora-2") == 2)
        assert len(engine.calls) == 1
        other = threading.Thread(target=runtime.ask, args=(UNLOAD, {"lora_name": "other"}))
        other.start()
        wait_until(lambda: len(engine.calls) == 2)
        engine.may_answer.set()
        for thread in (first, second, other):
            thread.join()
        assert runtime.application.state.adapters.operations.num_requests("lora-2") == 0
    assert [call.body["lora_name"] for call in engine.calls] == ["lora-2", "other", "lora-2"]


@pytest.mark.parametrize(
    ("kind", "answer", "remedy"),
    [
        ("vllm", b'{"detail":"Not Found"}', "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=true"),
        ("penstock", b'{"error":{"message":"there is no such path"}}', "--max-adapters"),
    ],
)
def test_engine_without_routes_of_adapters_needs_options(
    engine: FakeEngine, kind: str, answer: bytes, remedy: str
) -> None:
    engine.answer(ENGINE_LOAD, Answer(404, answer))
    with runtime_of(engine, engine=kind) as runtime:
        reply = runtime.ask(LOAD, BODY)
    assert error_of(reply) == (404, "NotFoundError", None)
    assert reply[1]["message"] == f"the engine has no route {ENGINE_LOAD}: start it with {remedy}"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'{"error": {"message": "no rank"}}', "no rank"),
        (b'{"object": "error", "message": "no rank"}', "no rank"),
        (b'{"detail": "no rank"}', "no rank"),
        (b'"no rank"', "no rank"),
        (b'{"detail": [1]}', '{"detail": [1]}'),
        (b"[1]", "[1]"),
        (b"no JSON", "no JSON"),
        (b"[" * 100_000, "[" * 1000),
    ],
)
def test_reason_of_the_engine_is_shown(
    runtime: Runtime, engine: FakeEngine, answer: bytes, reason: str
) -> None:
    engine.answer(ENGINE_LOAD, Answer(400, answer))
    message = runtime.ask(LOAD, BODY)[1]["message"]
    assert message == f"the engine answers with status 400 to loading the adapter 'lora-2': {reason}"


# ---- an engine that answers with too much


def test_message_of_a_long_error_is_its_beginning(runtime: Runtime, engine: FakeEngine) -> None:
    for length, expected in ((100, "no such adapter"), (70_000, '{"error": {"padding": "xxx')):
        error = {"padding": "x" * length, "message": "no such adapter"}
        engine.answer(ENGINE_LOAD, Answer(400, json.dumps({"error": error}).encode()))
        status, answer, _ = runtime.ask(LOAD, BODY)
        assert status == 400
        assert f"to loading the adapter 'lora-2': {expected}" in answer["message"]


def test_list_of_models_is_changed_in_a_thread(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    change = handlers._owned_by_vllm

    def changed(body: bytes) -> bytes:
        threads.append(threading.current_thread().name)
        return change(body)

    monkeypatch.setattr(handlers, "_owned_by_vllm", changed)
    engine.answer("/v1/models", Answer(body=b'{"data": [{"owned_by": "penstock"}]}'))
    with runtime_of(engine, strict_compat=True) as runtime:
        assert runtime.ask("/v1/models")[1] == {"data": [{"owned_by": "vllm"}]}
    assert threads == ["AnyIO worker thread"]


@pytest.mark.parametrize(("count", "status"), [(8, 200), (100_000, 500)])
def test_number_of_interim_responses_is_limited(count: int, status: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as connection, suppress(OSError):
                read_until(connection, b"\r\n\r\n")
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * count)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with running(RuntimeSettings(engine_endpoint=endpoint)) as runtime:
            assert runtime.ask("/v1/models")[0] == status
        thread.join()
