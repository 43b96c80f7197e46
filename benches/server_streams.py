"""Measures many concurrent streams over HTTP against the same load in the process.

    .venv/bin/python benches/server_streams.py [--streams 64 256] [--rounds 5] [--http h11] [PATH]

PATH is a checkpoint; without one, the demo model. The server runs in this process, the clients in another.
They count events, with plain sockets. For each number of streams it prints the medians of the rounds: tokens
per second, the time to the first token, the 99th percentile of the time between two events of a stream, and
the CPU time per token of each kind of thread. `python` is the event loop with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import select
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


def request_bytes(prompt: list[int], port: int) -> bytes:
    """A streaming completion."""
    fields = {"temperature": 0.0, "ignore_eos": True, "max_tokens": streams.TOKENS, "stream": True}
    body = json.dumps({"prompt": prompt, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def send_round(port: int, count: int, number: int, vocabulary: int) -> dict[str, float]:
    """One round of streams, in the process of the clients: one thread with plain sockets."""
    chance = random.Random(1000 + number)  # noqa: S311 - prompts
    requests = [
        request_bytes(chance.choices(range(vocabulary), k=streams.PROMPT), port) for _ in range(count)
    ]
    times: dict[int, list[float]] = {}
    start, cpu = time.perf_counter(), time.thread_time()
    with select.epoll() as poll:
        sockets = {}
        for request in requests:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(request)
            sockets[connection.fileno()] = connection
            times[connection.fileno()] = []
            poll.register(connection.fileno(), select.EPOLLIN)
        while sockets:
            for descriptor, _ in poll.poll():
                data = sockets[descriptor].recv(1 << 16)
                times[descriptor] += [time.perf_counter()] * data.count(b"data: {")
                if not data:
                    poll.unregister(descriptor)
                    sockets.pop(descriptor).close()
    seconds, cpu = time.perf_counter() - start, time.thread_time() - cpu
    gaps = sorted(after - before for stamps in times.values() for before, after in pairwise(stamps))
    return {
        "tokens/s": count * streams.TOKENS / seconds,
        "first token, ms": statistics.median(stamps[0] - start for stamps in times.values()) * 1e3,
        "p99 gap, ms": gaps[len(gaps) * 99 // 100] * 1e3,
        "clients, us": cpu / (count * streams.TOKENS) * 1e6,
    }


def clients(port: int, count: int, rounds: int, vocabulary: int) -> None:
    """The process of the clients: a line for each round, when a line comes in."""
    for number in range(rounds):
        sys.stdin.readline()
        print(json.dumps(send_round(port, count, number, vocabulary)), flush=True)


async def measure(
    engine: penstock.Engine, count: int, options: argparse.Namespace
) -> tuple[list[Any], list[Any]]:
    """Rounds in the process and over HTTP, in turns, after a warm-up of each."""
    direct, served = [], []
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        application = penstock.server.app(engine)
        config = uvicorn.Config(application, log_level="error", http=options.http, access_log=False)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listener]))
        arguments = (listener.getsockname()[1], count, 1 + options.rounds, engine.info.vocabulary_size)
        command = [sys.executable, __file__, "--clients", *map(str, arguments)]
        child = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for number in range(1 + options.rounds):
            direct.append(await streams.measure(engine, count, number))
            before = streams.cpu_seconds()
            child.stdin.write(b"\n")  # type: ignore[union-attr]
            line = await child.stdout.readline()  # type: ignore[union-attr]
            tokens = count * streams.TOKENS
            cpu = {
                f"{name}, us": (after - before.get(name, 0.0)) / tokens * 1e6
                for name, after in streams.cpu_seconds().items()
            }
            served.append(json.loads(line) | {name: used for name, used in cpu.items() if used > 0})
        server.should_exit = True
        await task
        await child.wait()
    return direct[1:], served[1:]


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
            direct, served = await measure(engine, count, options)
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
