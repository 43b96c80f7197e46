"""Builds the distributions of a release on a Linux machine with an x86-64 CPU.

    python tools/dist sdist            `make sdist`: the source distribution, with all crates
    python tools/dist wheels [NAME ..] `make wheels`: it, and wheels built from it
    python tools/dist test [NAME ..]   `make test-wheels`: the Linux wheels in bare roots, which needs root
    python tools/dist kernels          `make kernels-wheel`: a second wheel, with CUDA kernels, in dist/cuda

Needs rustup, and the packages maturin and ziglang in the environment of this Python; the target for Windows
needs Debian's gcc-mingw-w64-x86-64. A wheel takes about eight minutes on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cuda_kernels import add_kernels
from roots import ROOTS, test_wheels
from sdist import build_sdist
from targets import ROOT, WHEELS
from wheels import build_wheels


def main() -> None:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, names: Sequence[str] = ()) -> None:
        added = commands.add_parser(name)
        added.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the distributions")
        if names:
            added.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
            added.set_defaults(known=names)

    command("sdist")
    command("wheels", [wheel.name for wheel in WHEELS])
    command("test", list(ROOTS))
    command("kernels")
    arguments = parser.parse_args()
    known = getattr(arguments, "known", ())
    names = getattr(arguments, "names", ()) or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    out = arguments.out.resolve()
    match arguments.command:
        case "sdist":
            print(build_sdist(out))
        case "wheels":
            build_wheels([wheel for wheel in WHEELS if wheel.name in names], out)
        case "test":
            test_wheels(names, out)
        case _:
            print(add_kernels(out))


if __name__ == "__main__":
    main()
