"""The limits of the machine, measured by the benchmark of the kernels."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from models import REPOSITORY


class Probe:
    """The program `kernels`, built first if no `program` is given."""

    def __init__(self, threads: int, program: str | None = None) -> None:
        if program is None:
            command = "cargo bench --quiet -p penstock-kernels --bench kernels --no-run --message-format json"
            programs = [json.loads(line).get("executable") for line in _run(command.split())]
            program = next(program for program in programs if program)
        self._command = [program, "--threads", str(threads)]

    def limits(self) -> list[dict[str, float]]:
        """Bytes and operations per second with each number of threads."""
        return [json.loads(line) for line in _run([*self._command, "--limits"])]

    def kernels(self) -> list[dict[str, float | str]]:
        """Products with the matrices of the 0.5B model in each format."""
        return [
            json.loads(line) for line in _run([*self._command, "--quick", "--shapes", "--json", "matmul"])
        ]


def cpu_name() -> str:
    """The name of the CPU."""
    return str(re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0])


def _run(command: list[str]) -> list[str]:
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)  # noqa: S603
    return result.stdout.splitlines()
