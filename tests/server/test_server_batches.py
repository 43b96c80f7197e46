"""Requests with many prompts: a bounded number of them at a time, beside those of other clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from penstock.server.generation import _retrying
from penstock.server.models import Model
from support.api.engines import make_engine, wait_until
from support.server.serving import Served, at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
NUM_PROMPTS = 64
BODY: dict[str, Any] = {
    "prompt": [[number] for number in range(NUM_PROMPTS)],
    "max_tokens": 2,
    "ignore_eos": True,
}
CONCURRENCY = 2


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_num_seqs=2, max_waiting=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    with serving(penstock.server.app(engine)) as server:
        yield server


def finished(server: Served, fields: dict[str, Any]) -> list[tuple[int, str]]:
    """The index and the finish reason of each choice, in order."""
    body = {**BODY, **fields}
    if not body.get("stream"):
        status, answer, _ = server.ask(PATH, body)
        assert status == 200, answer
        return [(choice["index"], choice["finish_reason"]) for choice in answer["choices"]]
    *events, done = server.events(PATH, body)
    assert done == "[DONE]"
    choices = [choice for event in events for choice in event["choices"]]
    return sorted((choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"])


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"best_of": 2}], ids=["", "stream", "best_of"])
@pytest.mark.parametrize("num_clients", [1, 2])
def test_batch_is_larger_than_the_queue(server: Served, fields: dict[str, Any], num_clients: int) -> None:
    with ThreadPoolExecutor(num_clients) as clients:
        answers = list(clients.map(finished, [server] * num_clients, [fields] * num_clients))
    assert answers == [[(index, "length") for index in range(NUM_PROMPTS)]] * num_clients


def test_streamed_batch_starts_few_requests(server: Served, engine: penstock.Engine) -> None:
    with held(engine):
        num_admitted = engine.stats().requests_admitted
        connection = server.send(post(PATH, {**BODY, "stream": True}))
        received = connection.recv(1 << 16)
        assert engine.stats().requests_admitted - num_admitted == CONCURRENCY
    while b"[DONE]" not in received:
        received += connection.recv(1 << 16)
    connection.close()


def test_streamed_batch_waits_for_room(server: Served, engine: penstock.Engine) -> None:
    """Batches of a client share its concurrency; one whose first prompt has no room gets status 429."""
    answers = []
    with ThreadPoolExecutor(4) as clients, held(engine):
        for num_waiting in (1, 2, 3, 4):
            answers.append(clients.submit(finished, server, {"stream": True}))
            wait_until(lambda count=num_waiting: engine.stats().waiting == count)  # type: ignore[misc]
        assert server.ask(PATH, BODY)[0] == 429
    assert [len(answer.result()) for answer in answers] == [NUM_PROMPTS] * 4
    wait_until(lambda: at_rest(engine))


@pytest.mark.parametrize("stream", [False, True])
def test_aborted_batch_ends_each_prompt(server: Served, engine: penstock.Engine, *, stream: bool) -> None:
    with ThreadPoolExecutor(1) as clients, held(engine):
        answer = clients.submit(finished, server, {"stream": stream, "max_tokens": 400})
        wait_until(lambda: engine.stats().waiting == 1)
        [generation] = server.application.state.calls.generations.values()
        generation.abort()
    assert answer.result() == [(index, "abort") for index in range(NUM_PROMPTS)]
    wait_until(lambda: at_rest(engine))


def test_requests_that_wait_for_room_share_their_attempts(engine: penstock.Engine) -> None:
    model = Model("tiny", engine)
    with ExitStack() as stack:
        seconds = [stack.enter_context(_retrying(model)) for _ in range(1000)]
    assert seconds[0] == seconds[9] == 0.02
    assert seconds[999] == 1000 / 500
    assert model.num_retrying == 0
