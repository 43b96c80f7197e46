"""Copies the crates that the extension module is built from, so that a build needs no network.

Packages that no wheel needs, such as those of tests, are replaced with empty ones of the same name: Cargo
reads the manifest of each package in the lock file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from targets import CRATE, ROOT, TARGETS

#: Folders of a package that its library is not compiled from.
UNUSED = ("tests", "benches", "examples")


def cargo(*arguments: str) -> str:
    """The output of Cargo."""
    command = ["cargo", *arguments, "--locked", "--manifest-path", str(ROOT / "Cargo.toml")]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603 - as above


def needed_packages() -> list[dict[str, object]]:
    """The packages of registries that the extension module is built from, as `cargo metadata` describes them.

    With those that run at compile time: build scripts and procedural macros.
    """
    found: dict[str, dict[str, object]] = {}
    for target in TARGETS:
        metadata = json.loads(cargo("metadata", "--format-version=1", f"--filter-platform={target}"))
        packages = {package["id"]: package for package in metadata["packages"]}
        nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
        waiting = [name for name, package in packages.items() if package["name"] == CRATE]
        seen = set(waiting)
        while waiting:
            package = waiting.pop()
            if packages[package]["source"] is not None:
                found[package] = packages[package]
            for dependency in nodes[package]["deps"]:
                is_built = any(kind["kind"] != "dev" for kind in dependency["dep_kinds"])
                if is_built and dependency["pkg"] not in seen:
                    seen.add(dependency["pkg"])
                    waiting.append(dependency["pkg"])
    return sorted(found.values(), key=lambda package: str(package["id"]))


def vendor(directory: Path) -> None:
    """Write the packages of the lock file to a new directory."""
    shutil.rmtree(directory, ignore_errors=True)
    cargo("vendor", "--quiet", "--versioned-dirs", str(directory))
    needed = {f"{package['name']}-{package['version']}" for package in needed_packages()}
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
