"""The command line: `penstock`, or `python -m penstock`. Its commands are in modules of their own.

They use the public API only.

Generated text goes to standard output; progress, statistics and errors go to standard error. Exit status: 0
on success, 1 on an error, 2 on invalid usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

import click

import penstock
from penstock.cli.output import INTERRUPTED, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main"]

#: The module of each command and its name there. A command is imported when it is used or listed.
_COMMANDS = {
    "batch": ("cli.batch", "batch"),
    "bench": ("cli.bench", "bench"),
    "chat": ("cli.generate", "chat"),
    "convert": ("cli.models", "convert"),
    "demo": ("cli.generate", "demo"),
    "download": ("cli.fetch", "download"),
    "generate": ("cli.generate", "generate"),
    "info": ("cli.models", "info"),
    "models": ("cli.models", "models"),
    "runtime": ("cli.runtime", "runtime"),
    "serve": ("cli.serve", "serve"),
}

#: Errors of writing to a disk, a pipe or a terminal.
OUTPUT_ERRORS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class _OutputError(click.ClickException):
    """Standard output cannot be written: the disk is full, or the reader of a pipe is gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: {error.strerror}")
        # Otherwise the interpreter writes the rest again when it exits.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)

    def show(self, file: IO[Any] | None = None) -> None:
        with suppress(OSError):
            super().show(file)


@contextmanager
def _system_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in OUTPUT_ERRORS and error.filename is None:
            raise _OutputError(error) from error
        raise click.ClickException(one_line(error)) from error


class _Group(click.Group):
    """Imports a command on use, and reports errors as one line, without a traceback."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"penstock.{module}"), name)
        return command

    def make_context(self, *arguments: Any, **keywords: Any) -> click.Context:
        with _system_errors():  # of `--help`
            return super().make_context(*arguments, **keywords)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _system_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(penstock.__version__, prog_name="penstock")
def main() -> None:
    """Penstock: LLM inference from the command line.

    MODEL is a Hugging Face model directory, a GGUF file, a converted model, or a model of the Hugging Face
    hub: owner/name, owner/name:Q4_K_M, owner/name/file.gguf, each with @revision, or a short name such as
    qwen3-0.6b, which `penstock models` lists.
    """
