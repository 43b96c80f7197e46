"""Bodies of requests: their size and number of values, the thread that decodes them, errors about them."""

from __future__ import annotations

import json
import random
import threading
import time
import tracemalloc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from penstock import _json
from penstock.server import bodies
from penstock.server.errors import ApiError, invalid
from support.api.engines import make_engine, wait_until
from support.server.serving import Served, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
SHORT = {"prompt": "Hello", "max_tokens": 1}
MIB = 1 << 20


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(max_body_bytes=32 * MIB)
    with serving(penstock.server.app({"tiny": engine}, settings)) as server:
        yield server


def answer_to(server: Served, body: bytes) -> tuple[int, str]:
    """The status and the message of an error."""
    status, answer, _ = server.ask(PATH, body)
    return status, answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"prompt":[' + b"[]," * (1 << 17) + b"0]}",
            "too many lists, objects and fields: the limit is 131072",
        ),
        (
            b'{"prompt":[' + b"{}," * (1 << 17) + b"0]}",
            "too many lists, objects and fields: the limit is 131072",
        ),
        (
            b'{"x":{' + b'"":0,' * (1 << 17) + b'"":0}}',
            "too many lists, objects and fields: the limit is 131072",
        ),
        (b'{"prompt":[' + b"1," * (1 << 20) + b"0]}", "too many values: the limit is 1048576"),
        (b'{"prompt":' + b"[" * 40_000 + b"]" * 40_000 + b"}", "nested too deeply: the limit is 64 levels"),
    ],
    ids=["lists", "objects", "fields", "numbers", "nested"],
)
def test_body_of_too_many_values_is_status_400(server: Served, body: bytes, message: str) -> None:
    status, found = answer_to(server, body)
    assert status == 400
    assert message in found


@pytest.mark.parametrize(
    ("depth", "accepted"), [(64, True), (65, False), (900, False), (970, False), (5000, False)]
)
@pytest.mark.parametrize("kind", ["lists", "objects"])
def test_nesting_has_a_limit(server: Served, kind: str, depth: int, accepted: bool) -> None:  # noqa: FBT001
    opening, closing = (b"[", b"]") if kind == "lists" else (b'{"a":', b"}")
    # The object of the request is the first level.
    value = opening * (depth - 1) + b"1" + closing * (depth - 1)
    status, answer, _ = server.ask(PATH, b'{"prompt":"a","max_tokens":1,"x":' + value + b"}")
    assert status == (200 if accepted else 400)
    if not accepted:
        assert "nested too deeply" in answer["error"]["message"]


def test_nested_value_of_a_field_is_shown_in_part(server: Served) -> None:
    value: list[Any] = []
    for _ in range(60):
        value = [value]
    for field in ("temperature", "structured_outputs", "logit_bias", "stop"):
        status, answer, _ = server.ask(PATH, {**SHORT, field: value})
        assert status == 400
        assert len(answer["error"]["message"]) < 1000, field


