"""The tables of the guide."""

from __future__ import annotations

from definitions import ENUMS, Definition
from values import ValueClass

from text import listed


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*lines, ""])


def options_table(definition: Definition) -> str:
    rows = []
    for title, entries in definition.grouped():
        rows.append([f"**{title}**", "", "", ""])
        rows += [
            [f"`{entry.name}`", entry.summary, entry.range_in_words(), entry.default_in_words()]
            for entry in entries
        ]
    return table(["parameter", "meaning", "range", "default"], rows)


def formats_table(name: str) -> str:
    """The values of an enum that names formats, with their aliases."""
    enum = ENUMS[name]
    rows = [
        [
            f'`"{value}"`',
            doc.rstrip("."),
            ", ".join(f'`"{alias}"`' for alias in enum.aliases.get(variant, ())),
        ]
        for variant, (value, doc) in enum.variants.items()
        if value != "none"
    ]
    return table(["format", "models", "aliases"], rows)


def filters_step(definition: Definition) -> str:
    """The step of the sampling order that applies the filters."""
    return f"7. {listed(definition.filters)}, each applied to the tokens that the one before left.\n"


def values_table(item: ValueClass) -> str:
    """The fields of a value class."""
    rows = [[f"`{entry.name}`", entry.summary] for entry in (*item.fields, *item.properties)]
    return table(["field", "meaning"], rows)
