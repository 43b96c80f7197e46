"""The name of the distribution, and the commands that install its extras."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from penstock import _install
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

#: Extras and installations of `penstock`, which is another project on PyPI.
FORBIDDEN = re.compile(r"(?<![\w-])penstock\[|pip install '?penstock(?![\w-])")
THIS = "tests/api/test_install.py"


def add_distribution(folder: Path, name: str, origin: dict[str, object] | None = None) -> None:
    """The metadata of an installed distribution; `origin` is its `direct_url.json`."""
    information = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if origin is not None:
        (information / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.needs("sources")
def test_distribution_has_the_name_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == _install.DISTRIBUTION == "penstock-llm"


@pytest.mark.needs("sources")
def test_command_for_an_extra_fits_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert _install.install_command("hub") == f"pip install '{ROOT}[hub]'"
    add_distribution(tmp_path, "penstock-llm")
    assert _install.install_command("hub") == "pip install 'penstock-llm[hub]'"


@pytest.mark.needs("sources")
def test_namesake_is_a_warning_at_import(tmp_path: Path) -> None:
    add_distribution(tmp_path, "penstock")
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", "import penstock"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(tmp_path)])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == 1
    assert "pip uninstall penstock && pip install --force-reinstall " in done.stderr


@pytest.mark.parametrize(
    ("origin", "place"),
    [
        (None, "penstock-llm"),
        ({"url": "file:///a%20b/penstock", "dir_info": {"editable": True}}, "'/a b/penstock'"),
        ({"url": "file:///wheels/penstock_llm-1.0.whl", "archive_info": {}}, "/wheels/penstock_llm-1.0.whl"),
        ({"url": "https://host/x.git", "vcs_info": {"vcs": "git"}}, "git+https://host/x.git"),
        ({"url": "https://host/x.whl", "archive_info": {}}, "https://host/x.whl"),
    ],
    ids=["index", "checkout", "wheel", "repository", "address"],
)
def test_warning_of_the_namesake_names_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None, place: str
) -> None:
    add_distribution(tmp_path, "penstock")
    add_distribution(tmp_path, "penstock-llm", origin)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.warns(RuntimeWarning, match=f"--force-reinstall {re.escape(place)}$"):
        _install.warn_of_namesake()


@pytest.mark.needs("sources")
def test_warning_of_the_namesake_names_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_distribution(tmp_path, "penstock")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.warns(RuntimeWarning, match=f"--force-reinstall {ROOT}$"):
        _install.warn_of_namesake()


@pytest.mark.needs("sources")
def test_no_file_has_the_name_of_the_namesake() -> None:
    names = subprocess.check_output(["git", "-C", str(ROOT), "ls-files"], text=True).splitlines()  # noqa: S607
    found = [
        f"{name}: {match[0]}"
        for name in names
        if name != THIS
        for match in FORBIDDEN.finditer((ROOT / name).read_text(errors="replace"))
    ]
    assert found == []
    assert FORBIDDEN.search("pip install penstock")
    assert FORBIDDEN.search("penstock[server]")
