"""Measures the load generator of `penstock bench serve` alone: the tokens per second that one core can take.

    .venv/bin/python benches/load_generator.py [--streams 64 256] [--rounds 5] [--tokens 256]

A stub in another process sends events of one token, each in a write of its own: in steps, with a pause
after an event of each stream, or without a pause, so that a read has several events. `scan` is the load
generator, which searches events for text; `decode` decodes the JSON of each instead. Prints the medians of
the rounds: events per second, CPU time per event, and the events per second of a whole core.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

from penstock.bench import sse
from penstock.bench.serve import Benchmark
from penstock.bench.settings import BenchSettings

CHOICE = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}
FIELDS = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1790000000, "model": "model"}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: str) -> bytes:
    """An event as a chunk of a response."""
    event = f"data: {data}\n\n".encode()
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


EVENT = chunk(json.dumps({**FIELDS, "choices": [CHOICE], "usage": None}))


def serve(streams: int, tokens: int, pause: float) -> None:
    """The stub: answers groups of requests, an event to each in turn. Prints its port."""
    usage = {"prompt_tokens": 16, "completion_tokens": tokens, "total_tokens": 16 + tokens}
    last = chunk(json.dumps({**FIELDS, "choices": [], "usage": usage})) + chunk("[DONE]") + b"0\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            group = [listener.accept()[0] for _ in range(streams)]
            for connection in group:
                select.select([connection], [], [])
                connection.recv(1 << 16)
                connection.sendall(HEAD)
            for _ in range(tokens):
                for connection in group:
                    connection.sendall(EVENT)
                time.sleep(pause)
            for connection in group:
                connection.sendall(last)
                connection.close()


def decodes_output(event: bytes) -> bool:
    """Whether an event has text, by decoding it."""
    if not event.startswith(b"data: {"):
        return False
    choices = json.loads(event.removeprefix(b"data: "))["choices"]
    return bool(choices and choices[0]["text"])


def measure(streams: int, tokens: int, pause: float, rounds: int) -> dict[str, float]:
    """The medians of the rounds."""
    command = [sys.executable, __file__, "--stub", str(streams), str(tokens), str(pause)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stub:  # noqa: S603 - this file
        port = int(stub.stdout.readline())  # type: ignore[union-attr]
        points: list[dict[str, Any]] = []
        for _ in range(1 + rounds):
            benchmark = Benchmark(
                BenchSettings(
                    url=f"http://127.0.0.1:{port}",
                    model="model",
                    concurrency=[streams],
                    num_prompts=streams,
                    num_warmups=0,
                    input_len=16,
                )
            )
            benchmark.run(lambda _point: None, lambda _record: None)
            points += benchmark.points
        stub.terminate()
    if any(point["output_events"] != streams * tokens for point in points):
        raise SystemExit(str(points[0]["warnings"]))
    rates = [point["output_throughput"] for point in points[1:]]
    times = [point["client"]["cpu"] / point["output_throughput"] for point in points[1:]]
    return {"rate": statistics.median(rates), "cpu": statistics.median(times)}


def main() -> None:
    """Parse the arguments and run."""
    if sys.argv[1:2] == ["--stub"]:
        serve(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    scans_output = sse._has_output  # noqa: SLF001 - replaced for the comparison
    for name, has_output in (("scan", scans_output), ("decode", decodes_output)):
        sse._has_output = has_output  # type: ignore[assignment] # noqa: SLF001
        for title, pause in (("steps", 0.01), ("no pause", 0.0)):
            for streams in options.streams:
                found = measure(streams, options.tokens, pause, options.rounds)
                print(
                    f"{name}, {title}, {streams} streams: {found['rate']:,.0f} events/s, "
                    f"{found['cpu'] * 1e6:.1f} us of CPU per event, {1 / found['cpu']:,.0f} events/s a core",
                    flush=True,
                )


if __name__ == "__main__":
    main()
