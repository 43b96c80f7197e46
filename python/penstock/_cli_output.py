"""Output and exit status of the command line."""

from __future__ import annotations

import json

import click

__all__ = ["INTERRUPTED", "one_line", "print_json"]

#: The exit status after Ctrl-C.
INTERRUPTED = 130


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    click.echo(json.dumps(value, ensure_ascii=False))
