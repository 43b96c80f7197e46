"""Modules that commands import: a command starts without those of other commands."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from penstock.cli import main

if TYPE_CHECKING:
    from pathlib import Path

#: Prints the modules that the arguments import; `penstock runtime` ends when it listens.
CODE = """
import json, sys
from penstock.cli import main
def stop(*_):
    raise SystemExit
if "--port" in sys.argv:
    import uvicorn
    uvicorn.Server.run = stop
try:
    main(sys.argv[1:])
finally:
    print(json.dumps([*sys.modules]))
"""
COMMANDS = {
    "batch": "cli.batch",
    "bench": "cli.bench",
    "chat": "cli.generate",
    "convert": "cli.models",
    "demo": "cli.generate",
    "download": "cli.fetch",
    "generate": "cli.generate",
    "info": "cli.models",
    "models": "cli.models",
    "runtime": "cli.runtime",
    "serve": "cli.serve",
}


def imported_by(*arguments: str) -> set[str]:
    """The modules of a process that runs this command."""
    output = subprocess.check_output([sys.executable, "-c", CODE, *arguments], text=True, timeout=60)
    return set(json.loads(output.splitlines()[-1]))


@pytest.mark.parametrize("command", COMMANDS)
def test_command_imports_no_other_command(command: str) -> None:
    modules = {f"penstock.{name}" for name in COMMANDS.values()}
    assert imported_by(command, "--help") & modules == {f"penstock.{COMMANDS[command]}"}


def test_version_imports_no_command() -> None:
    assert not imported_by("--version") & {f"penstock.{name}" for name in COMMANDS.values()}


def test_help_lists_all_commands_with_their_help() -> None:
    lines = CliRunner().invoke(main, ["--help"]).output.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == sorted(COMMANDS)
    assert all(len(line.split()) > 3 for line in lines)


def test_unknown_command_is_an_error() -> None:
    result = CliRunner().invoke(main, ["nothing"])
    assert (result.exit_code, "No such command 'nothing'" in result.output) == (2, True)


def test_runtime_listens_with_few_modules(tmp_path: Path) -> None:
    """The time until it listens is that of these imports; clients of HTTP are imported on use."""
    modules = imported_by("runtime", "--port", "0", "--model-dir", str(tmp_path))
    names = {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names}
    assert "penstock.runtime.serve" in names
    assert len(names) <= 235, sorted(names)
    heavy = {"aiohttp", "botocore", "huggingface_hub", "jinja2", "numpy", "tqdm", "urllib3", "uvloop"}
    assert not heavy & names
