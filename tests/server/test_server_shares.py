"""The shares of clients that compete for the engine, the queue, the threads and the memory of a server."""

from __future__ import annotations

import http.client
import json
import time
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from support.api.engines import make_engine, wait_until
from support.server.serving import at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
PATH = "/v1/completions"
SHORT = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_num_seqs=2, max_waiting=8, max_unfinished=256) as engine:
        yield engine


def with_keys(engine: penstock.Engine, **settings: Any) -> Any:
    chosen = penstock.server.ServerSettings(api_keys=("a", "b"), **settings)
    return serving(penstock.server.app(engine, chosen))


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def post_as(key: str, body: object, length: int | None = None) -> bytes:
    """The bytes of a request with this key."""
    return post(PATH, body, length).replace(b"\r\n", f"\r\nX-Api-Key: {key}\r\n".encode(), 1)


@pytest.mark.parametrize("fields", [{"prompt": ["Hello"] * 60}, {"n": 32}], ids=["prompts", "choices"])
def test_flood_of_a_key_leaves_room_for_another(engine: penstock.Engine, fields: dict[str, Any]) -> None:
    before = engine.stats()
    with with_keys(engine) as server, ExitStack() as stack:
        with held(engine):
            for _ in range(16):
                flood = post_as("a", {**SHORT, "max_tokens": 400, **fields})
                stack.enter_context(closing(server.send(flood)))
            wait_until(lambda: engine.stats().requests_rejected - before.requests_rejected >= 8)
        status, _, _ = server.ask(PATH, SHORT, headers=header("b"))
        assert status == 200, "the queue of another key is full, and that is all"
        num_generated = engine.stats().generation_tokens - before.generation_tokens
        assert num_generated < 8 * 400, "it does not wait for the requests of the other key in the queue"
    wait_until(lambda: at_rest(engine))


def test_bodies_that_a_key_holds_open_leave_room(engine: penstock.Engine) -> None:
    sizes = {"max_body_bytes": 100_000, "max_total_body_bytes": 400_000}
    with with_keys(engine, **sizes) as server, ExitStack() as stack:
        state = server.application.state

        def holds(size: int) -> bool:
            return bool(state.num_body_bytes >= size)

        for number in range(1, 5):
            begin = post_as("a", b" " * 70_000, length=90_000)
            stack.enter_context(closing(server.send(begin)))
            wait_until(partial(holds, 70_000 * number))
        body = json.dumps(SHORT).encode() + b" " * 80_000
        status, answer, headers = server.ask(PATH, body, headers=header("a"))
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "too_many_requests", "1")
        assert answer["error"]["message"].endswith("the limit is 300000 bytes now")
        assert server.ask(PATH, body, headers=header("b"))[0] == 200
        begin = post_as("b", b" " * 70_000, length=90_000)
        stack.enter_context(closing(server.send(begin)))
        wait_until(partial(holds, 350_000))
        assert server.ask(PATH, body, headers=header("b"))[0] == 503, "the bodies of all fill the memory"
        stack.close()
        wait_until(lambda: state.num_body_bytes == 0)
        assert server.ask(PATH, body, headers=header("a"))[0] == 200


def test_request_that_would_wait_too_long_is_refused_at_once(tiny_model: Path) -> None:
    with make_engine(tiny_model, max_num_seqs=1) as engine, ExitStack() as stack:
        server = stack.enter_context(with_keys(engine, request_timeout=2.0))
        params = penstock.SamplingParams(max_tokens=200, ignore_eos=True)
        seconds, num_prompts = 0.0, 16
        while seconds < 1.5:  # a rate is that of at least one second of work
            begin, num_prompts = time.monotonic(), 2 * num_prompts
            for _ in engine.blocking.generate_many(["Hello"] * num_prompts, params):
                pass
            seconds = time.monotonic() - begin

        def is_counted(number: int) -> bool:
            stats = engine.stats()
            return stats.waiting + stats.requests_rejected >= number

        with held(engine):
            number = 0
            while not engine.stats().requests_rejected:
                body = {**SHORT, "prompt": [number % 200] * 200}
                connection = stack.enter_context(closing(server.send(post_as("a", body))))
                number += 1
                wait_until(partial(is_counted, number))
            answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"from its deadline; try again later" in answer


def test_addresses_are_the_clients_without_keys(engine: penstock.Engine) -> None:
    with serving(penstock.server.app(engine)) as server, ExitStack() as stack:
        before = engine.stats()
        with held(engine):
            for _ in range(12):
                begin = post(PATH, {**SHORT, "max_tokens": 40})
                stack.enter_context(closing(server.send(begin)))
            wait_until(lambda: engine.stats().requests_rejected > before.requests_rejected)
            address = ("127.0.0.2", 0)  # all of 127/8 are addresses of this machine
            connection = http.client.HTTPConnection(
                "127.0.0.1", server.port, timeout=60, source_address=address
            )
            headers = {"Content-Type": "application/json"}
            connection.request("POST", PATH, json.dumps(SHORT), headers)
            wait_until(lambda: engine.stats().waiting > 8)
        assert connection.getresponse().status == 200
        connection.close()
    wait_until(lambda: at_rest(engine))
