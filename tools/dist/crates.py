"""The crates that the extension module is built from."""

from __future__ import annotations

import subprocess

from targets import CRATE, ROOT

#: Crates that are linked into the module.
LINKED = "normal,no-proc-macro"
#: Those, and crates that run at compile time: build scripts and procedural macros.
NEEDED = "normal,build"


def cargo(*arguments: str) -> str:
    """The output of Cargo."""
    command = ["cargo", *arguments, "--locked", "--manifest-path", str(ROOT / "Cargo.toml")]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def crates_of(target: str, edges: str) -> set[tuple[str, str]]:
    """Names and versions of the crates for a target of Rust, Penstock's included."""
    options = ["--package", CRATE, "--target", target, "--edges", edges]
    tree = cargo("tree", *options, "--prefix", "none", "--format", "{p}")
    names = [line.split()[:2] for line in tree.splitlines() if line]
    return {(name, version.removeprefix("v")) for name, version in names}
