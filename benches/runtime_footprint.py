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
from pathlib import Path

PATHS = ("/healthz", "/ready", "/metrics", "/v1/models", "/v1/model/list")
REQUESTS = 1000


def memory_of(pid: int) -> dict[str, int]:
    """Resident and proportional memory, in MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    values = {name: re.search(rf"{name}:\s+(\d+)", text) for name in ("Rss", "Pss")}
    return {name: int(found[1]) // 1024 for name, found in values.items() if found}


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the figures."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "penstock", "runtime", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:  # noqa: S603 - a fixed command
        try:
            assert process.stderr is not None  # noqa: S101 - it is a pipe
            line = process.stderr.readline()
            print(f"listening: {time.perf_counter() - begin:.2f} s")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            found = re.search(rb":(\d+)\s*$", line)
            if found is None:
                raise SystemExit(line.decode())
            print("at the start:", memory_of(process.pid))
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            seconds = time.perf_counter() - begin
            print(f"first response: {seconds:.2f} s, {cpu_seconds(process.pid):.2f} s of CPU time")
            for number in range(REQUESTS):
                connection.request("GET", PATHS[number % len(PATHS)])
                connection.getresponse().read()
            print(f"after {REQUESTS} requests:", memory_of(process.pid))
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
