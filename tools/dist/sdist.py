"""Builds the source distribution, with the crates that the extension module is built from."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from targets import ROOT
from vendor import vendor

#: Cargo finds the crates in the folder itself.
CONFIG = """\
[source.crates-io]
replace-with = "vendored-sources"

[source.vendored-sources]
directory = "vendor"
"""


def commit_time() -> int:
    """Seconds of the last commit since 1970, which all files of a distribution have."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def build_sdist(out: Path) -> Path:
    """Build the source distribution in `out`."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        command = [sys.executable, "-m", "maturin", "sdist", "--out", temporary]
        subprocess.run(command, check=True, cwd=ROOT)
        [archive] = work.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
        folder = work / archive.name.removesuffix(".tar.gz")
        make_links_absolute(folder)
        vendor(folder / "vendor")
        (folder / ".cargo").mkdir()
        (folder / ".cargo" / "config.toml").write_text(CONFIG, encoding="utf-8")
        out.mkdir(parents=True, exist_ok=True)
        pack(folder, out / archive.name)
        return out / archive.name


def make_links_absolute(folder: Path) -> None:
    """Add the address of the repository, if the project has one, to the links of PyPI's page."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if "urls" in project:
        version = folder.name.rpartition("-")[2]
        for name in ("README.md", "PKG-INFO"):
            text = (folder / name).read_text(encoding="utf-8")
            linked = re.sub(r"\]\((?!\w+:|#)", f"]({project['urls']['Repository']}/blob/v{version}/", text)
            (folder / name).write_text(linked, encoding="utf-8")


def pack(folder: Path, archive: Path) -> None:
    """Write an archive whose bytes depend on the files and the last commit only."""
    time = commit_time()

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uid, member.gid, member.uname, member.gname = time, 0, 0, "", ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        return member

    with (
        archive.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, time) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(folder.rglob("*")):
            tar.add(path, str(path.relative_to(folder.parent)), recursive=False, filter=plain)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the source distribution to `folder`, in place of what is there.

    The crates of others do not change, so what was compiled of them is used again. All other files are new.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")
        [content] = Path(temporary).iterdir()
        content.rename(folder)
    for path in folder.glob("rust/**/*"):
        path.touch()
