"""Runs the tests that can use a GPU, on the GPU: `make gpu-test`.

    python tools/gpu_test.py [--minutes 9] [--only WORD,..] [-k EXPRESSION] [--emulated]

Needs a penstock with test hooks, pytest, numpy, and NVRTC; neither Rust nor a network. The parts are:

- `info`: `penstock info`;
- `compile`: all kernels compile for this device without spills;
- `kernels ...`: the tests of kernels, on the device, against numpy;
- `engine ...`: the tests of the engine: parity with the CPU and with stored results of transformers; the same
  bits, storms, pressure, adapters, sampling;
- `api ...`: tests of the API that do not choose a device, on asyncio;
- `memcheck ...` and `racecheck ...`: tests of kernels under compute-sanitizer, if it is there.

Parts run beside each other. Each writes a log to `target/gpu/log`; the end of the log of a failed part is
printed, and `$OUT/gpu-test.txt` has all logs. Parts that the time is too short for are named. With
`--emulated`, the device is that of the tests.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
SANITIZERS = {
    "memcheck": ["rows", "gemm", "gemm_quantised", "kv", "lora", "attention", "sample"],
    "racecheck": ["rows", "gemm", "gemm_quantised", "attention"],
}
#: Other tests of the engine.
OTHERS = ("adapters", "sampling")
#: Tests of the API that use an engine of any device, and measure no memory of the host.
API = (
    *("batch", "batch_streams", "beam_search", "blocking", "cancel", "choices", "consumers", "echo"),
    *("generation_control", "logits_processors", "loops", "lost_device", "operations", "pressure", "request"),
    *("sampling_params", "score", "speculation", "stops", "structured_output", "tensor", "unread"),
)
#: Tests that let calls of the emulated driver fail.
EMULATED = "test_cuda_engine_failures"
#: Parts that run at the same time. A sanitised one has most of the device to itself.
WORKERS = max(2, (os.cpu_count() or 2) // 2)
#: The status of pytest if no test is collected: the file is skipped, or `-k` selects none.
NOT_COLLECTED = 5
#: Outcomes that are no failure.
GOOD = {"passed", "no tests"}
#: Lines of the log of a failed part that are printed.
LINES = 40


@dataclass(frozen=True)
class Part:
    """A command with a limit of time."""

    name: str
    command: list[str]
    seconds: float
    needs_tests: bool = False  # fails if no test runs


@dataclass(frozen=True)
class Ended:
    """The end of a part."""

    part: Part
    outcome: str  # "passed", "no tests", "failed", "out of time" or "not started"
    seconds: float
    output: str

    @property
    def summary(self) -> str:
        """The last line of the output."""
        lines = self.output.strip().splitlines()
        return lines[-1].strip("= ") if lines else ""


def pytest_of(files: list[Path], *options: str) -> list[str]:
    """The command that runs tests without the plugins of other packages."""
    return [
        *(sys.executable, "-m", "pytest", "-q", "-p", "pytest_timeout", "-p", "anyio.pytest_plugin"),
        *("-p", "no:cacheprovider", "-o", "filterwarnings=default", *options, *map(str, files)),
    ]


def sanitizer() -> str | None:
    """The path of compute-sanitizer."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def file_of(name: str) -> Path:
    """The file of tests with a name, in the folder of its area."""
    (path,) = TESTS.glob(f"*/test_{name}.py")
    return path


def api_parts(expression: str) -> list[Part]:
    """The parts of the API. An emulated device is slow."""
    words = " and ".join(["not uvloop", "not trio", *([f"({expression})"] if expression else [])])
    options = ("-k", words, "-m", "not torch", "-o", "timeout=600")
    return [Part(f"api {name}", pytest_of([file_of(name)], *options), 900) for name in API]


