"""Output and exit status of the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

__all__ = ["INTERRUPTED", "one_line", "print_json", "program"]

#: The exit status after Ctrl-C.
INTERRUPTED = 130


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    click.echo(json.dumps(value, ensure_ascii=False))


def program() -> str:
    """The command that runs this program."""
    is_module = Path(sys.argv[0]).name == "__main__.py"
    return f"{sys.executable} -m penstock" if is_module else sys.argv[0]
