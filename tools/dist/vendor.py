"""Copies the crates that the extension module is built from, so that a build needs no network.

Packages that no wheel needs, such as those of tests, are replaced with empty ones of the same name: Cargo
reads the manifest of each package in the lock file.
"""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from pathlib import Path

from crates import NEEDED, cargo, crates_of
from targets import TARGETS

#: Folders of a package that its library is not compiled from.
UNUSED = ("tests", "benches", "examples")


def vendor(directory: Path) -> None:
    """Write the packages of the lock file to a new directory."""
    shutil.rmtree(directory, ignore_errors=True)
    cargo("vendor", "--quiet", "--versioned-dirs", str(directory))
    needed = {f"{name}-{version}" for target in TARGETS for name, version in crates_of(target, NEEDED)}
    for package in sorted(directory.iterdir()):
        if package.name in needed:
            for name in UNUSED:
                shutil.rmtree(package / name, ignore_errors=True)
        else:
            make_empty(package)
        if package.name.startswith("llguidance-"):
            remove_c_interface(package)
        forget_files(package)


def make_empty(package: Path) -> None:
    """Keep the manifest of a package, and an empty library."""
    manifest = tomllib.loads((package / "Cargo.toml").read_text(encoding="utf-8"))
    for path in package.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in ("Cargo.toml", ".cargo-checksum.json"):
            path.unlink()
    library = package / manifest.get("lib", {}).get("path", "src/lib.rs")
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_text("")


def remove_c_interface(package: Path) -> None:
    """Remove the C interface of llguidance, whose functions every module that links it would export."""
    replace(package / "src" / "lib.rs", 'pub mod ffi;\n#[cfg(feature = "rayon")]\nmod ffi_par;\n', "")
    for name in ("ffi.rs", "ffi_par.rs"):
        (package / "src" / name).unlink()
    replace(package / "Cargo.toml", 'crate-type = [\n    "staticlib",\n    "rlib",\n    "cdylib",\n]\n', "")


def replace(path: Path, old: str, new: str) -> None:
    """Replace a text that is there once."""
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        sys.exit(f"{path}: expected once: {old!r}")
    path.write_text(text.replace(old, new), encoding="utf-8")


def forget_files(package: Path) -> None:
    """Keep the checksum of the published package, which the lock file has, without those of its files."""
    path = package / ".cargo-checksum.json"
    checksum = json.loads(path.read_text(encoding="utf-8"))["package"]
    path.write_text(json.dumps({"files": {}, "package": checksum}), encoding="utf-8")
