"""A release: its version, its workflow, and the licences and the list of crates in a wheel."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock
from support.paths import ROOT
from support.tools import tool

licences = tool("licences", "dist")
sbom = tool("sbom", "dist")
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
CORE = ROOT / "python" / "penstock" / "_core.abi3.so"
#: The places of the version, by the files that have them.
VERSIONS = {
    "Cargo.toml": r'^version = "(.*)"$',
    "Dockerfile": r"^ARG VERSION=(.*)$",
    "deploy/helm/penstock/Chart.yaml": r'^(?:v|appV)ersion: "?([^"\n]*)"?$',
    "deploy/kubernetes/deployment.yaml": r"/penstock-aibrix:(\S+)",
    **{
        path.relative_to(ROOT).as_posix(): r'^version = "(.*)"$'
        for path in ROOT.glob("python/aliases/*/pyproject.toml")
    },
}
#: A crate with nothing but a program, and a package with the files of licences that this project names.
DUMMY = {
    "Cargo.toml": '[package]\nname = "dummy"\nversion = "0.1.0"\n[dependencies]\npart = { path = "part" }\n',
    "src/main.rs": "fn main() {}\n",
    "part/Cargo.toml": '[package]\nname = "part"\nversion = "0.2.0"\n',
    "part/src/lib.rs": "",
    "LICENSE": "mine\n",
    "third-party/crates.txt": "theirs\n",
    ".gitignore": "/third-party/\n/target/\n",
}


def workflow() -> dict[str, Any]:
    return dict(yaml.safe_load(WORKFLOW.read_text()))


def steps() -> list[dict[str, Any]]:
    """Those of all jobs."""
    return [step for job in workflow()["jobs"].values() for step in job["steps"]]


def commands() -> str:
    """The programs of all steps."""
    return "\n".join(step["run"] for step in steps() if "run" in step)


def schema_errors(path: Path) -> str:
    """The errors of the schema of workflows, or an empty text."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout


def test_first_release_of_the_changelog_is_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased, released, *_ = re.findall(r"^## (.*)$", text, re.MULTILINE)
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text())
    version = manifest["workspace"]["package"]["version"]
    assert unreleased == "Unreleased"
    assert re.fullmatch(rf"{re.escape(version)} - (unreleased|\d{{4}}-\d\d-\d\d)", released)
    assert penstock.__version__ == version


def versions(root: Path) -> list[set[str]]:
    """The versions that each file has."""
    return [
        set(re.findall(pattern, (root / name).read_text(), re.MULTILINE))
        for name, pattern in VERSIONS.items()
    ]


def test_command_of_the_instructions_sets_all_versions(tmp_path: Path) -> None:
    assert versions(ROOT) == [{penstock.__version__}] * len(VERSIONS)
    for name in VERSIONS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    text = (ROOT / "RELEASING.md").read_text()
    [command] = re.findall(r"^ +(sed (?:.*\\\n)*.*)$", text, re.MULTILINE)
    command = command.replace("A.B.C", re.escape(penstock.__version__)).replace("X.Y.Z", "9.8.7")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)  # noqa: S602 - of this repository
    assert versions(tmp_path) == [{"9.8.7"}] * len(VERSIONS)
    for name, pattern in VERSIONS.items():
        old, new = ((root / name).read_text() for root in (ROOT, tmp_path))
        num_changed = sum(line not in old.splitlines() for line in new.splitlines())
        assert num_changed == len(re.findall(pattern, old, re.MULTILINE)), name


def test_workflow_has_its_schema(tmp_path: Path) -> None:
    assert schema_errors(WORKFLOW) == ""
    copy = tmp_path / "copy.yml"
    copy.write_text(WORKFLOW.read_text().replace("runs-on:", "run-on:"))
    assert "run-on" in schema_errors(copy)


def test_workflow_runs_targets_and_programs_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"\bmake ([a-z-]+)", commands())
    assert {"wheels", "deny", "docs"} <= set(targets)
    missing = [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)]
    programs = re.findall(r"\bpython (\S+\.py)", commands())
    assert programs
    assert missing + [name for name in programs if not (ROOT / name).exists()] == []


