"""Sends mixed traffic to `penstock serve`; checks that its memory, blocks and descriptors stay flat.

    .venv/bin/python benches/server_soak.py [--minutes 10] [--clients 24] [--interval 10] [PATH]

PATH is a checkpoint; without one, the demo model. The clients run in this process: chats, completions and
Anthropic's messages, whole and streamed, batches, slow readers, disconnects, pipelined, invalid and malformed
requests, bursts of connections. A line every `--interval` seconds has the memory of the server in MiB
(without shared files), the blocks of running requests, descriptors, and the requests so far. The verdict at
the end is "passed", with exit status 0, if no response was wrong, nothing is left of the requests, and the
memory grew by less than `--slack` MiB from the second to the last quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

MODEL = "soak"
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
SETTLE_SECONDS = 10
OK = 200
#: Values that are 0 without requests.
LEFT = ("running", "waiting", "blocks", "bodies")
#: Statuses that are right under load.
BUSY = {429, 503}


class Failure(Exception):  # noqa: N818 - a wrong response, not an error of the client
    """A response that is wrong."""


class Client:
    """Sends random requests, one after the other."""

    def __init__(self, port: int, seed: int, counts: Counter[str]) -> None:
        self.port = port
        self.chance = random.Random(seed)  # noqa: S311 - test data
        self.counts = counts
        self.kinds = [
            *[self.whole] * 6,
            *[self.stream] * 8,
            *[self.disconnect] * 4,
            self.slow,
            self.invalid,
            self.garbage,
            self.pipeline,
            self.burst,
        ]

    async def run(self, deadline: float) -> None:
        """Send requests until the deadline."""
        while time.monotonic() < deadline:
            kind = self.chance.choice(self.kinds)
            try:
                async with asyncio.timeout(120):
                    await kind()
            except (OSError, TimeoutError) as error:
                raise Failure(f"{kind.__name__}: {error!r}") from error
            self.counts[kind.__name__] += 1

    def happens(self, probability: float) -> bool:
        """Whether something random happens."""
        return self.chance.random() < probability

    def body(self, *, stream: bool) -> tuple[str, dict[str, Any]]:
        """A valid request, and its path."""
        chance = self.chance
        fields: dict[str, Any] = {"max_tokens": chance.randint(1, 60), "stream": stream, "ignore_eos": True}
        if self.happens(0.5):
            count = chance.choice([1, 1, 1, 4])
            prompts = [chance.choices(range(256), k=chance.randint(1, 150)) for _ in range(count)]
            extra = chance.choice([{}, {"n": 3}, {"logprobs": 2}, {"stop": ["the", "x"]}, {"seed": 7}])
            return COMPLETIONS, {**fields, **extra, "prompt": prompts}
        words = " ".join(
            chance.choices(["sky", "blue", "stone", "water", "why", "is"], k=chance.randint(1, 40))
        )
        messages = [{"role": "user", "content": words}]
        if self.happens(0.3):
            return MESSAGES, {**fields, "model": MODEL, "messages": messages}
        return CHAT, {**fields, "messages": messages}

    async def open(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which these bytes were sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def exchange(self, data: bytes) -> tuple[int, bytes]:
        """The status and the rest of a response that ends the connection."""
        reader, writer = await self.open(data)
        received = await reader.read(-1)
        writer.close()
        if not received.startswith(b"HTTP/1.1 "):
            raise Failure(f"no response: {received[:100]!r}")
        return int(received[9:12]), received

    async def whole(self) -> None:
        """A request without a stream."""
        path, body = self.body(stream=False)
        status, received = await self.exchange(request(path, body))
        if status not in {OK, *BUSY} or not received.endswith(b"}"):
            raise Failure(f"{path} {body}: {received[:500]!r}")

    async def stream(self) -> None:
        """A stream that is read to its end."""
        path, body = self.body(stream=True)
        status, received = await self.exchange(request(path, body))
        end = b"message_stop" if path == MESSAGES else b"data: [DONE]"
        if status not in {OK, *BUSY} or (status == OK and end not in received):
            raise Failure(f"{path} {body}: {received[-500:]!r}")

    async def slow(self) -> None:
        """A stream that is read slowly."""
        path, body = self.body(stream=True)
        reader, writer = await self.open(request(path, body))
        while await reader.read(500):  # noqa: ASYNC110 - a slow reader
            await asyncio.sleep(0.02)
        writer.close()

    async def disconnect(self) -> None:
        """A request; its client closes the connection, or resets it."""
        path, body = self.body(stream=self.happens(0.5))
        data = request(path, {**body, "max_tokens": 400})
        _, writer = await self.open(data[: self.chance.choice([10, len(data) - 5, len(data), len(data)])])
        if self.happens(0.5):
            writer.write(b"GET /ping HTTP/1.1\r\n")
        await asyncio.sleep(self.chance.random() * 0.1)
        if self.happens(0.5):
            writer.transport.abort()
        else:
            writer.close()

    async def invalid(self) -> None:
        """A request with an invalid field."""
        path, body = self.body(stream=self.happens(0.5))
        bad = self.chance.choice([{"temperature": -1}, {"max_tokens": 0}, {"top_p": 7}, {"model": "none"}])
        status, received = await self.exchange(request(path, {**body, **bad}))
        if status not in {400, 404, *BUSY}:
            raise Failure(f"{path} {bad}: {received[:500]!r}")

    async def garbage(self) -> None:
        """Random bytes."""
        _, writer = await self.open(self.chance.randbytes(self.chance.randint(1, 3000)))
        writer.close()

    async def pipeline(self) -> None:
        """Several requests at once."""
        last = request(*self.body(stream=False))
        ping = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
        status, received = await self.exchange(ping * 3 + last)
        if received.count(b"HTTP/1.1 ") != 4:  # noqa: PLR2004
            raise Failure(f"pipeline: {status} {received[:500]!r}")

    async def burst(self) -> None:
        """Many connections at once, without a request."""
        for _, writer in await asyncio.gather(*(self.open(b"") for _ in range(50))):
            writer.close()


def request(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a request that ends the connection."""
    content = json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Connection: close",
    )
    return "\r\n".join((*lines, f"Content-Length: {len(content)}", "", "")).encode() + content


