"""The output of the build. The Dockerfile and the unit of systemd: linters, options of `penstock serve`."""

from __future__ import annotations

import configparser
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

import penstock.server
from penstock.cli.runtime import aibrix_runtime
from penstock.cli.serve import serve
from support.api.engines import make_engine
from support.paths import ROOT
from support.server.serving import serving

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCKERFILE = ROOT / "Dockerfile"
UNIT = ROOT / "docs" / "penstock.service"


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its arguments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line]


def last_stage() -> dict[str, str]:
    """The last instruction of each kind in the last stage."""
    found = instructions()
    begin = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return dict(found[begin:])


def parsed(arguments: Sequence[str]) -> dict[str, object]:
    """The values of the options and arguments of `penstock serve`, without a look at files."""
    with click.Context(serve) as context:
        values, rest, _ = serve.make_parser(context).parse_args(list(arguments))
    assert rest == []
    return values


def hadolint() -> str:
    """The linter, from the environment of the tests or the PATH."""
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed")
    return found


def test_dockerfile_has_no_lint() -> None:
    result = subprocess.run([hadolint(), DOCKERFILE], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def arguments() -> dict[str, str]:
    """The defaults of the build's arguments."""
    return dict(value.split("=", 1) for name, value in instructions() if name == "ARG")


def test_image_has_a_pinned_base_and_no_compiler() -> None:
    found = instructions()
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", arguments()["BASE"])
    stages = [re.fullmatch(r"(\S+) AS (\w+)", value) for name, value in found if name == "FROM"]
    assert [stage and stage.groups() for stage in stages] == [
        ("${BASE}", "files"),
        ("files", "aibrix"),
        ("files", "server"),  # what `docker build` makes without a target
    ]
    commands = [value for name, value in found if name == "RUN"]
    for command in commands:
        assert not re.search(r"apt-get|gcc|rustup|cargo|maturin", command)
        assert command.count("rm -rf /tmp/pip") == 1, "pip is not part of a layer"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(arguments()["EXTRAS"].split(",")) <= set(project["optional-dependencies"])


def test_labels_of_the_image_are_those_of_the_package() -> None:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    [labels] = [value for name, value in instructions() if name == "LABEL"]
    names = dict(item.split("=", 1) for item in shlex.split(labels))
    assert names["org.opencontainers.image.version"] == "${VERSION}"
    assert names["org.opencontainers.image.licenses"] == workspace["package"]["license"]


def test_image_runs_as_an_ordinary_user() -> None:
    user, group = last_stage()["USER"].split(":")
    assert int(user) > 0
    assert user == group
    assert [value for name, value in instructions() if name == "USER"] == [f"{user}:{group}"] * 2
    [command] = [value for name, value in instructions() if name == "RUN" and "chown" in value]
    assert f"chown {user}:{group} ." in command


def test_image_writes_below_its_home_only() -> None:
    found = instructions()
    [variables] = [
        dict(item.split("=", 1) for item in shlex.split(value)) for name, value in found if name == "ENV"
    ]
    [home] = [value for name, value in found if name == "WORKDIR"]
    assert variables["HOME"] == home
    for name in ("HF_HOME", "PENSTOCK_CACHE"):
        assert Path(variables[name]).parent == Path(home)


def test_image_of_aibrix_has_options_that_exist() -> None:
    found = instructions()
    stage = dict(found[found.index(("FROM", "files AS aibrix")) : found.index(("FROM", "files AS server"))])
    program, *fixed = json.loads(stage["ENTRYPOINT"])
    commands = tomllib.loads((ROOT / "python/aliases/aibrix/pyproject.toml").read_text())["project"][
        "scripts"
    ]
    assert commands[program] == "penstock.cli.runtime:aibrix_runtime"
    with click.Context(aibrix_runtime) as context:
        options, rest, _ = aibrix_runtime.make_parser(context).parse_args([*fixed, *json.loads(stage["CMD"])])
    assert (options["port"], rest) == (stage["EXPOSE"], [])


def test_image_serves_with_options_that_exist() -> None:
    stage = last_stage()
    entry = json.loads(stage["ENTRYPOINT"])
    assert entry[:2] == ["penstock", "serve"]
    options = parsed([*entry[2:], "/model", "--port", "9"])
    assert (options["model"], options["host"]) == ("/model", "0.0.0.0")  # noqa: S104 - in the container
    assert options["port"] == "9"  # the last one holds
    assert parsed(entry[2:])["port"] == stage["EXPOSE"]
    assert float(str(options["drain_timeout"])) < 10  # seconds until `docker stop` kills
    assert stage["STOPSIGNAL"] == "SIGTERM"


def test_health_check_follows_health(tiny_model: Path) -> None:
    kind, _, command = last_stage()["HEALTHCHECK"].partition("CMD ")
    assert "--start-period" in kind
    python, *arguments = json.loads(command)
    assert python == "python"
    engine = make_engine(tiny_model)
    with serving(penstock.server.app(engine)) as server:

        def status() -> int:
            own = [argument.replace(":8000/", f":{server.port}/") for argument in arguments]
            return subprocess.run([sys.executable, *own], stderr=subprocess.PIPE, check=False).returncode

        assert status() == 1
        with engine:
            assert status() == 0


def test_builder_gets_what_its_steps_mount() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line[:1] not in ("#", "")]
    assert patterns[0] == "*"
    allowed = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    mounts = re.findall(
        r"--mount=type=bind,(\S+)", " ".join(value for name, value in instructions() if name == "RUN")
    )
    sources = {options["source"] for options in map(_options, mounts) if "source" in options}
    assert allowed == {*sources, f"{arguments()['WHEELS']}/*.whl"}
    assert all((ROOT / source).exists() for source in sources)
    [whole] = [options for options in map(_options, mounts) if "source" not in options]
    assert f"{whole['target']}/${{WHEELS}}" in DOCKERFILE.read_text()
    ignored = [pattern for pattern in patterns[1:] if not pattern.startswith("!")]
    assert any(fnmatch.fnmatch("python/aliases/aibrix/aibrix/__pycache__", pattern) for pattern in ignored)


