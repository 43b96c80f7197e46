"""Compares `penstock serve` with llama.cpp's server, in turns, using `penstock bench serve`.

    .venv/bin/python benches/server_peers.py --llama-server BIN [--streams 64 256] [--rounds 5] [MODEL]

BIN is llama-server, which `make peers` builds in PEERS/llama/lib/python3.*/site-packages/bin. MODEL is a
GGUF file; `tiny`, the default, is a random model of 4.5 million parameters in Q8_0, and `demo` the demo
model. Both servers read the same file and have two compute threads and a slot for each stream. A round is a
closed loop of twice as many requests as streams. The order of the servers alternates. Prints a line of a
table for each number of streams and server: medians of the rounds, with the least and the largest value.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent / "suite"))
from models import Models

from penstock.bench.serve import Benchmark
from penstock.bench.settings import BenchSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = 16
#: Column, the key of a load point, and the digits.
COLUMNS = (
    ("tokens/s", "output_throughput", 0),
    ("TTFT p50, ms", "p50_ttft_ms", 0),
    ("ITL p50, ms", "p50_itl_ms", 1),
    ("ITL p99, ms", "p99_itl_ms", 1),
    ("server CPU per token, us", "server_cpu_us", 0),
    ("client CPU per token, us", "client_cpu_us", 0),
)


def command_of(server: str, model: Path, streams: int, port: int, options: argparse.Namespace) -> list[str]:
    """The command line of a server."""
    threads = str(options.threads)
    if server == "penstock":
        command = [
            sys.executable,
            "-m",
            "penstock",
            "serve",
            str(model),
            "--port",
            str(port),
            "--threads",
            threads,
        ]
        return [
            *command,
            "--max-num-seqs",
            str(streams),
            "--kv-cache-bytes",
            "1G",
            "--served-model-name",
            "model",
        ]
    command = [options.llama_server, "-m", str(model), "--port", str(port), "-t", threads, "-tb", threads]
    context = str(streams * (PROMPT + options.tokens + 16))
    return [
        *command,
        "-np",
        str(streams),
        "-c",
        context,
        "--threads-http",
        str(streams + 16),
        "-a",
        "model",
        *options.llama_options.split(),
    ]


@contextmanager
def started(server: str, model: Path, streams: int, options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """A server that is ready: its address and process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    site = Path(options.llama_server).resolve().parents[1]
    environment = os.environ | {"LD_LIBRARY_PATH": f"{site / 'lib'}:{site / 'llama_cpp' / 'lib'}"}
    process = subprocess.Popen(  # noqa: S603 - as the arguments say
        command_of(server, model, streams, port, options),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_ready(url):
            if process.poll() is not None:
                raise SystemExit(f"{server} ended")
            time.sleep(0.05)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def is_ready(url: str) -> bool:
    """Whether the model is loaded."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 - http
            return True
    except OSError:
        return False


def cpu_seconds(process: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(url: str, process: int, streams: int, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """One round: the numbers of its load point, and the CPU times."""
    settings = BenchSettings(
        url=url,
        model="model",
        concurrency=[streams],
        num_prompts=2 * streams,
        num_warmups=0,
        input_len=PROMPT,
        output_len=options.tokens,
        random_vocab_size=3000,
        ignore_eos=True,
        seed=number,
    )
    benchmark = Benchmark(settings)
    before = cpu_seconds(process)
    benchmark.run(lambda _point: None, lambda _record: None)
    used = cpu_seconds(process) - before
    [point] = benchmark.points
    tokens = point["total_output_tokens"]
    if point["failed"] or tokens != 2 * streams * options.tokens:
        raise SystemExit(f"{url}: {tokens} tokens; {point['warnings']}")
    client = point["client"]["cpu"] * point["duration"]
    return {**point, "server_cpu_us": used / tokens * 1e6, "client_cpu_us": client / tokens * 1e6}


def shown(values: list[float], digits: int) -> str:
    """The median, and the range."""
    median, least, largest = (
        f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({least}-{largest})"


def run(model: Path, options: argparse.Namespace) -> None:
    """Measure all numbers of streams."""
    print("| streams | server | " + " | ".join(column for column, _, _ in COLUMNS) + " |")
    for streams in options.streams:
        servers = ("penstock", "llama-server")
        rounds: dict[str, list[dict[str, Any]]] = {server: [] for server in servers}
        with ExitStack() as stack:
            running = {
                server: stack.enter_context(started(server, model, streams, options)) for server in servers
            }
            for number in range(1 + options.rounds):
                for server in servers if number % 2 else reversed(servers):
                    rounds[server].append(measure(*running[server], streams, number, options))
        for server, points in rounds.items():
            cells = [shown([point[key] for point in points[1:]], digits) for _, key, digits in COLUMNS]
            print(f"| {streams} | {server} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="tiny", metavar="MODEL")
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--llama-options", default="", help="more options of llama-server")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", default="target/models", help="folder of the random model")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the servers, too
    models = Models(Path(options.folder), Path(sys.executable), Path(sys.executable))
    if options.model == "tiny":
        model = models.gguf("tiny", "Q8_0")
    else:
        model = models.demo() if options.model == "demo" else Path(options.model)
    run(model, options)


if __name__ == "__main__":
    main()