class Probe:
    """Reads the resources of the server."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.client = Client(port, 0, Counter())
        self.process = process

    async def read(self) -> dict[str, float]:
        """Memory in MiB, descriptors, blocks, running and waiting requests, bytes of bodies."""
        folder = Path(f"/proc/{self.process.pid}")
        _, resident, shared, *_ = map(int, (folder / "statm").read_text().split())
        text = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        _, metrics = await self.client.exchange(text)

        def value(name: str) -> float:
            found = re.search(rf"^{name}(?:{{.*}})? (\S+)$".encode(), metrics, re.MULTILINE)
            if found is None:
                raise Failure(f"no metric {name}")
            return float(found[1])

        return {
            "memory": (resident - shared) * os.sysconf("SC_PAGE_SIZE") / (1 << 20),
            "descriptors": len(list((folder / "fd").iterdir())),
            "blocks": value("penstock:blocks_used"),
            "running": value("penstock:running"),
            "waiting": value("penstock:waiting"),
            "bodies": value("http_body_bytes"),
        }


async def soak(probe: Probe, port: int, options: argparse.Namespace) -> list[str]:
    """Run the clients; returns what is wrong."""
    counts: Counter[str] = Counter()
    rows: list[dict[str, float]] = []

    async def watch() -> None:
        while time.monotonic() < deadline:
            await asyncio.sleep(options.interval)
            rows.append(await probe.read())
            print(line(time.monotonic() - begin, rows[-1], counts.total()), flush=True)

    problems: list[str] = []
    clients = [Client(port, 1 + seed, counts) for seed in range(options.clients)]
    for kind in clients[0].kinds:  # descriptors that are opened once
        await kind()
    before = await settled(probe)
    begin = time.monotonic()
    deadline = begin + options.minutes * 60
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            for client in clients:
                group.create_task(client.run(deadline))
    except* (Failure, OSError) as errors:
        problems += [repr(error) for error in errors.exceptions]
    after = await settled(probe)
    print(line(time.monotonic() - begin, after, counts.total()), dict(counts.most_common()))
    for name in LEFT:
        if after[name]:
            problems.append(f"{name} is {after[name]:g} at the end")
    if after["descriptors"] > before["descriptors"] + 2:
        problems.append(f"descriptors grew from {before['descriptors']:g} to {after['descriptors']:g}")
    memory = [row["memory"] for row in (*rows, after)]
    first, last = (statistics.median(part) for part in (quarter(memory, 1), quarter(memory, 3)))
    print(f"median memory: {first:.1f} MiB in the second quarter, {last:.1f} MiB in the last one")
    if last - first > options.slack:
        problems.append(f"memory grew by {last - first:.1f} MiB")
    return problems


async def settled(probe: Probe) -> dict[str, float]:
    """The resources when no request is left, or after some seconds."""
    row = await probe.read()
    for _ in range(SETTLE_SECONDS * 10):
        await asyncio.sleep(0.1)
        row = await probe.read()
        if not any(row[name] for name in LEFT):
            break
    return row


def quarter(values: list[float], number: int) -> list[float]:
    """One quarter of the values, not empty."""
    return values[len(values) * number // 4 : len(values) * (number + 1) // 4] or values[-1:]


def line(seconds: float, row: dict[str, float], num_requests: int) -> str:
    """One line of the record."""
    shown = ", ".join(
        f"{name} {value:.1f}" if name == "memory" else f"{name} {value:g}" for name, value in row.items()
    )
    return f"{seconds:6.0f} s: {shown}, requests {num_requests}"


async def run(options: argparse.Namespace) -> int:
    """Start the server, soak it, and end it."""
    code = "from penstock.cli import main; main()"
    names = ("--served-model-name", MODEL, "--port", "0", "--no-access-log", "--max-waiting", "64")
    command = [sys.executable, "-c", code, "serve", str(options.path), *names, "--kv-cache-bytes", "64M"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:  # noqa: ASYNC220, S603 - one process
        assert process.stderr is not None  # noqa: S101 - for the type
        found = next(filter(None, (re.search(rb"listening on .*:(\d+)", row) for row in process.stderr)))
        port = int(found[1])
        log = asyncio.create_task(asyncio.to_thread(process.stderr.read))
        probe = Probe(port, process)
        health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        while (await probe.client.exchange(health))[0] != OK:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
        try:
            problems = await soak(probe, port, options)
        finally:
            process.send_signal(signal.SIGTERM)
        text = await log
    if process.wait():
        problems.append(f"the exit status is {process.returncode}")
    if b"Traceback" in text or b" ERROR " in text:
        problems.append(text[-2000:].decode())
    print(*problems, "failed" if problems else "passed", sep="\n")
    return 1 if problems else 0


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", nargs="?", metavar="PATH")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--interval", type=float, default=10)
    parser.add_argument("--slack", type=float, default=8)
    options = parser.parse_args()
    if options.path is None:
        from penstock.demo import model_path

        options.path = model_path()
    sys.exit(asyncio.run(run(options)))


if __name__ == "__main__":
    main()
