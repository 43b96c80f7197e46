"""Prose: numbers in words, wrapped paragraphs, docstrings, doc comments and string literals."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable

WIDTH = 110


def number(value: float) -> str:
    """A number as the documentation shows it: `2**32 - 1`, not `4294967295`."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    size, sign = abs(value), "-" if value < 0 else ""
    for power in (31, 32, 63, 64):
        if size == 2**power:
            return f"{sign}2**{power}"
        if size == 2**power - 1:
            return f"{sign}(2**{power} - 1)" if sign else f"2**{power} - 1"
    return str(value)


def quoted(values: Iterable[str]) -> str:
    return ", ".join(f'"{value}"' for value in values)


def listed(names: Iterable[str]) -> str:
    """Names of fields, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def joined(text: str) -> str:
    return " ".join(text.split())


def paragraphs(*parts: str) -> str:
    """The parts that are not empty, as paragraphs."""
    return "\n\n".join(part for part in parts if part)


def wrapped(text: str, width: int = WIDTH - 10) -> list[str]:
    """The lines of `text`: paragraphs and list items are filled, an item's further lines are indented."""
    lines: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        lines += [""] if lines else []
        for item in re.split(r"\n(?=- )", paragraph):
            indent = "  " if item.startswith("- ") else ""
            lines += textwrap.wrap(
                joined(item), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return lines


def docstring(text: str, indent: str) -> list[str]:
    lines = wrapped(text, WIDTH - len(indent) - 3)
    if len(lines) > 1 and lines[1]:
        sys.exit(f"the summary is too long for one line: {text.splitlines()[0]}")
    if len(lines) == 1:
        return [f'{indent}"""{lines[0]}"""']
    return [f'{indent}"""{lines[0]}', *((indent + line).rstrip() for line in lines[1:]), f'{indent}"""']


def rust_doc(text: str, indent: str) -> list[str]:
    return [f"{indent}/// {line}".rstrip() for line in wrapped(text, WIDTH - len(indent) - 4)]


def rust_string(text: str) -> str:
    """A Rust string literal. Long ones continue on further lines, of which Rust ignores the first spaces."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    if len(escaped) < WIDTH - 40:  # of the code around it
        return '"' + escaped.replace("\n", "\\n") + '"'
    lines = [""]
    for line in escaped.replace("\n", "\\n\n").split("\n"):
        for word in re.findall(r" *[^ ]+ *| +", line.replace(" ", "\\x20", line.startswith(" "))):
            if lines[-1].endswith("\\n") or len(lines[-1]) + len(word) > WIDTH:
                lines.append("")
            lines[-1] += word
    return '"' + "\\\n     ".join(["", *lines]) + '"'


def doc_literal(text: str) -> str:
    """A docstring as a Rust literal."""
    return rust_string("\n".join(wrapped(text)))
