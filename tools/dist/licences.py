"""The licences of the code that a wheel has besides Penstock's, in the folder `third-party`.

The build of a wheel adds the folder to the wheel's licences, if it exists. A crate without a file with its
licence is an error; `make deny` checks which licences the crates have.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crates import LINKED, cargo, crates_of
from targets import ROOT

#: Names of files with licences and notices, in the folder of a crate.
NAMES = re.compile(r"(LICEN[CS]E|COPYING|COPYRIGHT|NOTICE|UNLICENSE)s?([-_.].*)?", re.IGNORECASE)
#: Notices of the C libraries that the linker adds, from the package of the system that has them.
LINKED_C = {"x86_64-pc-windows-gnu": Path("/usr/share/doc/mingw-w64-x86-64-dev/copyright")}
#: The notices of Rust's standard library, in the folder of the toolchain.
STANDARD_LIBRARY = Path("share", "doc", "rust", "COPYRIGHT-library.html")

HEAD = """\
Licences of the Rust crates in this package
===========================================

The extension module of Penstock contains code of these crates:

"""


class LicenceError(Exception):
    """The licence of a part of a wheel is not known."""


@dataclass(frozen=True, order=True)
class Crate:
    """A crate whose code is in the extension module."""

    name: str
    version: str
    licence: str | None  # the SPDX expression of its manifest
    folder: Path
    source: str  # where the sources can be had

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def rustc(*arguments: str) -> str:
    """The output of the compiler of the checkout's toolchain."""
    command = ["rustc", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def host() -> str:
    """The target of this machine."""
    [target] = re.findall(r"^host: (.*)$", rustc("-vV"), re.MULTILINE)
    return str(target)


def linked_crates(target: str) -> list[Crate]:
    """The crates of others that are linked into the module, without those that run at compile time."""
    linked = crates_of(target, LINKED)
    metadata = json.loads(cargo("metadata", "--format-version=1", f"--filter-platform={target}"))
    members = set(metadata["workspace_members"])
    return sorted(
        Crate(
            package["name"],
            package["version"],
            package["license"],
            Path(package["manifest_path"]).parent,
            package["repository"] or f"https://crates.io/crates/{package['name']}",
        )
        for package in metadata["packages"]
        if package["id"] not in members and (package["name"], package["version"]) in linked
    )


def texts_of(crate: Crate) -> Iterator[str]:
    """The contents of the files with licences and notices."""
    for path in sorted(crate.folder.iterdir()):
        if path.is_file() and path.suffix != ".rs" and NAMES.fullmatch(path.name):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield "\n".join(line.rstrip() for line in text.strip("\ufeff\r\n").splitlines())


def licences_of(crates: list[Crate]) -> str:
    """A document with the licences of all crates, each text once."""
    texts: dict[str, list[Crate]] = {}
    for crate in crates:
        found = list(texts_of(crate))
        if not found:
            raise LicenceError(f"{crate}: no file with its licence in {crate.folder}")
        for text in found:
            texts.setdefault(text, []).append(crate)
    table = [f"{crate}: {crate.licence}, {crate.source}" for crate in crates]
    parts = [HEAD + "\n".join(table)]
    for text, users in texts.items():
        names = ", ".join(str(crate) for crate in dict.fromkeys(users))
        parts.append(f"{'-' * 79}\nOf {names}:\n\n{text}")
    return "\n\n".join(parts) + "\n"


def write_licences(target: str, folder: Path) -> None:
    """Write the licences of a wheel for the target of Rust to a new folder."""
    document = licences_of(linked_crates(target))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "crates.txt").write_text(document, encoding="utf-8")
    copies = {"rust.html": Path(rustc("--print", "sysroot").strip()) / STANDARD_LIBRARY}
    if target in LINKED_C:
        copies["libraries.txt"] = LINKED_C[target]
    for name, path in copies.items():
        if not path.is_file():
            raise LicenceError(f"{path} is missing")
        shutil.copyfile(path, folder / name)
