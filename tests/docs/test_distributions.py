"""The tools that build the distributions of a release: tables, crates of the sources, and kernels."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import subprocess
import sys
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT
from support.tools import tool

if TYPE_CHECKING:
    from pathlib import Path

crates = tool("crates", "dist")
vendor = tool("vendor", "dist")
KERNELS = {"sm_90a/rows.cubin": b"code", "index.json": b"{}"}


def package(folder: Path, manifest: str) -> Path:
    """A package as Cargo copies it."""
    files = {"Cargo.toml": manifest, "src/lib.rs": "pub fn used() {}", "tests/one.rs": "", "LICENSE": "terms"}
    for name, text in files.items():
        folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        folder.joinpath(name).write_text(text)
    checksum = {"files": dict.fromkeys(files, "0"), "package": "abc"}
    folder.joinpath(".cargo-checksum.json").write_text(json.dumps(checksum))
    return folder


def test_packages_of_tests_are_not_needed() -> None:
    names = {name for name, _ in crates.crates_of("x86_64-unknown-linux-gnu", crates.NEEDED)}
    assert {"pyo3", "tokenizers", "llguidance", "cudarc", "libc", "syn"} <= names
    assert not names & {"proptest", "loom", "windows-sys"}


def test_package_that_is_not_needed_becomes_empty(tmp_path: Path) -> None:
    folder = package(tmp_path / "unused-1.0.0", '[package]\nname = "unused"\n[lib]\npath = "src/unused.rs"\n')
    vendor.make_empty(folder)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"Cargo.toml", ".cargo-checksum.json", "src/unused.rs"}
    assert folder.joinpath("src/unused.rs").read_bytes() == b""


def test_checksum_of_a_package_stays(tmp_path: Path) -> None:
    folder = package(tmp_path / "used-1.0.0", '[package]\nname = "used"\n')
    vendor.forget_files(folder)
    assert json.loads(folder.joinpath(".cargo-checksum.json").read_text()) == {"files": {}, "package": "abc"}


def test_text_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "lib.rs"
    file.write_text("mod a;\n")
    with pytest.raises(SystemExit, match="expected once: 'mod b"):
        vendor.replace(file, "mod b;\n", "")
    assert file.read_text() == "mod a;\n"


def test_targets_are_those_of_the_wheels() -> None:
    targets = tool("targets", "dist")
    names = [wheel.name for wheel in targets.WHEELS]
    assert len(set(names)) == len(names)
    systems = {target.split("-", 1)[1] for target in targets.TARGETS}
    assert systems == {"unknown-linux-gnu", "unknown-linux-musl", "apple-darwin", "pc-windows-gnu"}
    assert {wheel.python for wheel in targets.WHEELS} == {None, "cp314t"}


def test_targets_are_printed_without_other_packages() -> None:
    """The gate checks that the sources compile for them, before it has an environment of its own."""
    command = [sys.executable, "-S", "-B", str(ROOT / "tools" / "dist" / "targets.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.split() == list(tool("targets", "dist").TARGETS)


@pytest.mark.needs("permissions")
def test_archives_of_equal_files_are_equal(tmp_path: Path) -> None:
    sdist = tool("sdist", "dist")
    archives = []
    for copy, mode in (("one", 0o600), ("two", 0o644)):
        folder = tmp_path / copy / "name-1.0"
        package(folder, "[package]\n")
        folder.joinpath("LICENSE").chmod(mode)
        archive = tmp_path / f"{copy}.tar.gz"
        sdist.pack(folder, archive)
        archives.append(archive.read_bytes())
    assert archives[0] == archives[1]
    sdist.unpack(archive, tmp_path / "unpacked")
    assert tmp_path.joinpath("unpacked", "LICENSE").read_text() == "terms"


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A folder with a wheel."""
    name = "penstock_llm-0.1.0-cp311-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("penstock/__init__.py", "x = 1\n")
        wheel.writestr(
            "penstock_llm-0.1.0.dist-info/METADATA", "Metadata-Version: 2.4\nVersion: 0.1.0\n\nText\n"
        )
        wheel.writestr("penstock_llm-0.1.0.dist-info/RECORD", "penstock/__init__.py,,\n")
    return tmp_path


def test_wheel_with_kernels_has_a_local_version(monkeypatch: pytest.MonkeyPatch, dist: Path) -> None:
    kernels = tool("cuda_kernels", "dist")
    monkeypatch.setattr(kernels, "KERNELS", dist / "kernels")
    for name, content in KERNELS.items():
        dist.joinpath("kernels", name).parent.mkdir(parents=True, exist_ok=True)
        dist.joinpath("kernels", name).write_bytes(content)
    first = kernels.add_kernels(dist)
    assert first == kernels.add_kernels(dist), "the second wheel is no source of a third"
    assert first.name.startswith("penstock_llm-0.1.0+cuda-cp311-abi3-")
    with zipfile.ZipFile(first) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    assert {f"penstock/kernels/{name}" for name in KERNELS} < files.keys()
    assert b"\nVersion: 0.1.0+cuda\n" in files["penstock_llm-0.1.0+cuda.dist-info/METADATA"]
    record = "penstock_llm-0.1.0+cuda.dist-info/RECORD"
    rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(files[record].decode()))}
    assert rows.pop(record) == ("", "")
    assert rows.keys() | {record} == files.keys()
    for name, (digest, size) in rows.items():
        expected = urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={expected}", len(files[name]))


def test_wheel_with_kernels_needs_kernels(monkeypatch: pytest.MonkeyPatch, dist: Path) -> None:
    kernels = tool("cuda_kernels", "dist")
    monkeypatch.setattr(kernels, "KERNELS", dist / "kernels")
    with pytest.raises(SystemExit, match="expected kernels in"):
        kernels.add_kernels(dist)


def test_extras_of_cuda_are_the_packages_that_are_searched() -> None:
    from penstock import _cuda

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("cuda", "cuda12"):
        [requirement] = extras[name]
        assert requirement.partition(">")[0] in _cuda._PACKAGES
