"""Builds the wheels of all systems on one Linux machine with an x86-64 CPU.

    python tools/build_wheels.py [--out dist] [TARGET ...]

Needs rustup, and the packages maturin and ziglang in the environment of this Python; the target for Windows
needs Debian's gcc-mingw-w64-x86-64. Without arguments, all targets are built, which takes about six minutes
for each on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The linker for Windows; that of zig cannot link this package.
MINGW = "x86_64-w64-mingw32-gcc"
#: The configuration of PyO3 for Python without the GIL.
FREE_THREADED = ROOT / "rust" / "python" / "pyo3-free-threaded.txt"


@dataclass(frozen=True)
class Wheel:
    """A wheel: the target of Rust, and the options of maturin."""

    target: str
    options: tuple[str, ...] = ("--zig",)
    python: str | None = None  # the stable ABI if it is not set

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.target if self.python is None else f"{self.target}-{self.python}"


WHEELS = [
    Wheel("x86_64-unknown-linux-gnu", ("--zig", "--compatibility", "manylinux_2_17")),
    Wheel("aarch64-unknown-linux-gnu", ("--zig", "--compatibility", "manylinux_2_17")),
    Wheel("x86_64-unknown-linux-musl", ("--zig", "--compatibility", "musllinux_1_2")),
    Wheel("aarch64-unknown-linux-musl", ("--zig", "--compatibility", "musllinux_1_2")),
    Wheel("aarch64-apple-darwin"),
    Wheel("x86_64-apple-darwin"),
    Wheel("x86_64-pc-windows-gnu", ()),
    Wheel("x86_64-unknown-linux-gnu", ("--zig", "--compatibility", "manylinux_2_17"), "cp314t"),
    Wheel("aarch64-unknown-linux-gnu", ("--zig", "--compatibility", "manylinux_2_17"), "cp314t"),
]


def run(*command: str) -> str:
    """The output of a command."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603 - as below


def environment(wheel: Wheel) -> dict[str, str]:
    """The environment of a build. Nothing in a wheel depends on the time, or on paths of this machine."""
    commit = run("git", "-C", str(ROOT), "log", "-1", "--format=%ct")
    cargo = os.environ.get("CARGO_HOME") or str(Path.home() / ".cargo")
    prefixes = {cargo: "/cargo", str(ROOT): "/penstock"}
    flags = [f"--remap-path-prefix={path}={name}" for path, name in prefixes.items()]
    variables = {
        "PATH": os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ["PATH"]]
        ),  # maturin searches zig
        "SOURCE_DATE_EPOCH": commit.strip(),
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags),
        "CARGO_TARGET_DIR": str(ROOT / "target" / "wheels"),
        "CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER": MINGW,
        "MACOSX_DEPLOYMENT_TARGET": "11.0",
    }
    if wheel.python is not None:
        variables["PYO3_CONFIG_FILE"] = str(FREE_THREADED)
    return os.environ | variables


def build(wheel: Wheel, out: Path) -> None:
    """Build a wheel."""
    run("rustup", "target", "add", wheel.target)
    if wheel.target.endswith("windows-gnu") and shutil.which(MINGW) is None:
        sys.exit(f"{MINGW} is missing: apt-get install gcc-mingw-w64-x86-64")
    command = [sys.executable, "-m", "maturin", "build", "--release", "--locked", "--target", wheel.target]
    command += [*wheel.options, "--out", str(out)]
    if wheel.python is not None:
        command += ["--interpreter", "python3.14t"]
    subprocess.run(command, check=True, cwd=ROOT, env=environment(wheel))  # noqa: S603 - of this file


def main() -> None:
    """Build the wheels of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("names", nargs="*", metavar="TARGET", help=", ".join(wheel.name for wheel in WHEELS))
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {wheel.name for wheel in WHEELS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for wheel in WHEELS:
        if not arguments.names or wheel.name in arguments.names:
            build(wheel, arguments.out.resolve())


if __name__ == "__main__":
    main()