def test_actions_are_named_by_commits() -> None:
    lines = re.findall(r"uses: (.*)", WORKFLOW.read_text())
    assert [line for line in lines if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
    assert len(set(lines)) == len({line.partition("@")[0] for line in lines}), "one version of each"


def test_jobs_that_run_programs_cannot_write() -> None:
    """The tokens of publishing and signing are in jobs that run actions only."""
    assert workflow()["permissions"] == {}
    for name, job in workflow()["jobs"].items():
        is_privileged = "write" in job["permissions"].values()
        assert is_privileged == (name in {"attest", "publish", "publish-trial"}), name
        assert not (is_privileged and any("run" in step for step in job["steps"])), name


def test_only_tested_and_signed_files_are_published() -> None:
    jobs = workflow()["jobs"]
    assert set(jobs["attest"]["needs"]) == {"crates", "site", "test", "test-musl"}
    for name, event in (("publish", "push"), ("publish-trial", "workflow_dispatch")):
        assert (jobs[name]["needs"], jobs[name]["if"]) == ("attest", f"github.event_name == '{event}'")


def test_publishers_are_those_of_the_instructions() -> None:
    text = (ROOT / "RELEASING.md").read_text()
    jobs = workflow()["jobs"]
    names = (jobs["publish"]["environment"]["name"], jobs["publish-trial"]["environment"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert f"| Workflow name | `{WORKFLOW.name}` |" in text
    assert f"| Environment name | `{names[0]}`, on test.pypi.org `{names[1]}` |" in text
    assert f"| PyPI project name | `{project}` |" in text
    assert jobs["publish"]["environment"]["url"] == f"https://pypi.org/project/{project}/"


def test_crates_are_checked_for_the_targets_of_the_wheels() -> None:
    rules = tomllib.loads((ROOT / "deny.toml").read_text())
    assert set(rules["graph"]["targets"]) == set(tool("targets", "dist").TARGETS)


def test_licences_are_those_of_the_crates_in_the_module() -> None:
    """The module has the paths of sources, for messages of panics and backtraces."""
    path = rb"/registry/src/[^/]+/([\w-]+?)-(\d+\.\d+\.\d+[\w.+-]*)[/\0]"
    found = set(re.findall(path, CORE.read_bytes()))
    crates = licences.linked_crates(licences.host())
    assert len(found) > 40
    assert {(name.decode(), version.decode()) for name, version in found} <= {
        (crate.name, crate.version) for crate in crates
    }
    assert not any(crate.name.startswith("penstock") for crate in crates)
    assert {"syn", "serde_derive", "proptest", "loom"}.isdisjoint(crate.name for crate in crates)


def test_licences_of_this_machine_are_complete(tmp_path: Path) -> None:
    folder = tmp_path / "third-party"
    folder.mkdir()
    (folder / "old.txt").touch()
    licences.write_licences(licences.host(), folder)
    assert {path.name for path in folder.iterdir()} == {"crates.txt", "rust.html"}
    text = (folder / "crates.txt").read_text()
    for crate in licences.linked_crates(licences.host()):
        assert f"{crate}: {crate.licence}, https://" in text
        assert re.search(rf"^Of (.*, )?{re.escape(str(crate))}[,:]", text, re.MULTILINE), crate
    assert text.count("Permission is hereby granted") > 10
    assert "Rust Standard Library" in (folder / "rust.html").read_text()


def test_equal_licence_texts_are_written_once(tmp_path: Path) -> None:
    crates = []
    for name, text in (("one", "Text\n"), ("two", "Text  \r\n\r\n"), ("three", "Other\n")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "LICENSE-MIT").write_bytes(text.encode())
        (folder / "license.rs").write_text("no licence")
        crates.append(licences.Crate(name, "1.0.0", "MIT", folder, "https://example.org"))
    document = licences.licences_of(crates)
    assert "Of one 1.0.0, two 1.0.0:\n\nText\n" in document
    assert "Of three 1.0.0:\n\nOther\n" in document
    assert "no licence" not in document


def test_crate_without_a_licence_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("text")
    crate = licences.Crate("a", "1.0.0", "MIT", tmp_path, "https://example.org")
    with pytest.raises(licences.LicenceError, match=r"a 1\.0\.0: no file with its licence in "):
        licences.licences_of([crate])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that maturin builds with this project's files of licences."""
    folder = tmp_path_factory.mktemp("dummy")
    for name, text in DUMMY.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["maturin"]\nbuild-backend = "maturin"\n'
        f'[project]\nname = "dummy"\nversion = "0.1.0"\nlicense-files = {json.dumps(files)}\n'
        '[tool.maturin]\nbindings = "bin"\n'
    )
    maturin = str(Path(sys.executable).with_name("maturin"))
    command = [maturin, "build", "--quiet", "--out", "dist"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return next((folder / "dist").glob("*.whl"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def test_wheel_has_collected_licences(wheel: Path) -> None:
    found = contents(wheel)
    folder = "dummy-0.1.0.dist-info"
    assert found[f"{folder}/licenses/LICENSE"] == b"mine\n"
    assert found[f"{folder}/licenses/third-party/crates.txt"] == b"theirs\n"
    assert b"License-File: third-party/crates.txt\n" in found[f"{folder}/METADATA"]


def test_list_of_crates_in_a_wheel_has_no_paths(wheel: Path) -> None:
    root = wheel.parents[1]
    name = "dummy-0.1.0.dist-info/sboms/dummy.cyclonedx.json"
    before = contents(wheel)
    assert root.as_uri().encode() in before[name]
    sbom.remove_paths(wheel, root)
    after = contents(wheel)
    assert not [file for file, data in after.items() if ".dist-info/" in file and str(root).encode() in data]
    document = json.loads(after[name])
    assert document["bomFormat"] == "CycloneDX"
    assert [part["name"] for part in document["components"]] == ["part"]
    changed = {file for file in before if before[file] != after[file]}
    assert list(before) == list(after)
    assert changed == {name, "dummy-0.1.0.dist-info/RECORD"}
    for row in after["dummy-0.1.0.dist-info/RECORD"].decode().splitlines():
        file, digest, size = row.rsplit(",", 2)
        if not file.endswith("RECORD"):
            expected = base64.urlsafe_b64encode(hashlib.sha256(after[file]).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={expected}", str(len(after[file])))


@pytest.mark.parametrize("name", ["README.md", "RELEASING.md"])
def test_wheels_that_never_ran_are_named(name: str) -> None:
    rows = [row for row in (ROOT / "docs/guide/install.md").read_text().splitlines() if "never run" in row]
    words = ("musl", "macOS", "Windows", "GIL")
    assert [[word for word in words if word in row] for row in rows] == [[word] for word in words]
    [text] = [
        part
        for part in re.split(r"\n\n|\n(?=\d\. )", (ROOT / name).read_text())
        if re.search(r"wheels[^|]*experimental", part)
    ]
    assert [word for word in words if word not in text] == []