def _options(text: str) -> dict[str, str]:
    """The options of a mount."""
    return dict(item.partition("=")[::2] for item in text.split(","))


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    """The sections of the unit."""
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(re.sub(r"\\\n\s*", "", UNIT.read_text()))
    return parser


def test_unit_serves_with_options_that_exist(unit: configparser.ConfigParser) -> None:
    program, command, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("penstock", "serve")
    options = parsed(arguments)
    assert str(options["model"]).startswith("/var/lib/penstock/")
    name = str(options["api_key_file"]).removeprefix("%d/")
    assert unit["Service"]["LoadCredential"].startswith(f"{name}:/")
    assert float(str(options["drain_timeout"])) + 10 <= float(unit["Service"]["TimeoutStopSec"])


def test_unit_is_hardened(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    expected = {
        "DynamicUser": "yes",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "PrivateDevices": "yes",
        "SystemCallFilter": "@system-service",
        "KillSignal": "SIGTERM",
        "Restart": "on-failure",
    }
    assert {name: service[name] for name in expected} == expected


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd is not installed")
    copy = tmp_path / UNIT.name
    # The program of an ExecStart must exist.
    copy.write_text(UNIT.read_text().replace("/opt/penstock/bin/penstock", sys.executable))
    for command in (["verify"], ["security", "--offline=true", "--threshold=20"]):
        result = subprocess.run([program, *command, copy], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "penstock.service" not in result.stderr, result.stderr


@pytest.mark.needs("permissions")
@pytest.mark.parametrize("status", [0, 1])
def test_build_prints_one_line_or_why_it_fails(tmp_path: Path, status: int) -> None:
    for name in ("rust", "python/penstock", "examples"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "Cargo.toml", "Cargo.lock", "examples/demo-model.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    programs = {
        ".venv/bin/python": "",  # pip
        ".venv/bin/maturin": f"echo Compiling a crate; echo a warning >&2; exit {status}",
        "bin/cargo": "",
    }
    for name, script in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    # The tests are run by make, too.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment = {**inherited, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(shutil.which("make")), "build"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.fullmatch(r"Penstock is compiled: about \d+ minutes on 2 cores, once\n", done.stdout)
    if status == 0:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode != 0
        assert done.stderr.startswith("Compiling a crate\na warning\nmake: *** ")
