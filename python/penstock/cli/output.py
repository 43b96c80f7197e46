"""Output and exit status of the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import click

import penstock

__all__ = ["INTERRUPTED", "message_of", "one_line", "print_json", "program"]

#: The exit status after Ctrl-C.
INTERRUPTED = 130


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())


def message_of(error: Exception) -> str:
    """The message of an error without line breaks, with the options of the command that runs.

    They replace the keywords of Python: `max_num_seqs=8` becomes `--max-num-seqs 8`. Errors of the files of
    models, and of other programs, stay as they are: their fields can have the same names.
    """
    message = one_line(error)
    context = click.get_current_context(silent=True)
    is_of_files = isinstance(error, penstock.ModelLoadError)
    is_of_keywords = isinstance(error, penstock.PenstockError) and not is_of_files
    params = context.command.params if context is not None and is_of_keywords else []
    options = {str(option.name): option for option in params if isinstance(option, click.Option)}
    if not options:
        return message
    names = "|".join(sorted(options, key=len, reverse=True))

    def shown(found: re.Match[str]) -> str:
        name, switch, equals = found.groups()
        option = options[name]
        if switch == "False" and option.secondary_opts:
            return _flag(option.secondary_opts)
        if switch or equals:
            return _flag(option.opts) if option.is_flag else f"{_flag(option.opts)} {switch or ''}"
        return _flag(option.opts) if "_" in name else name  # others can be words

    keyword = rf"(?<![\w./'\"{{-])({names})(?:=(True|False)\b|(=)|(?![\w./'\"=-]))"
    return re.sub(keyword, shown, message)


def _flag(names: list[str]) -> str:
    """The long name of an option."""
    return next(name for name in names if name.startswith("--"))


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    click.echo(json.dumps(value, ensure_ascii=False))


def program() -> str:
    """The command that runs this program."""
    is_module = Path(sys.argv[0]).name == "__main__.py"
    return f"{sys.executable} -m penstock" if is_module else sys.argv[0]