@pytest.mark.parametrize(
    "value", [[0] * 10**6, "x" * 10**7, {str(n): n for n in range(10**5)}, b"x" * 10**6, 10**4000]
)
def test_error_shows_a_large_value_in_part(value: object) -> None:
    begin = time.thread_time()
    message = str(invalid("field", value, "small"))
    assert time.thread_time() - begin < 0.1
    assert message.startswith("field=")
    assert len(message) < 200


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": 1}, "prompt", "prompt=1 is not allowed: it must be a string or a list"),
        ({"echo": "a"}, "echo", "echo='a' is not allowed: it must be true or false"),
        ({"prompt": ["a", {}]}, "prompt[1]", "prompt[1]={} is not allowed"),
        (
            {"stream": True, "stream_options": []},
            "stream_options",
            "=[] is not allowed: it must be an object",
        ),
        ({}, "prompt", "prompt is missing"),
    ],
)
def test_error_of_a_type_names_field_and_value(
    server: Served, fields: dict[str, Any], param: str, message: str
) -> None:
    status, answer, _ = server.ask(PATH, fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert message in answer["error"]["message"]
    assert "`" not in answer["error"]["message"]


def test_message_has_a_bound() -> None:
    assert len(ApiError(400, "a" * 10**6).body()["error"]["message"]) < 2100


def test_values_are_counted_outside_of_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with the values that the decoder returns, for random texts with every kind of escape."""
    generator = random.Random(7)

    def text() -> str:
        return "".join(generator.choices('ab,[{"\\\n\u00e9\U0001f600', k=generator.randrange(40)))

    def value(depth: int) -> Any:
        kind = generator.randrange(4 if depth else 2)
        if kind < 2:
            return text() if kind else generator.randrange(100)
        items = [value(depth - 1) for _ in range(generator.randrange(1, 5))]
        return items if kind == 2 else {f"{text()}{index}": item for index, item in enumerate(items)}

    def count(value: Any) -> tuple[int, int]:
        """The number of values in lists and objects; that of lists, objects and fields."""
        if not isinstance(value, (list, dict)):
            return 0, 0
        items = list(value.values() if isinstance(value, dict) else value)
        found = [count(item) for item in items]
        fields = len(items) if isinstance(value, dict) else 0
        return len(items) + sum(values for values, _ in found), 1 + fields + sum(parts for _, parts in found)

    monkeypatch.setattr(_json, "_PART", 7)
    for _ in range(200):
        found = {"a": value(4), "b": value(4)}
        body = json.dumps(found, ensure_ascii=generator.random() < 0.5).encode()
        values, structure = count(found)
        for limit, name, number in (
            ("_MAX_VALUES", "values", values),
            ("_MAX_STRUCTURE", "lists", structure),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(bodies, limit, number)
                assert bodies.size_of_values(body) >= 32 * values
                assert _json.number_of_values(body.decode()) >= values
                patch.setattr(bodies, limit, number - 1)
                with pytest.raises(ApiError, match=f"too many {name}"):
                    bodies.size_of_values(body)


def listed(*values: str) -> bytes:
    return f'{{"x":[{",".join(values)}]}}'.encode()


@pytest.mark.parametrize(
    "body",
    [
        listed(*["[]"] * 2000),
        listed(*["[0]"] * 2000),
        listed(*["{}"] * 2000),
        listed(*['{"a":{"b":0}}'] * 2000),
        listed(*(f'{{"é{number}":0}}' for number in range(2000))),
        listed("{" + ",".join(f'"{number}":0' for number in range(2000)) + "}"),
        listed(*(str(number) for number in range(1000, 6000))),
        listed(*['"é"', '"\u20ac"', '"\U0001f600"'] * 700),
        listed(*['{"role":"user","content":"Hello there"}'] * 400),
        json.dumps({"x": "Some words, and others. " * 1000}).encode(),
    ],
    ids=["lists", "numbers", "objects", "nested", "keys", "fields", "ids", "characters", "messages", "text"],
)
def test_values_count_as_the_memory_that_they_take(body: bytes) -> None:
    bodies.decoded(body)
    tracemalloc.start()
    try:
        value = bodies.decoded(body)
        memory, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert value
    assert 0.9 < (len(body) + bodies.size_of_values(body)) / memory < 3.5


def test_small_body_counts_with_its_values(engine: penstock.Engine) -> None:
    application = penstock.server.app(engine)
    body = b'{"prompt":"a","max_tokens":1,"x":[' + b"[]," * 10_000 + b"0]}"
    assert len(body) < bodies.LARGE
    with serving(application) as server, held(engine), server.send(post(PATH, body)):
        wait_until(lambda: application.state.body_bytes.total > 96 * 10_000)
        assert application.state.body_bytes.total < 1.5 * MIB


def test_text_with_many_brackets_is_accepted(server: Served) -> None:
    text = "[{," * 400_000
    status, message = answer_to(server, json.dumps({**SHORT, "prompt": text}).encode())
    assert (status, "prompt is too long: 1200000 bytes" in message) == (400, True)


def test_large_body_is_decoded_beside_the_event_loop(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers while the thread that decodes is held."""
    is_begun, may_continue = threading.Event(), threading.Event()

    def count(body: bytes) -> int:
        if len(body) > bodies.LARGE:
            is_begun.set()
            assert may_continue.wait(60)
        return bodies.size_of_values(body)

    monkeypatch.setattr("penstock.server.http.size_of_values", count)
    body = json.dumps({**SHORT, "x": "a" * bodies.LARGE}).encode()
    with server.send(post(PATH, body)) as connection:
        assert is_begun.wait(60)
        assert server.ask(PATH, SHORT)[0] == 200
        may_continue.set()
        assert b" 200 " in connection.recv(1000)


# ---- the default limit


@pytest.mark.parametrize(
    ("lengths", "limit"),
    [((512,), 2 * MIB), ((8192,), 8 * MIB), ((512, 8192), 8 * MIB), ((1 << 20,), 32 * MIB)],
)
def test_limit_depends_on_the_longest_sequence(lengths: tuple[int, ...], limit: int) -> None:
    engines: dict[str, Any] = {
        str(length): SimpleNamespace(
            info=SimpleNamespace(max_model_len=length), config=SimpleNamespace(max_adapters=0)
        )
        for length in lengths
    }
    assert penstock.server.app(engines).state.max_body_bytes() == limit


def test_limit_is_the_upper_bound_until_a_model_is_open(tiny_model: Path) -> None:
    assert penstock.server.app(make_engine(tiny_model)).state.max_body_bytes() == 32 * MIB


def test_default_limit_is_that_of_the_model(engine: penstock.Engine) -> None:
    with serving(penstock.server.app(engine)) as server:
        with server.send(post(PATH, b"", length=2 * MIB + 1)) as connection:
            received = connection.recv(1000)
        assert b" 413 " in received
        assert b"the body is too large: the limit is 2097152 bytes" in received
        assert server.ask(PATH, json.dumps({**SHORT, "x": "a" * (2 * MIB - 1000)}).encode())[0] == 200