def parts(expression: str) -> list[Part]:
    """All parts, the longest ones first."""
    chosen = ["-k", expression] if expression else []
    paths = [
        *sorted(TESTS.glob("cuda/test_cuda_engine*.py")),
        *(file_of(f"cuda_{name}") for name in OTHERS),
    ]
    engine = [
        Part(
            f"engine {path.stem.split('_')[-1]}",
            pytest_of([path], *chosen, "-m", "not torch"),
            420,
            not chosen,
        )
        for path in paths
        if path.stem != EMULATED
    ]
    kernels = {
        path.stem.removeprefix("test_kernels_cuda_"): path
        for path in sorted(TESTS.glob("kernels/test_kernels_cuda_*.py"))
    }
    compiles = kernels.pop("compile")
    del kernels["checked"]
    found = [
        *engine,
        *(Part(f"kernels {name}", pytest_of([path], *chosen), 300) for name, path in kernels.items()),
    ]
    found.append(Part("info", [sys.executable, "-m", "penstock", "info"], 60))
    of_device = "without_spills and " + architecture()
    found.append(Part("compile", pytest_of([compiles], "-k", of_device), 300, needs_tests=True))
    program = sanitizer()
    for tool, name in ((tool, name) for tool, names in SANITIZERS.items() for name in names if program):
        command = [str(program), "--tool", tool, "--error-exitcode", "9"]
        found.append(Part(f"{tool} {name}", [*command, *pytest_of([kernels[name]], "-x", *chosen)], 300))
    return found + api_parts(expression)


def not_run() -> list[str]:
    """What is missing on this machine, and the tests that do not run without it."""
    return [] if sanitizer() else [f"compute-sanitizer missing: no {' and '.join(SANITIZERS)}"]


def architecture() -> str:
    """The target of the tests of the compiler for the device."""
    import penstock

    info = penstock.cuda_info()
    if info.reason or not info.devices:
        sys.exit(f"no device: {info.reason}")
    major = info.devices[0].compute_capability.partition(".")[0]
    return {"8": "sm_80", "9": "sm_90a", "10": "sm_100a", "12": "sm_120a"}.get(major, "another")


def run(part: Part, deadline: float, logs: Path) -> Ended:
    """Run a part until its limit of time or the deadline."""
    start = time.monotonic()
    if start > deadline:
        return Ended(part, "not started", 0, "")
    path = logs / f"{part.name.replace(' ', '-')}.txt"
    settings = {"PENSTOCK_TEST_GPU": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    with path.open("w") as log:
        try:
            done = subprocess.run(
                part.command,
                cwd=ROOT,
                env=os.environ | settings,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=min(part.seconds, deadline - start),
                check=False,
            )
            outcome = {0: "passed", NOT_COLLECTED: "no tests"}.get(done.returncode, "failed")
        except subprocess.TimeoutExpired:
            outcome = "out of time"
    ended = Ended(part, outcome, time.monotonic() - start, path.read_text(errors="replace"))
    if outcome == "passed" and " skipped" in ended.summary and " passed" not in ended.summary:
        ended = replace(ended, outcome="no tests")
    return replace(ended, outcome="failed") if part.needs_tests and ended.outcome == "no tests" else ended


def emulate() -> None:
    """Start this program again with the emulated driver."""
    sys.path.insert(0, str(TESTS))
    from support.kernels import emulator

    arguments = [argument for argument in sys.argv if argument != "--emulated"]
    os.execve(sys.executable, [sys.executable, *arguments], os.environ | emulator.emulation())  # noqa: S606


def main() -> None:
    """Run the parts and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9, help="the limit of time")
    parser.add_argument("--only", default="", help="parts with one of these words, separated by commas")
    parser.add_argument("-k", dest="expression", default="", help="tests of this expression of pytest")
    parser.add_argument("--emulated", action="store_true", help="run on the emulated device of the tests")
    options = parser.parse_args()
    if options.emulated:
        emulate()
    deadline = time.monotonic() + 60 * options.minutes
    logs = ROOT / "target" / "gpu" / "log"
    logs.mkdir(parents=True, exist_ok=True)
    words = options.only.split(",")
    chosen = [part for part in parts(options.expression) if any(word in part.name for word in words)]
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        ended = list(pool.map(lambda part: run(part, deadline, logs), chosen))
    if "OUT" in os.environ:
        texts = [f"---- {end.part.name}: {end.outcome}\n{end.output}\n" for end in ended]
        Path(os.environ["OUT"], "gpu-test.txt").write_text("".join(texts))
    for end in ended:
        if end.outcome not in GOOD:
            print(f"\n---- {end.part.name}", *end.output.splitlines()[-LINES:], sep="\n")
    print()
    for end in ended:
        print(f"{end.part.name:24} {end.outcome:12} {end.seconds:6.1f} s  {end.summary[:100]}")
    for line in not_run():
        print(line)
    outcomes = {end.outcome for end in ended}
    if "passed" not in outcomes or outcomes - GOOD:
        sys.exit(1)


if __name__ == "__main__":
    main()
