"""The stub `_core.pyi` and the typed keywords of `_options.py`."""

from __future__ import annotations

import textwrap

from definitions import Definition, Field
from values import ValueClass, ValueField

from text import WIDTH, docstring, quoted

STUB_PROTOCOL = [
    "    def __eq__(self, other: object, /) -> bool: ...",
    "    def __ne__(self, other: object, /) -> bool: ...",
    "    def __hash__(self) -> int: ...",
    "    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...",
]


def in_lines(annotation: str, indent: str) -> str:
    """A type in parentheses on a line of its own, if it is long."""
    is_long = len(annotation) > WIDTH - 40
    return f"(\n{wrapped(annotation, indent + '    ')}\n{indent})" if is_long else annotation


def wrapped(annotation: str, indent: str) -> str:
    """A type in lines with this indent."""
    lines = textwrap.wrap(annotation, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return "\n".join(indent + line for line in lines)


def stub_property(entry: Field | ValueField) -> list[str]:
    signature = f"    def {entry.name}(self) -> {in_lines(entry.python_type, '    ')}:"
    return ["    @property", signature, *docstring(entry.description(), "        "), ""]


def stub_value_class(item: ValueClass, classes: list[ValueClass]) -> list[str]:
    lines = ["@final", f"class {item.name}:", *docstring(item.description(), "    "), ""]
    lines += ["    def __new__(", "        cls,", "        *,"]
    default = " = ..." if item.has_defaults else ""
    lines += [f"        {entry.name}: {entry.python_in}{default}," for entry in item.arguments(classes)]
    lines.append(f"    ) -> {item.name}: ...")
    for entry in [*item.fields, *item.properties, *item.delegated(classes)]:
        lines += stub_property(entry)
    lines += ["    def to_dict(self) -> dict[str, Any]:", *docstring(item.json_description(), "        "), ""]
    return [*lines, *STUB_PROTOCOL, ""]


def stub_value_classes(classes: list[ValueClass]) -> str:
    return "\n".join(line for item in classes for line in stub_value_class(item, classes))


def stub_option_class(definition: Definition) -> str:
    lines = ["@final", f"class {definition.name}:", *docstring(definition.description(), "    "), ""]
    lines += ["    def __new__(", "        cls,", "        *,"]
    for entry in definition.fields:
        accepted = in_lines(f"{entry.python_in} | None", "        ")
        lines.append(f"        {entry.name}: {accepted} = {entry.python_default},")
    lines.append(f"    ) -> {definition.name}: ...")
    for entry in definition.fields:
        lines += stub_property(entry)
    lines += [
        f"    def replace(self, **changes: Any) -> {definition.name}:",
        '        """Return a copy with some fields changed; `None` sets a field back to its default."""',
        "",
        *STUB_PROTOCOL,
    ]
    return "\n".join([*lines, ""])


def typed_dict(definition: Definition, name: str) -> str:
    """The keywords as a `TypedDict` with the help texts of the command line, the groups and the filters."""
    aliases = [f"{entry.alias}: TypeAlias = {entry.python_in}" for entry in definition.fields if entry.alias]
    lines = [*aliases, "", ""] if aliases else []
    lines += [f"class {name}(TypedDict, total=False):", f'    """The fields of `{definition.name}`."""', ""]
    for entry in definition.fields:
        plain = f"{entry.alias or entry.typed_dict or entry.python_in} | None"
        if not entry.cli:
            lines.append(f"    {entry.name}: {plain}")
            continue
        # The command line itself lists the values of an enum.
        summary = ": ".join(part for part in (entry.summary, ", ".join(map(str, entry.one_of))) if part)
        help_text = f"{summary}. Default: {entry.default_in_words()}.".replace("`", "").replace('"', "")
        lines += [f"    {entry.name}: Annotated[", f"{wrapped(plain, ' ' * 8)},"]
        *begin, end = textwrap.wrap(help_text, WIDTH - 12, break_on_hyphens=False)
        lines += [f'        "{line} "' for line in begin]
        lines += [f'        "{end}",', "    ]"]
    constant = f"{name.removesuffix('Options').upper()}_GROUPS"
    lines += ["", "", "#: The options of the command line, by group.", f"{constant} = {{"]
    for title, entries in definition.grouped():
        if names := [entry.name for entry in entries if entry.cli]:
            lines += [f'    "{title}": (', *(f'        "{name}",' for name in names), "    ),"]
    lines.append("}")
    if definition.filters:
        lines += ["", "#: The sampling filters, in the order in which they apply."]
        lines.append(f"FILTERS = ({quoted(definition.filters)})")
    return "\n".join([*lines, ""])
