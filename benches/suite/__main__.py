"""Measures Penstock and other engines on the same models, in turns, against the limits of the machine.

    .venv/bin/python benches/suite [--quick] [--rows 'int8/*' ...] [--engines penstock llama.cpp ...]
                                   [--rounds N] [--append] [--peers DIR] [--machine NAME] [--kernels PROGRAM]

A round runs every engine once, each turn in a new process; every second round has the reverse order. The
limits of the machine are measured before and after each round of a case. Results are merged into
`benches/record/MACHINE/suite.json`: a row that is measured again replaces its old results, or adds to them
with `--append`. `suite.md` and `suite.svg` are made from that file. Engines that are not installed are
skipped; `make peers` installs them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import Probe, cpu_name
from models import REPOSITORY, Models

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
ROWS = (
    "ready",
    "prefill",
    "decode-1",
    "rss",
    "cached",
    "decode-2",
    "decode-4",
    "decode-8",
    "decode-16",
    "decode-32",
)
QUICK = ("*/prefill", "*/decode-1", "*/decode-8", "streams/streams-64")
# The package of each engine, and the virtual environment that has it.
PACKAGES = {
    "penstock": ("penstock", "penstock"),
    "penstock-bf16": ("penstock", "penstock"),
    "llama.cpp": ("llama-cpp-python", "llama"),
    "llama-server": ("llama-cpp-python", "llama"),
    "openvino": ("openvino-genai", "python"),
    "ctranslate2": ("ctranslate2", "python"),
    "onnxruntime": ("onnxruntime-genai", "python"),
    "transformers": ("transformers", "python"),
}


@dataclass(frozen=True)
class Case:
    """Engines with the same model and about the same bits per weight."""

    model: str
    rows: tuple[str, ...]
    # The model file and the type of its weights, for each engine.
    engines: dict[str, tuple[Callable[[], Path], str]]
    max_rounds: int = 100


def cases(models: Models) -> dict[str, Case]:
    """All cases."""
    name = "half-billion"

    def gguf(kind: str) -> tuple[Callable[[], Path], str]:
        return lambda: models.gguf(name, kind), kind

    def penstock(weights: str, **options: Any) -> tuple[Callable[[], Path], str]:
        return lambda: models.converted(name, weights, options), weights

    def other(convert: Callable[[str, str], Path], weights: str) -> tuple[Callable[[], Path], str]:
        return lambda: convert(name, weights), weights

    checkpoint = (lambda: models.checkpoint(name), "bf16")
    tiny = (lambda: models.checkpoint("tiny"), "float32")
    tiny_gguf = (lambda: models.gguf("tiny", "Q8_0"), "Q8_0")
    demo = (models.demo, "q4_1")
    return {
        "bf16": Case(
            name,
            ROWS,
            {
                "penstock": checkpoint,
                "penstock-bf16": checkpoint,
                "llama.cpp": gguf("BF16"),
                "transformers": checkpoint,
            },
        ),
        "int8": Case(
            name,
            ROWS,
            {
                "penstock": penstock("int8"),
                "llama.cpp": gguf("Q8_0"),
                "openvino": other(models.openvino, "int8"),
                "ctranslate2": other(models.ctranslate2, "int8"),
                "onnxruntime": other(models.onnxruntime, "int8"),
            },
        ),
        "int4": Case(
            name,
            ROWS,
            {
                "penstock": penstock("int4"),
                "llama.cpp": gguf("Q4_0"),
                "openvino": other(models.openvino, "int4"),
                "onnxruntime": other(models.onnxruntime, "int4"),
            },
        ),
        # The same file for both.
        "q4_0": Case(name, ROWS, {"penstock": gguf("Q4_0"), "llama.cpp": gguf("Q4_0")}),
        # The groups of OpenVINO's file.
        "int4-g128": Case(
            name,
            ROWS,
            {
                "penstock": penstock("int4", group_size=128, symmetric=True),
                "openvino": other(models.openvino, "int4"),
            },
        ),
        "demo": Case(
            "demo", ("ready", "prefill", "decode-1", "rss", "decode-8"), {"penstock": demo, "llama.cpp": demo}
        ),
        "long": Case(  # llama.cpp takes minutes for the prompt
            name, ("decode-8k",), {"penstock": penstock("int8"), "llama.cpp": gguf("Q8_0")}, max_rounds=1
        ),
        "streams": Case(
            "tiny",
            ("streams-1", "streams-16", "streams-64", "streams-256"),
            {"penstock": tiny, "llama.cpp": tiny_gguf, "llama-server": tiny_gguf},
        ),
    }


class Suite:
    """The installed engines, the probe of the machine and the record."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.peers = Path(options.peers).resolve()
        self.models = Models(self.peers / "models", self.python("python"), self.python("penstock"))
        self.probe = Probe(options.threads, options.kernels)
        self.folder = REPOSITORY / "benches" / "record" / options.machine
        self.file = self.folder / "suite.json"
        self.record: dict[str, Any] = {"measurements": [], "kernels": [], "versions": {}, "engines": {}}
        if self.file.exists():
            self.record = json.loads(self.file.read_text())

    def python(self, environment: str) -> Path:
        """The interpreter of a virtual environment; Penstock's can be this one."""
        path = self.peers / environment / "bin" / "python"
        return Path(sys.executable) if environment == "penstock" and not path.exists() else path

    def version(self, engine: str) -> str | None:
        """The installed version of an engine; None without one."""
        package, environment = PACKAGES[engine]
        python = self.python(environment)
        if not python.exists():
            return None
        code = f"from importlib.metadata import version; print(version({package!r}))"
        result = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True)  # noqa: S603
        return result.stdout.strip() if result.returncode == 0 else None

    def run_kernels(self) -> None:
        """Measure the kernels."""
        self.record["limits"] = self.probe.limits()
        self.record["kernels"] = self.probe.kernels()
        self.save()

    def run_case(self, name: str, case: Case, rows: list[str]) -> None:
        """Measure rows of a case: rounds of one turn per engine."""
        engines = []
        for engine, (model, weights) in case.engines.items():
            if engine not in self.options.engines:
                continue
            version = self.version(engine)
            if version is None:
                print(f"{engine}: not installed in {self.peers}, skipped", file=sys.stderr)
                continue
            self.record["versions"][engine] = version
            engines.append((engine, str(model()), weights))
        if not self.options.append:
            measured = {(name, row, engine) for row in rows for engine, _, _ in engines}
            self.record["measurements"] = [
                old
                for old in self.record["measurements"]
                if (old["case"], old["row"], old["engine"]) not in measured
            ]
        first = 1 + max(
            (old["round"] for old in self.record["measurements"] if old["case"] == name), default=0
        )
        for number in range(first, first + min(self.options.rounds, case.max_rounds)):
            before = self.probe.limits()[-1]
            for engine, model, weights in engines if number % 2 else engines[::-1]:
                results = self.turn(name, engine, model, weights, rows)
                after = self.probe.limits()[-1]
                limits = {key: round((before[key] + after[key]) / 2) for key in before if key != "threads"}
                before = after
                date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
                common = {"case": name, "round": number, "date": date, "limits": limits}
                self.record["measurements"] += [common | result for result in results]
            self.save()

    def turn(self, case: str, engine: str, model: str, weights: str, rows: list[str]) -> list[dict[str, Any]]:
        """Run one engine in a new process."""
        python = self.python(PACKAGES[engine][1])
        arguments = [HERE / "peers.py", engine, model, weights, str(self.options.threads), *rows]
        start = time.monotonic()
        result = subprocess.run([python, *arguments], check=False, capture_output=True, text=True)  # noqa: S603
        if result.returncode != 0:
            print(f"{case}, {engine}: {result.stderr[-1500:]}", file=sys.stderr, flush=True)
        lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
        values = {line["row"]: line["value"] for line in lines if "row" in line}
        for line in lines:
            if "about" in line:
                self.record["engines"][f"{case}/{engine}"] = line["about"]
        text = ", ".join(f"{row} {value:.4g}" for row, value in values.items())
        print(f"{case:8} {engine:14} {time.monotonic() - start:5.0f} s  {text}", flush=True)
        return [{"row": row, "engine": engine, "value": value} for row, value in values.items()]

    def save(self) -> None:
        """Write the record, a measurement per line."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record["cpu"] = cpu_name()
        self.record["threads"] = self.options.threads
        parts = []
        for key, value in self.record.items():
            if isinstance(value, list):
                text = "[\n" + ",\n".join(json.dumps(entry) for entry in value) + "\n]"
            else:
                text = json.dumps(value)
            parts.append(f"{json.dumps(key)}: {text}")
        self.file.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> None:
    """Run the selected rows and write the record."""
    cpus = len(os.sched_getaffinity(0))
    machine = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-") + f"-{cpus}cpu"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of a few rows, without kernels")
    parser.add_argument("--rows", nargs="+", default=["*"], help="patterns such as int8/decode-*; kernels")
    parser.add_argument("--engines", nargs="+", default=list(PACKAGES), choices=PACKAGES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cpus)
    parser.add_argument("--append", action="store_true", help="keep the earlier results of the rows")
    parser.add_argument(
        "--peers", default=REPOSITORY / "target" / "peers", help="folder of engines and models"
    )
    parser.add_argument("--kernels", help="program of the kernel benchmark, instead of building it")
    parser.add_argument("--machine", default=machine, help="folder of the record in benches/record")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rounds = QUICK, 1
    started = time.monotonic()
    suite = Suite(options)

    def is_selected(row: str) -> bool:
        return any(fnmatch(row, pattern) for pattern in options.rows)

    if is_selected("kernels"):
        suite.run_kernels()
    for name, case in cases(suite.models).items():
        rows = [row for row in case.rows if is_selected(f"{name}/{row}")]
        if rows:
            suite.run_case(name, case, rows)
    print(f"{(time.monotonic() - started) / 60:.1f} minutes; {suite.file}")
    plotter = suite.python("python")
    python = plotter if plotter.exists() else Path(sys.executable)
    if suite.record["measurements"]:
        subprocess.run([python, HERE / "report.py", suite.file], check=True)  # noqa: S603


if __name__ == "__main__":
    main()
