"""Stored responses: reading, continuing and removing them, their bounds, and the keys that own them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

import penstock.server
from penstock.server.responses.store import Items, ResponseStore, Stored
from support.api.engines import make_engine, wait_until
from support.server.serving import Served, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/responses"
USER = {"role": "user", "content": "Hello"}
BODY: dict[str, Any] = {"input": "Hello", "max_output_tokens": 3, "seed": 1, "ignore_eos": True}
KEYS = ("first", "second")


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(api_keys=KEYS)
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine, settings)) as server:
        yield server


def asked(server: Served, path: str, body: object = None, *, key: str = "first", **options: Any) -> Any:
    """The status and the body of a response to a request with this key."""
    return server.ask(path, body, headers={"Authorization": f"Bearer {key}"}, **options)[:2]


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="first", max_retries=0) as client:
        yield client


def test_client_reads_and_deletes_a_response(client: openai.OpenAI) -> None:
    made = client.responses.create(model="default", input="Hello", max_output_tokens=3)
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(made.id)
    assert caught.value.message.endswith(f"Response with id '{made.id}' not found.")
    assert caught.value.param == "response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)


def test_stored_items_that_waiting_requests_read_are_counted(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        application = penstock.server.app(engine)
        with serving(application) as server:
            _, first, _ = server.ask(PATH, {**BODY, "input": "a" * 200})
            body = {**BODY, "previous_response_id": first["id"]}
            with held(engine), server.send(post(PATH, body)):
                wait_until(lambda: application.state.body_bytes.total > len(json.dumps(body)) + 200)
            wait_until(lambda: application.state.body_bytes.total == 0)


def test_stored_items_count_with_their_values(tiny_model: Path) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "b", "arguments": [[]] * 10_000}
    answer = {"type": "function_call_output", "call_id": "a", "output": "c"}
    with make_engine(tiny_model, max_model_len=512) as engine:
        application = penstock.server.app(engine)
        with serving(application) as server:
            _, first, _ = server.ask(PATH, {**BODY, "input": [USER, call, answer]})
            body = {**BODY, "previous_response_id": first["id"]}
            with held(engine), server.send(post(PATH, body)):
                wait_until(lambda: application.state.body_bytes.total > 96 * 10_000)
            wait_until(lambda: application.state.body_bytes.total == 0)


def test_streamed_response_is_stored_as_it_was_sent(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="default", input="Hello", max_output_tokens=3, stream=True)
    last: Any = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert client.responses.retrieve(last.response.id).model_dump() == last.response.model_dump()


def test_conversation_is_the_input_of_the_next_response(server: Served) -> None:
    _, first = asked(server, PATH, BODY)
    _, second = asked(server, PATH, {**BODY, "input": "And?", "previous_response_id": first["id"]})
    text = first["output"][0]["content"][0]["text"]
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And?"},
    ]
    _, whole = asked(server, PATH, {**BODY, "input": messages})
    assert second["previous_response_id"] == first["id"]
    assert second["output"][0]["content"] == whole["output"][0]["content"]
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


def test_input_items_are_listed_in_pages(server: Served, client: openai.OpenAI) -> None:
    _, first = asked(server, PATH, BODY)
    _, second = asked(server, PATH, {**BODY, "input": "And?", "previous_response_id": first["id"]})
    newest: Any = list(client.responses.input_items.list(second["id"]))
    assert [item.role for item in newest] == ["user", "assistant", "user"]
    assert [item.content[0].text for item in newest][::2] == ["And?", "Hello"]
    oldest: Any = list(client.responses.input_items.list(second["id"], order="asc", limit=1))
    assert oldest == newest[::-1]
    for query, name in (
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=0000000001999", "limit"),
        ("limit=" + "0" * 8 + "1" + "9" * 4000, "limit"),
        ("order=up", "order"),
        ("after=a", "after"),
    ):
        status, answer = asked(server, f"{PATH}/{second['id']}/input_items?{query}")
        assert (status, answer["error"]["param"]) == (400, name)


def test_items_of_one_id_are_listed_in_pages(server: Served, client: openai.OpenAI) -> None:
    items = [{"id": "same", "role": "user", "content": text} for text in "abc"]
    _, made = asked(server, PATH, {**BODY, "input": items})
    found: Any = client.responses.input_items.list(made["id"], order="asc", limit=1)
    texts = [item.content[0].text for _, item in zip(range(4), found, strict=False)]
    assert texts == ["a", "b", "c"]


def test_stored_items_are_read_by_their_size(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.server.responses import handlers

    parts = [{"type": "input_text", "text": ""}] * 4000
    _, large = asked(server, PATH, {**BODY, "input": [{"role": "user", "content": parts}, {**USER}]})
    _, small = asked(server, PATH, BODY)
    on_loop: list[str] = []

    def watched(name: str) -> Any:
        function = getattr(handlers, name)

        def call(*arguments: Any) -> Any:
            if asyncio._get_running_loop() is not None:
                on_loop.append(name)
            return function(*arguments)

        return call

    for name in ("_decode_item", "_decode_output", "_decode_id", "_input", "_listed"):
        monkeypatch.setattr(handlers, name, watched(name))
    status, page = asked(server, f"{PATH}/{large['id']}/input_items?limit=1")
    assert (status, len(page["data"]), page["has_more"]) == (200, 1, True)
    status, page = asked(server, f"{PATH}/{large['id']}/input_items?after={page['last_id']}")
    assert (status, len(page["data"]), page["has_more"]) == (200, 1, False)
    for stream in (False, True):
        body = {**BODY, "previous_response_id": large["id"], "stream": stream}
        assert asked(server, PATH, body)[0] == 200
    assert on_loop == []
    assert asked(server, PATH, {**BODY, "previous_response_id": small["id"]})[0] == 200
    assert "_decode_item" in on_loop


@pytest.mark.parametrize("path", ["", "/input_items", "/cancel"])
def test_only_the_key_of_a_response_can_use_it(server: Served, path: str) -> None:
    _, made = asked(server, PATH, BODY)
    method = "POST" if path == "/cancel" else "GET"
    place = f"{PATH}/{made['id']}"
    assert asked(server, place + path, key="second", method=method)[0] == 404
    assert asked(server, place, key="second", method="DELETE")[0] == 404
    status, answer = asked(server, PATH, {**BODY, "previous_response_id": made["id"]}, key="second")
    assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")
    assert asked(server, place)[0] == 200


def test_complete_response_cannot_be_cancelled(server: Served) -> None:
    _, made = asked(server, PATH, BODY)
    status, answer = asked(server, f"{PATH}/{made['id']}/cancel", method="POST")
    assert (status, answer["error"]["param"]) == (400, "response_id")


def test_response_is_not_stored_if_the_request_declines(server: Served) -> None:
    _, made = asked(server, PATH, {**BODY, "store": False})
    assert made["store"] is False
    assert asked(server, f"{PATH}/{made['id']}")[0] == 404


def test_server_can_store_no_responses(tiny_model: Path) -> None:
    settings = penstock.server.ServerSettings(store_responses=False)
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine, settings)) as server:
        _, made, _ = server.ask(PATH, BODY)
        assert made["store"] is False
        assert server.ask(f"{PATH}/{made['id']}")[0] == 404


# ---- bounds


def stored(body: bytes, *items: bytes) -> Stored:
    """A response with items that have no ids."""
    return Stored(body, Items.of([""] * len(items), items))


def store_of(number: int, size: int) -> ResponseStore:
    """A store with these bounds."""
    settings = penstock.server.ServerSettings(max_stored_responses=number, max_stored_bytes=size)
    return ResponseStore(settings)


def kept(store: ResponseStore, names: str) -> str:
    """Those of the responses that the store has; does not count as use of the others."""
    return "".join(name for name in names if name in store._by_key.get(b"", {}))


def test_least_recently_used_response_makes_room() -> None:
    store = store_of(2, 1000)
    for name in "abc":
        store.add(b"", name, stored(b"x"))
    assert kept(store, "abc") == "bc"
    assert store.get(b"", "b") is not None
    store.add(b"", "d", stored(b"x"))
    assert kept(store, "abcd") == "bd"


def test_bytes_of_stored_responses_are_bounded() -> None:
    store = store_of(100, 10)
    store.add(b"", "a", stored(b"12345", b"6"))
    store.add(b"", "b", stored(b"1234"))
    assert kept(store, "ab") == "ab"
    store.add(b"", "c", stored(b"1"))
    assert kept(store, "abc") == "bc"
    store.add(b"", "d", stored(b"12345678901"))
    assert kept(store, "abcd") == "bc"
    store.remove(b"", "b")
    store.add(b"", "e", stored(b"123456789"))
    assert kept(store, "abcde") == "ce"


def test_bounds_are_those_of_one_key() -> None:
    store = store_of(1, 10)
    store.add(b"", "a", stored(b"1234567890"))
    store.add(b"other", "b", stored(b"1234567890"))
    assert store.get(b"", "a") is not None
    assert store.get(b"other", "a") is None
