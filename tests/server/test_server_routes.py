"""The routes beside generation: tokens, abort, prefix cache, sleep, version."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from support.api.engines import make_engine, wait_until
from support.server.serving import Served, at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADMIN = {"Authorization": "Bearer boss"}
LONG: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 500, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(admin_api_keys=("boss",))
    with serving(penstock.server.app({"tiny": engine}, settings)) as server:
        yield server


def test_text_is_tokenized_and_back(server: Served, engine: penstock.Engine) -> None:
    text = "Grüße, world"
    status, answer, _ = server.ask("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    assert answer["tokens"] == engine.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert answer["token_strs"] == engine.token_names(answer["tokens"])
    assert "Ġworld" in "".join(answer["token_strs"])  # as the vocabulary writes a space
    assert server.ask("/detokenize", {"tokens": answer["tokens"]})[1] == {"prompt": text}


def test_chat_is_tokenized_as_a_request_does(server: Served, engine: penstock.Engine) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    _, answer, _ = server.ask("/tokenize", {"messages": messages})
    result = engine.blocking.generate(messages, max_tokens=1)
    assert tuple(answer["tokens"]) == result.prompt_token_ids


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/abort", {"request_id": 1}, "request_id"),
    ],
)
def test_invalid_field_is_status_400(server: Served, path: str, fields: dict[str, Any], param: str) -> None:
    status, answer, _ = server.ask(path, fields)
    assert (status, answer["error"]["param"]) == (400, param)


def test_unknown_field_of_a_text_to_tokenize_is_named(server: Served) -> None:
    message = server.ask("/tokenize", {"content": "a"})[1]["error"]["message"]
    assert message == "either prompt or messages must be given; the field 'content' is unknown"


def test_paths_of_other_servers_name_the_path_to_use(server: Served) -> None:
    for path, known in (
        ("/completion", "/v1/completions"),
        ("/api/chat/", "/v1/chat/completions"),
        ("/props", "/v1/models"),
    ):
        status, answer, _ = server.ask(path, {})
        assert (status, answer["error"]["message"]) == (404, f"there is no such path; use {known}")
    assert server.ask("/other")[1]["error"]["message"] == "there is no such path"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {"prompt": "a" * 300_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 300_000}]}, "messages"),
        ("/detokenize", {"tokens": [1] * ((1 << 18) + 1)}, "tokens"),
        ("/v1/completions", {"prompt": "a" * 300_000, "truncate_prompt_tokens": 1}, "prompt"),
    ],
)
def test_input_of_tokenizers_has_a_bound(
    tiny_model: Path, path: str, fields: dict[str, Any], param: str
) -> None:
    settings = penstock.server.ServerSettings(max_body_bytes=8 << 20)
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine, settings)) as server:
        status, answer, _ = server.ask(path, fields)
        assert (status, answer["error"]["param"]) == (400, param)
        is_prompt = path != "/detokenize"
        assert answer["error"]["code"] == ("context_length_exceeded" if is_prompt else None)
        if path == "/tokenize":
            assert server.ask(path, {"prompt": "a" * 200_000})[1]["count"] == 200_000


def test_disconnect_ends_the_wait_for_a_tokenizer_thread(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_continue = threading.Event()

    def wait(*_arguments: object) -> bytes:
        may_continue.wait(60)
        return b"{}"

    monkeypatch.setattr("penstock.server.tokens._detokenized", wait)
    state = server.application.state
    key = ("/detokenize", "POST", "4xx")
    before = state.http.requests[key]
    running = [server.send(post("/detokenize", {"tokens": [1]})) for _ in range(2)]
    slots = state.tokenizer_threads.slots
    wait_until(lambda: slots.num_free == 0)
    waiting = server.send(post("/detokenize", {"tokens": [1]}))
    wait_until(lambda: slots.num_waiting == 1)
    waiting.close()
    wait_until(lambda: state.http.requests[key] == before + 1)
    may_continue.set()
    for connection in running:
        assert b" 200 " in connection.recv(1000)
        connection.close()


def test_path_is_the_same_with_a_slash_at_its_end(engine: penstock.Engine) -> None:
    from penstock.server.application import _ROUTES

    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
        "/tokenize": {"prompt": "a"},
    }
    settings = penstock.server.ServerSettings(api_keys=("a",))
    headers = {"X-Api-Key": "a"}
    with serving(penstock.server.app({"org/tiny": engine}, settings)) as server:
        for path, body in bodies.items():
            assert server.ask(f"{path}/", body)[0] == 401
            assert server.ask(f"{path}/", body, headers=headers)[0] == 200
        for method, path, _, access in _ROUTES:
            given = path.replace("{name:path}", "org/tiny").replace("{response_id}", "x")
            status = server.ask(f"{given}/", method=method)[0]
            assert status == (200 if access == "open" else 401), given
        for path in ("/v1/models", "/v1/models/org/tiny"):
            found = [server.ask(form, headers=headers)[:2] for form in (path, f"{path}/")]
            assert found[0][0] == 200
            assert found[0] == found[1]
        status, _, allowed = server.ask("/v1/models/", {}, headers=headers)
        assert (status, allowed["allow"]) == (405, "GET, HEAD, OPTIONS")
        counted = server.application.state.http.requests
        assert {path for path, *_ in counted} <= {path for _, path, *_ in _ROUTES}


def test_version_is_that_of_the_package(server: Served) -> None:
    assert server.ask("/version")[1] == {"version": penstock.__version__}


def test_abort_ends_a_stream_with_its_output(server: Served, engine: penstock.Engine) -> None:
    with held(engine):
        connection = server.send(post("/v1/completions", LONG))
        wait_until(lambda: bool(server.application.state.calls.generations))
        [name] = server.application.state.calls.generations
        assert server.ask("/abort", {"request_id": [name[:-1], name]})[1] == {"aborted": 1}
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(1000)
    connection.close()
    assert b'"finish_reason":"abort"' in received
    assert server.ask("/abort", {"request_id": name})[1] == {"aborted": 0}
    wait_until(lambda: at_rest(engine))


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"prompt": [[1], [2]]}, b" 200 ", b'"finish_reason":"abort"'),
        ({"prompt": [1], "best_of": 2}, b" 503 ", b'"code":"aborted"'),
    ],
    ids=["batch", "selection"],
)
def test_abort_ends_a_request_that_is_not_streamed(
    server: Served, engine: penstock.Engine, fields: dict[str, Any], status: bytes, text: bytes
) -> None:
    with held(engine):
        connection = server.send(post("/v1/completions", {**LONG, "stream": False, **fields}))
        wait_until(lambda: engine.stats().running == 3)
        [name] = server.application.state.calls.generations
        assert server.ask("/abort", {"request_id": name})[1] == {"aborted": 1}
    received = connection.recv(1 << 16)
    connection.close()
    assert status in received.partition(b"\r\n")[0]
    assert text in received
    wait_until(lambda: at_rest(engine))


def test_prefix_cache_is_emptied(server: Served) -> None:
    prompt = {"prompt": list(range(100)), "max_tokens": 1}
    server.ask("/v1/completions", prompt)
    cached = server.ask("/v1/completions", prompt)[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert server.ask("/reset_prefix_cache", method="POST", headers=ADMIN)[0] == 200
    usage = server.ask("/v1/completions", prompt)[1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_cache_salt_separates_the_prefixes(server: Served) -> None:
    def cached(salt: str) -> int:
        fields = {"prompt": list(range(200, 300)), "max_tokens": 1, "cache_salt": salt}
        usage = server.ask("/v1/completions", fields)[1]["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached(salt) for salt in "abab"] == [0, 0, 96, 96]
    assert server.ask("/reset_prefix_cache", {"cache_salt": "a"}, headers=ADMIN)[0] == 200
    assert [cached(salt) for salt in "ab"] == [0, 96]


def test_model_sleeps_and_wakes(tiny_model: Path) -> None:
    settings = penstock.server.ServerSettings(admin_api_keys=("boss",))
    short = {"prompt": [1], "max_tokens": 1}
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine, settings)) as server:
        assert server.ask("/sleep", {"drain": 1}, headers=ADMIN)[0] == 200
        assert server.ask("/v1/completions", short)[0] == 503
        status, answer, _ = server.ask("/health")
        assert (status, answer["models"]["default"]["status"]) == (503, "asleep")
        assert server.ask("/ping")[0] == 200
        assert server.ask("/wake_up", method="POST", headers=ADMIN)[0] == 200
        assert server.ask("/v1/completions", short)[0] == 200
        assert server.ask("/sleep", {"drain": -1}, headers=ADMIN)[0] == 400


def test_administrative_route_needs_its_key(server: Served, engine: penstock.Engine) -> None:
    for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
        assert server.ask(path, method="POST")[0] == 401
    with serving(penstock.server.app(engine)) as closed:
        status, answer, _ = closed.ask("/sleep", method="POST", headers=ADMIN)
    assert (status, answer["error"]["type"]) == (403, "permission_error")
