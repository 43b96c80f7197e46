"""The shares of clients that compete for the engine, the queue, the threads and the memory of a server."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock.server
from penstock._client import client, deadline
from penstock.server.addresses import network_of
from penstock.server.connection import limited_protocol
from support.api.engines import make_engine, wait_until
from support.server.edge import PARSERS, PING, read, read_until
from support.server.serving import Served, at_rest, held, post, serving

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
            for _ in range(24):
                flood = post_as("a", {**SHORT, "max_tokens": 400, **fields})
                stack.enter_context(closing(server.send(flood)))
            wait_until(lambda: engine.stats().requests_rejected - before.requests_rejected >= 8)
        status, _, _ = server.ask(PATH, SHORT, headers=header("b"))
        assert status == 200, "the queue of another key is full, and that is all"
        num_generated = engine.stats().generation_tokens - before.generation_tokens
        assert num_generated < 8 * 400, "it does not wait for the requests of the other key in the queue"
    wait_until(lambda: at_rest(engine))


def test_batches_of_a_key_share_its_concurrency(tiny_model: Path) -> None:
    many = {**SHORT, "prompt": ["Hello"] * 60}
    with (
        make_engine(tiny_model, max_num_seqs=8, max_waiting=256, max_unfinished=512) as engine,
        with_keys(engine) as server,
        ExitStack() as stack,
        held(engine),
    ):

        def numbers() -> list[int]:
            """The requests of the engine of each batch."""
            return [len(found.requests()) for found in server.application.state.calls.generations.values()]

        def begin(key: str, *expected: int) -> None:
            stack.enter_context(closing(server.send(post_as(key, many))))
            wait_until(lambda: numbers() == list(expected))

        begin("a", 10)
        begin("a", 10, 5)
        begin("b", 10, 5, 10)
        begin("a", 10, 5, 10, 3)
        for _ in range(20):  # the event loop runs all tasks that it can
            server.ask("/v1/models", headers=header("b"))
        assert numbers() == [10, 5, 10, 3]
    wait_until(lambda: not server.application.state.calls.generations)


def test_batches_leave_the_event_loop_to_others(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {**SHORT, "prompt": ["Hello"] * 60}
    counts = [0]  # prompts that were started, in each iteration of the event loop with some

    with make_engine(tiny_model, max_num_seqs=8, max_waiting=4096, max_unfinished=4096) as engine:
        stream = engine.stream

        def counted(*arguments: Any, **options: Any) -> Any:
            if not counts[-1]:
                asyncio.get_running_loop().call_soon(counts.append, 0)
            counts[-1] += 1
            return stream(*arguments, **options)

        monkeypatch.setattr(engine, "stream", counted)
        with with_keys(engine) as server, ExitStack() as stack:
            with held(engine):
                for _ in range(40):
                    stack.enter_context(closing(server.send(post_as("a", many))))
                wait_until(lambda: len(server.application.state.calls.generations) == 40)
                wait_until(lambda: sum(counts) >= 40)
            stack.close()
            wait_until(lambda: not server.application.state.calls.generations)
    assert max(counts) <= 8


def test_bodies_that_a_key_holds_open_leave_room(engine: penstock.Engine) -> None:
    sizes = {"max_body_bytes": 100_000, "max_total_body_bytes": 400_000}
    with with_keys(engine, **sizes) as server, ExitStack() as stack:
        state = server.application.state

        def holds(size: int) -> bool:
            return bool(state.body_bytes.total >= size)

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
        wait_until(lambda: state.body_bytes.total == 0)
        assert server.ask(PATH, body, headers=header("a"))[0] == 200


def test_request_that_cannot_end_in_time_is_refused_at_once(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine._session.submit
    times_left = list[float]()

    def refuse(prompt: Any, *arguments: Any) -> Any:
        times_left.append((deadline.get() or 0.0) - time.monotonic())
        if prompt == "late":
            raise penstock.DeadlineError("it takes too long")
        return submit(prompt, *arguments)

    monkeypatch.setattr(engine._session, "submit", refuse)
    with with_keys(engine, request_timeout=100.0) as server:
        for prompts in (["late"], ["Hello", "late"], ["Hello"] * 9 + ["late"]):
            for more in ({}, {"best_of": 2}):
                body = {**SHORT, **more, "prompt": prompts}
                status, answer, headers = server.ask(PATH, body, headers=header("a"))
                assert (status, answer["error"]["message"]) == (429, "it takes too long"), prompts
                assert headers["retry-after"] == "1"
        assert server.ask(PATH, SHORT, headers=header("a"))[0] == 200
    assert all(90 < seconds <= 100 for seconds in times_left)
    wait_until(lambda: at_rest(engine))


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


# ---- threads


class Work:
    """Work of clients in threads, which `end_one` ends."""

    def __init__(self, threads: Any) -> None:
        self.threads = threads
        self.order = list[int]()
        self._tickets = threading.Semaphore(0)

    async def run(self, number: int) -> None:
        """Work for a client in a thread."""
        client.set(number)
        await self.threads.run(self._hold, number)

    def _hold(self, number: int) -> None:
        self.order.append(number)
        assert self._tickets.acquire(timeout=60)

    def end_one(self) -> None:
        """End the work of one thread."""
        self._tickets.release()

    async def until_begun(self, count: int) -> None:
        """Wait until as many threads have begun, ended ones included."""
        with anyio.fail_after(60):
            while len(self.order) < count:
                await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["body", "metrics", "response", "template", "tokenizer"])
async def test_clients_take_turns_at_the_threads(engine: penstock.Engine, kind: str) -> None:
    work = Work(getattr(penstock.server.app(engine).state, f"{kind}_threads"))
    slots = work.threads.slots
    num_threads = slots.num_free
    async with anyio.create_task_group() as group:
        for _ in range(num_threads):
            group.start_soon(work.run, 1)
        await work.until_begun(num_threads)
        for index, number in enumerate((1, 1, 1, 2, 2, 3)):
            group.start_soon(work.run, number)
            while slots.num_waiting == index:
                await anyio.lowlevel.checkpoint()
        for count in range(1, 7):
            work.end_one()
            await work.until_begun(num_threads + count)
        assert work.order[num_threads:] == [2, 3, 1, 2, 1, 1]
        for _ in range(num_threads):
            work.end_one()
    assert slots.num_free == num_threads


@pytest.mark.anyio
async def test_cancelled_work_keeps_its_thread_until_it_ends(engine: penstock.Engine) -> None:
    work = Work(penstock.server.app(engine).state.body_threads)
    async with anyio.create_task_group() as group:
        group.start_soon(work.run, 1)
        await work.until_begun(1)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            assert work.threads.slots.num_free == 0
            work.end_one()
    assert work.threads.slots.num_free == 1


def test_tokenisations_of_a_key_leave_room_for_another(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_continue = threading.Event()

    def wait(*_arguments: object) -> bytes:
        may_continue.wait(60)
        return b"{}"

    def send(key: str) -> socket.socket:
        request = post("/detokenize", {"tokens": [1]})
        data = request.replace(b"\r\n", f"\r\nX-Api-Key: {key}\r\n".encode(), 1)
        connection: socket.socket = server.send(data)
        return connection

    monkeypatch.setattr("penstock.server.tokens._detokenized", wait)
    with with_keys(engine) as server, ExitStack() as stack:
        slots = server.application.state.tokenizer_threads.slots
        waiting = [stack.enter_context(closing(send("a"))) for _ in range(2 + 64)]
        wait_until(lambda: slots.num_waiting == 64)
        status, answer, _ = server.ask("/detokenize", {"tokens": [1]}, headers=header("a"))
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        waiting += [stack.enter_context(closing(send("b"))) for _ in range(16)]
        wait_until(lambda: slots.num_waiting == 64 + 16)
        assert server.ask("/detokenize", {"tokens": [1]}, headers=header("b"))[0] == 429
        may_continue.set()
        for connection in waiting:
            assert b" 200 " in connection.recv(1000)


# ---- connections


def connect(server: Served, address: str, data: bytes = b"") -> socket.socket:
    """A connection from an address of this machine, on which these bytes were sent."""
    connection = socket.create_connection(("127.0.0.1", server.port), 60, source_address=(address, 0))
    connection.sendall(data)
    return connection


@pytest.mark.parametrize("parser", PARSERS)
def test_address_with_most_connections_makes_room(engine: penstock.Engine, parser: str) -> None:
    settings = penstock.server.ServerSettings(max_connections=6)
    protocol: Any = limited_protocol(settings, PARSERS[parser])
    with serving(penstock.server.app(engine, settings), http=protocol) as server, ExitStack() as stack:

        def opened(number: int, data: bytes = b"") -> socket.socket:
            """A connection from an address with this number, which the server has accepted."""
            count = len(groups.get(address := f"127.0.0.{number}", ()))
            connection = stack.enter_context(closing(connect(server, address, data)))
            wait_until(lambda: len(groups.get(address, ())) > count)
            return connection

        groups = protocol.clients._groups
        with held(engine):
            silent = opened(1)
            busy = opened(1, post(PATH, SHORT))
            wait_until(lambda: len(groups["127.0.0.1"].busy) == 1)
            head, body = opened(1, b"GET /ping HT"), opened(1, post(PATH, b"{", length=100))
            wait_until(lambda: list(map(is_received, list(groups["127.0.0.1"].idle))) == [False, True, True])
            with connect(server, "127.0.0.1", PING) as refused:
                assert read(refused) == b"", "it has two thirds, and may not have more"
            opened(6)
            opened(6)
            for closed in (silent, head):
                read_until(opened(2, PING), b'{"status":"ok"}')
                assert read(closed) == b""
            with connect(server, "127.0.0.2", PING) as refused:
                assert read(refused) == b"", "all addresses have two"
            opened(3)
            assert read(body) == b"", "its request is incomplete"
            opened(4)
            opened(5)
            with connect(server, "127.0.0.7", PING) as refused:
                assert read(refused) == b"", "no address has more than one"
        read_until(busy, b'"usage"')
        stack.close()
        wait_until(lambda: (len(groups), protocol.clients._num_connections) == (0, 0))
        assert server.ask("/ping")[0] == 200


def test_connection_with_an_unsent_response_stays_open(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(max_connections=4)
    protocol: Any = limited_protocol(settings, PARSERS["h11"])
    with serving(penstock.server.app(engine, settings), http=protocol) as server, ExitStack() as stack:
        groups = protocol.clients._groups
        slow = stack.enter_context(closing(socket.socket()))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(60)
        slow.connect(("127.0.0.1", server.port))
        wait_until(lambda: len(groups.get("127.0.0.1", ())) == 1)
        [accepted] = groups["127.0.0.1"].idle
        accepted.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow.sendall(post("/detokenize", {"tokens": [40] * 60_000}))
        wait_until(lambda: accepted in groups["127.0.0.1"].idle and unsent(accepted) > 0)
        silent = [stack.enter_context(closing(connect(server, "127.0.0.1"))) for _ in range(2)]
        wait_until(lambda: len(groups["127.0.0.1"]) == 3)
        read_until(stack.enter_context(closing(connect(server, "127.0.0.3", PING))), b'{"status":"ok"}')
        other = stack.enter_context(closing(connect(server, "127.0.0.2", PING)))
        read_until(other, b'{"status":"ok"}')
        assert read(silent[0]) == b"", "it has been idle for less time, but has nothing to send"
        answer = http.client.HTTPResponse(slow)
        answer.begin()
        assert len(json.loads(answer.read())["prompt"]) >= 60_000


def unsent(connection: Any) -> int:
    """The number of bytes that were not yet sent."""
    size: int = connection.transport.get_write_buffer_size()
    return size


def is_received(connection: Any) -> bool:
    """Whether some bytes of a request have come."""
    return bool(connection._num_overhead or connection._requests)


def test_addresses_of_an_ipv6_network_share_connections(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def address_of(transport: Any) -> tuple[str, int]:
        host, port = transport.get_extra_info("peername")
        return host.replace("127.0.0.", "2001:db8::"), port

    monkeypatch.setattr("uvicorn.protocols.http.h11_impl.get_remote_addr", address_of)
    settings = penstock.server.ServerSettings(max_connections=3)
    protocol: Any = limited_protocol(settings, PARSERS["h11"])
    with serving(penstock.server.app(engine, settings), http=protocol) as server, ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(closing(connect(server, "127.0.0.1", PING)))
            read_until(connection, b'{"status":"ok"}')
        refused = stack.enter_context(closing(connect(server, "127.0.0.2", PING)))
        assert read(refused) == b""


# ---- addresses


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:0:1::2", "2001:db8:0:1::/64"),
        ("2001:DB8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::ffff:c000:201", "192.0.2.1"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("unix:", "unix:"),
        ("a:b", "a:b"),
        ("", ""),
    ],
)
def test_client_has_the_first_64_bits_of_an_address(address: str, network: str) -> None:
    assert network_of(address) == network


def test_addresses_of_an_ipv6_network_are_one_client(engine: penstock.Engine) -> None:
    application = penstock.server.app(engine)
    counts = application.state.body_bytes._by_client
    with (
        serving(application, proxy_headers=True, forwarded_allow_ips="*") as server,
        ExitStack() as stack,
    ):
        for address, num_clients in (("2001:db8::1", 1), ("2001:db8::2", 1), ("2001:db8:0:1::1", 2)):
            request = post(PATH, b" " * 1000, length=2000)
            forwarded = f"\r\nX-Forwarded-For: {address}\r\n".encode()
            before = application.state.body_bytes.total
            stack.enter_context(closing(server.send(request.replace(b"\r\n", forwarded, 1))))
            wait_until(lambda: application.state.body_bytes.total == before + 1000)  # noqa: B023
            assert len(counts) == num_clients
