"""Measures many concurrent streams over HTTP against the same load in the process.

    .venv/bin/python benches/server_streams.py [--streams 64 256] [--rounds 5] [--http h11] [PATH]

PATH is a checkpoint; without one, the demo model. The server runs in this process, the clients in another.
They parse nothing: they count events. For each number of streams it prints the medians of the rounds: tokens
per second, the time to the first token, the 99th percentile of the time between two events of a stream, and
the CPU time per token of each kind of thread. `python` is the event loop with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import streams
import uvicorn

import penstock
import penstock.server


class Client(asyncio.Protocol):
    """One stream; `times` has the arrival of each event."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.times: list[float] = []
        self.received = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        self.transport = transport
        self.start = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Count the events."""
        now = time.perf_counter()
        self.times += [now] * data.count(b"data: {")
        self.received = self.received[-16:] + data
        if b"[DONE]" in self.received:
            self.transport.close()

    def connection_lost(self, _exc: Exception | None) -> None:
        """The stream has ended, or the connection is broken."""
        if not self.done.done():
            self.done.set_result(b"[DONE]" in self.received)


def request_bytes(prompt: list[int], port: int) -> bytes:
    """A streaming completion."""
    fields = {"temperature": 0.0, "ignore_eos": True, "max_tokens": streams.TOKENS, "stream": True}
    body = json.dumps({"prompt": prompt, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def send_round(port: int, count: int, number: int, vocabulary: int) -> dict[str, float]:
    """One round of streams, in the process of the clients."""
    chance = random.Random(1000 + number)  # noqa: S311 - prompts
    requests = [
        request_bytes(chance.choices(range(vocabulary), k=streams.PROMPT), port) for _ in range(count)
    ]
    loop = asyncio.get_running_loop()
    start = time.perf_counter()

    async def send(request: bytes) -> Client:
        _, client = await loop.create_connection(lambda: Client(request), "127.0.0.1", port)
        if not await client.done:
            raise SystemExit("a stream broke")
        return client

    clients = await asyncio.gather(*map(send, requests))
    seconds = time.perf_counter() - start
    gaps = sorted(after - before for client in clients for before, after in pairwise(client.times))
    return {
        "tokens/s": count * streams.TOKENS / seconds,
        "first token, ms": statistics.median(client.times[0] - client.start for client in clients) * 1e3,
        "p99 gap, ms": gaps[len(gaps) * 99 // 100] * 1e3,
    }


def clients(port: int, count: int, rounds: int, vocabulary: int) -> None:
    """The process of the clients: a line for each round, when a line comes in."""
    for number in range(rounds):
        sys.stdin.readline()
        print(json.dumps(asyncio.run(send_round(port, count, number, vocabulary))), flush=True)


async def measure(engine: penstock.Engine, count: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """Run all rounds over HTTP."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        application = penstock.server.app(engine)
        config = uvicorn.Config(application, log_level="error", http=options.http, access_log=False)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listener]))
        arguments = (listener.getsockname()[1], count, 1 + options.rounds, engine.info.vocabulary_size)
        command = [sys.executable, __file__, "--clients", *map(str, arguments)]
        child = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        found = []
        for _ in range(1 + options.rounds):
            before = streams.cpu_seconds()
            child.stdin.write(b"\n")  # type: ignore[union-attr]
            line = await child.stdout.readline()  # type: ignore[union-attr]
            tokens = count * streams.TOKENS
            cpu = {
                name: (after - before.get(name, 0.0)) / tokens
                for name, after in streams.cpu_seconds().items()
            }
            found.append(
                json.loads(line) | {f"{name}, us": used * 1e6 for name, used in cpu.items() if used > 0}
            )
        server.should_exit = True
        await task
        await child.wait()
    return found[1:]


def show(title: str, rounds: list[Any]) -> float:
    """Print the medians; returns the tokens per second."""
    names = dict.fromkeys(name for measured in rounds for name in measured)
    medians = {name: statistics.median(measured.get(name, 0.0) for measured in rounds) for name in names}
    print(f"{title}:", ", ".join(f"{name} {value:.1f}" for name, value in medians.items()))
    return medians["tokens/s"]


async def run(options: argparse.Namespace) -> None:
    """Run all numbers of streams, each in the process and over HTTP in turns."""
    for count in options.streams:
        config: dict[str, Any] = {
            "threads": options.threads,
            "max_num_seqs": count,
            "kv_cache_bytes": 1 << 28,
        }
        async with penstock.Engine(options.path, **config) as engine:
            direct = [await streams.measure(engine, count, number) for number in range(1 + options.rounds)][
                1:
            ]
            served = await measure(engine, count, options)
        ratio = show(f"{count:4} streams over HTTP", served) / show(f"{count:4} streams in process", direct)
        print(f"{count:4} streams: ratio {ratio:.2f}")


def main() -> None:
    """Parse the arguments and run."""
    if sys.argv[1:2] == ["--clients"]:
        clients(*map(int, sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", nargs="?", metavar="PATH")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--http", default="auto")
    parser.add_argument("--loop", default="auto")
    options = parser.parse_args()
    if options.path is None:
        from penstock.demo import model_path

        options.path = model_path()
    config = uvicorn.Config(lambda: None, loop=options.loop)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(run(options))


if __name__ == "__main__":
    main()
