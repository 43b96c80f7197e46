"""The tools that build and test the distributions of a release: tables, crates, kernels, wheels and roots."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
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
roots = tool("roots", "dist")
vendor = tool("vendor", "dist")
wheels = tool("wheel_test")
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


def digest_of(content: bytes) -> str:
    """The hash of a file in the list of a wheel."""
    return urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


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


def test_links_of_the_page_on_pypi_are_absolute(tmp_path: Path) -> None:
    folder = tmp_path / "name-1.2.3"
    folder.mkdir()
    text = "[guide](docs/guide) [here](#here) [there](https://example.org)\n"
    for urls, link in (("", "docs/guide"), ("https://a.b/c", "https://a.b/c/blob/v1.2.3/docs/guide")):
        folder.joinpath("pyproject.toml").write_text(
            f'[project.urls]\nRepository = "{urls}"\n' if urls else "[project]\n"
        )
        for name in ("README.md", "PKG-INFO"):
            folder.joinpath(name).write_text(text)
        tool("sdist", "dist").make_links_absolute(folder)
        for name in ("README.md", "PKG-INFO"):
            assert folder.joinpath(name).read_text() == text.replace("docs/guide", link)


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
    assert first.parent == dist / "cuda", "pip does not find it beside the other one"
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
        assert (digest, int(size)) == (f"sha256={digest_of(files[name])}", len(files[name]))


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


def write_wheel(folder: Path, name: str, version: str, content: str, *requires: str) -> Path:
    """A wheel for every system, with one file."""
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.txt": content,
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.4", *metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{file},sha256={digest_of(text.encode())}," for file, text in files.items()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": "\n".join([*rows, f"{info}/RECORD,,", ""])}.items():
            wheel.writestr(file, text)
    return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The package index of pip: a newer Penstock, and a package that both require."""
    folder = tmp_path / "index"
    packages = (("penstock_llm", "0.2.0", "of the index", "needed"), ("needed", "1.0", ""))
    for name, version, content, *requires in packages:
        place = folder / name.replace("_", "-")
        wheel = write_wheel(place, name, version, content, *requires)
        place.joinpath("index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    monkeypatch.setenv("PIP_INDEX_URL", folder.as_uri())
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return folder


@pytest.mark.usefixtures("index")
def test_tested_wheel_is_that_of_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    wheel = write_wheel(dist, "penstock_llm", "0.1.0", "one", "needed", 'more; extra == "all"')
    environment = wheels.Environment(tmp_path / "environment", [])
    wheels.install(environment, dist)
    assert wheels.check(environment, dist) == {"wheel": wheel.name, "dependencies": 1}
    monkeypatch.setattr(wheels, "MAX_DEPENDENCIES", 0)
    with pytest.raises(SystemExit, match="requires 1 packages; the limit is 0"):
        wheels.check(environment, dist)
    write_wheel(dist, "penstock_llm", "0.1.0", "two", "needed")
    with pytest.raises(SystemExit, match="the installed files are those of no wheel"):
        wheels.check(environment, dist)


@pytest.mark.usefixtures("index")
def test_root_gets_the_wheel_of_the_last_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dist, requirements = tmp_path / "dist", tmp_path / "requirements.txt"
    requirements.touch()
    for name, value in (("FOLDER", tmp_path / "roots"), ("PACKAGES", ()), ("DEMO", requirements)):
        monkeypatch.setattr(roots, name, value)
    write_wheel(tmp_path / "roots" / "debian-wheels", "penstock_llm", "0.1.0", "old")
    wheel = write_wheel(dist, "penstock_llm", "0.1.0", "new", "needed")
    folder = roots.download("debian", dist)
    assert folder.joinpath(wheel.name).read_bytes() == wheel.read_bytes()
    assert {path.name.partition("-")[0] for path in folder.iterdir()} == {"penstock_llm", "needed"}


def test_root_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attempts: list[Path] = []

    def make(root: Path) -> None:
        root.joinpath("lib").mkdir(parents=True)
        attempts.append(root)
        if len(attempts) == 1:
            raise OSError("no space")

    monkeypatch.setattr(roots, "FOLDER", tmp_path / "roots")
    monkeypatch.setattr(roots, "ROOTS", {"debian": make})
    with pytest.raises(OSError, match="no space"):
        roots.make_root("debian")
    root = roots.make_root("debian")
    assert root.joinpath("lib").is_dir()
    assert roots.make_root("debian") == root
    assert len(attempts) == 2


@pytest.mark.needs("permissions")
def test_environment_that_failed_is_made_again(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "Cargo.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    # Called with `-m venv FOLDER`. The program in the folder writes its arguments to `log`.
    python.write_text(
        "#!/bin/sh\nmkdir -p $3/bin\n"
        "printf '#!/bin/sh\necho $* >>log\n[ $2 != pip ] || exit $STATUS' >$3/bin/python\n"
        "chmod +x $3/bin/python\n"
    )
    python.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    steps = []
    for status in ("1", "0", "0"):
        command = [str(shutil.which("make")), "test-wheels", "PYTHON=./python"]
        done = subprocess.run(
            command, cwd=tmp_path, env=inherited | {"STATUS": status}, capture_output=True, check=False
        )
        assert (done.returncode == 0) == (status == "0")
        log = tmp_path / "log"
        steps.append([line.split()[1] for line in log.read_text().splitlines()])
        log.unlink()
    assert steps == [["pip"], ["pip", "tools/dist"], ["tools/dist"]]


def test_kernels_are_added_in_the_environment_of_wheels() -> None:
    rule = (ROOT / "Makefile").read_text().partition("\nkernels-wheel: ")[2].splitlines()[:2]
    assert rule[0].partition(" ##")[0].split() == ["$(DIST_READY)", "kernels"]
    assert rule[1] == "\t$(DIST) kernels"
