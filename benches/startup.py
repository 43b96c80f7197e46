"""Start-up and memory of a model: loaded, and converted. Each run is a process of its own.

    python benches/startup.py MODEL [--tokenizer FILE] [--runs 3] [--quantization int8 int4]

Prints the median time from the call of `Engine` until it is open ("ready"), until the first token of a prompt
of 16 tokens, and from the start of the process; and the peak of the resident memory (VmHWM). The files are
in the page cache. Results depend on what else the machine does: run it alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import penstock

CHILD = """
import json, re, sys, time
start = float(sys.argv[1])
import penstock
imported = time.time()
options = json.loads(sys.argv[3])
with penstock.Engine(sys.argv[2], **options) as engine:
    ready = time.time()
    engine.blocking.generate(list(range(1, 17)), max_tokens=1, ignore_eos=True)
    first = time.time()
    peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
    weights = engine.info.memory.weights
row = {"ready": ready - imported, "first token": first - imported, "process": first - start}
print(json.dumps(row | {"peak MB": peak / 1000, "weights MB": weights / 1e6}))
"""


def run(model: Path, options: dict[str, Any], runs: int) -> dict[str, float]:
    """The median of each figure."""
    rows = []
    for _ in range(runs):
        command = [sys.executable, "-c", CHILD, str(time.time()), str(model), json.dumps(options)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - this interpreter
        rows.append(json.loads(done.stdout))
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    """Print a table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokenizer", help="of a model without one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache-bytes", type=int, default=24 << 20)
    parser.add_argument("--quantization", nargs="+", default=["int8", "int4"])
    arguments = parser.parse_args()
    options = {"threads": arguments.threads, "kv_cache_bytes": arguments.kv_cache_bytes}
    if arguments.tokenizer:
        options["tokenizer"] = arguments.tokenizer
    print("| model | ready, s | first token, s | with the process, s | peak RSS, MB | weights, MB |")
    print("|---|---|---|---|---|---|")

    def show(name: str, model: Path, **more: Any) -> None:
        row = run(model, options | more, arguments.runs)
        figures = [f"{row[name]:.2f}" for name in ("ready", "first token", "process")]
        figures += [f"{row[name]:.0f}" for name in ("peak MB", "weights MB")]
        print(f"| {name} | {' | '.join(figures)} |", flush=True)

    for quantization in arguments.quantization:
        with tempfile.TemporaryDirectory(dir=arguments.model.parent) as folder:
            converted = Path(folder) / "converted"
            penstock.convert(arguments.model, converted, quantization=quantization)
            show(f"{quantization}, loaded", arguments.model, quantization=quantization)
            show(f"{quantization}, converted", converted)


if __name__ == "__main__":
    main()
