"""Start time and memory of `penstock runtime`, before and after 1,000 requests.

python benches/runtime_footprint.py
"""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PATHS = ("/healthz", "/ready", "/metrics", "/v1/models", "/v1/model/list")
REQUESTS = 1000
STARTS = 12


def memory_of(pid: int) -> dict[str, int]:
    """Resident memory, its peak, and proportional memory, in MiB."""
    text = "".join(Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "smaps_rollup"))
    values = {name: re.search(rf"{name}:\s+(\d+)", text) for name in ("VmRSS", "VmHWM", "Pss")}
    return {name: int(found[1]) // 1024 for name, found in values.items() if found}


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started() -> Iterator[tuple[subprocess.Popen[bytes], int, float]]:
    """A runtime: its process, its port, and the seconds until it listened."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "penstock", "runtime", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:  # noqa: S603 - a fixed command
        try:
            assert process.stderr is not None  # noqa: S101 - it is a pipe
            line = process.stderr.readline()
            seconds = time.perf_counter() - begin
            threading.Thread(target=process.stderr.read, daemon=True).start()
            found = re.search(rb":(\d+)\s*$", line)
            if found is None:
                raise SystemExit(line.decode())
            yield process, int(found[1]), seconds
        finally:
            process.terminate()


def ask(connection: http.client.HTTPConnection, path: str) -> None:
    """Send a request and read the response."""
    connection.request("GET", path)
    connection.getresponse().read()


def shown(values: list[float]) -> str:
    """The median and the range."""
    return f"{median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Print the figures."""
    times: dict[str, list[float]] = {"listening": [], "first response": [], "CPU time until then": []}
    for number in range(STARTS):
        begin = time.perf_counter()
        with started() as (process, port, seconds):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            ask(connection, "/healthz")
            values = (seconds, time.perf_counter() - begin, cpu_seconds(process.pid))
            for name, value in zip(times, values, strict=True):
                times[name].append(value)
            if number == STARTS - 1:
                print("after 1 request:", memory_of(process.pid))
                for index in range(REQUESTS):
                    ask(connection, PATHS[index % len(PATHS)])
                print(f"after {REQUESTS + 1} requests:", memory_of(process.pid))
    for name, found in times.items():
        print(f"{name}: {shown(found)}, {STARTS} starts")


if __name__ == "__main__":
    main()
