"""The end of a server process under load: no accepted request is lost."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from support.api.engines import wait_until
from support.server.edge import read
from support.server.process import Process, started
from support.server.serving import post

pytestmark = pytest.mark.needs("signals")

PATH = "/v1/completions"
LONGER = '{"max_position_embeddings": 8192}'
TYPE = {"Content-Type": "application/json"}


class Client:
    """Sends requests one after the other until nothing listens, and counts their outcomes."""

    def __init__(self, server: Process, *, streams: bool, keeps_alive: bool) -> None:
        self.server = server
        self.streams = streams
        self.keeps_alive = keeps_alive
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        """Send requests."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        while True:
            is_new = connection.sock is None
            try:
                if is_new:
                    connection.connect()
                outcome = self._ask(connection)
            except ConnectionRefusedError:
                return
            except (OSError, http.client.HTTPException) as error:
                # The server can close a connection between two requests while the second one is under way.
                outcome = f"lost: {error!r}" if is_new else "closed between requests"
                connection.close()
            self.outcomes[outcome] += 1
            if not self.keeps_alive:
                connection.close()

    def _ask(self, connection: http.client.HTTPConnection) -> str:
        body = {"prompt": [1, 2], "max_tokens": 60, "ignore_eos": True, "stream": self.streams}
        connection.request("POST", PATH, json.dumps(body), TYPE)
        response = connection.getresponse()
        content = response.read()
        if response.status == 503:
            return "refused" if b"the server is stopping" in content else f"lost: {content!r}"
        end = b"data: [DONE]\n\n" if self.streams else b"}"
        is_complete = response.status == 200 and content.endswith(end) and b'"length"' in content
        return "complete" if is_complete else f"lost: {response.status} {content[-200:]!r}"


@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "plain"])
def test_termination_under_load_loses_no_request(tiny_model: Path, *, is_fast: bool) -> None:
    with started(tiny_model, "--config-overrides", LONGER, is_fast=is_fast) as server:
        clients = [Client(server, streams=bool(i % 2), keeps_alive=i % 4 < 2) for i in range(48)]
        threads = [threading.Thread(target=client.run) for client in clients]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(client.outcomes["complete"] for client in clients) > 100)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert server.end() == 0
    outcomes: Counter[str] = sum((client.outcomes for client in clients), Counter())
    between = outcomes.pop("closed between requests", 0)
    assert outcomes.keys() == {"complete", "refused"}, outcomes
    assert between < 5


def test_deadline_is_status_503_for_requests_without_a_stream(tiny_model: Path) -> None:
    with started(tiny_model, "--config-overrides", LONGER, "--drain-timeout", 0) as server:
        body = {"prompt": [1, 2], "max_tokens": 8000, "ignore_eos": True, "n": 32}
        with server.send(post(PATH, body)) as connection:
            wait_until(partial(is_running, server))
            server.process.send_signal(signal.SIGTERM)
            received = read(connection)
        assert received.startswith(b"HTTP/1.1 503 ")
        assert b"the server is stopping" in received
        assert server.end() == 0


def is_running(server: Process) -> bool:
    """Whether the engine runs 32 sequences."""
    return any(
        line.startswith(b"vllm:num_requests_running{") and float(line.split()[-1]) == 32
        for line in server.ask("/metrics")[1].splitlines()
    )


@pytest.mark.needs("proc")
def test_connection_without_a_request_can_send_one_at_the_end(tiny_model: Path) -> None:
    with started(tiny_model) as server, server.send(b"") as connection:
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_listening(server.port))
        connection.sendall(post(PATH, {"prompt": [1], "max_tokens": 1}))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        assert server.end() == 0


def is_listening(port: int) -> bool:
    """Whether the system has a listening socket with this port, without connecting to it."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)
