"""Enums, the structs of value classes, and the limits of the engine's configuration in Rust."""

from __future__ import annotations

from definitions import ENUMS, INFINITY, Definition, Enum
from rust_options import maximum, number_type
from values import ValueClass

from text import rust_doc


def rust_enums(notice: str) -> str:
    lines = [f"//! Enums. {notice}", "", "use crate::named::Named;"]
    for enum in ENUMS.values():
        derived = "Clone, Copy, Debug, " + ("Default, " if enum.default else "") + "PartialEq, Eq, Hash"
        lines += ["", f"/// {enum.doc}", f"#[derive({derived})]", f"pub enum {enum.name} {{"]
        for variant, (_, doc) in enum.variants.items():
            lines += rust_doc(doc, "    ")
            lines += ["    #[default]"] if variant == enum.default else []
            lines.append(f"    {variant},")
        all_variants = ", ".join(f"Self::{variant}" for variant in enum.variants)
        lines += [
            "}",
            "",
            f"impl {enum.name} {{",
            "    /// Every variant.",
            f"    pub const ALL: &[Self] = &[{all_variants}];",
            "",
            "    /// The name in the Python API.",
            "    pub const fn name(self) -> &'static str {",
            "        match self {",
        ]
        lines += [f'            Self::{variant} => "{name}",' for variant, (name, _) in enum.variants.items()]
        lines += [
            "        }",
            "    }",
            "}",
            "",
            f"impl Named for {enum.name} {{",
            "    fn all() -> impl Iterator<Item = Self> {",
            "        Self::ALL.iter().copied()",
            "    }",
            "",
            "    fn name(self) -> &'static str {",
            "        self.name()",
            "    }",
            *rust_aliases(enum),
            "}",
        ]
    return "\n".join([*lines, ""])


def rust_aliases(enum: Enum) -> list[str]:
    if not enum.aliases:
        return []
    lines = ["", "    fn aliases(self) -> &'static [&'static str] {", "        match self {"]
    for variant, names in enum.aliases.items():
        words = ", ".join(f'"{name}"' for name in names)
        lines.append(f"            Self::{variant} => &[{words}],")
    return [
        *lines,
        *["            _ => &[],"][len(enum.aliases) == len(enum.variants) :],
        "        }",
        "    }",
    ]


def rust_structs(classes: list[ValueClass], notice: str, header: list[str]) -> str:
    lines = [f"//! {notice}", "", *header]
    for item in classes:
        lines += ["", *rust_struct(item)]
    return "\n".join([*lines, ""])


def rust_struct(item: ValueClass) -> list[str]:
    lines = [*rust_doc(f"{item.summary}.", ""), "#[derive(Clone, Debug, PartialEq)]"]
    lines.append(f"pub struct {item.rust} {{")
    for entry in item.fields:
        lines += [*rust_doc(f"{entry.summary}.", "    "), f"    pub {entry.name}: {entry.rust},"]
    return [*lines, "}"]


def rust_limits(definition: Definition, notice: str) -> str:
    """The maxima and defaults of numbers."""
    lines = [f"//! The limits and defaults of the fields of `{definition.name}`. {notice}", ""]
    for entry in definition.fields:
        name = entry.name.upper()
        if entry.type not in ("int", "float"):
            lines += [f"pub const MAX_{name}: usize = {entry.max_items};"] if entry.max_items else []
            continue
        rust = number_type(entry)
        if entry.one_of:
            lines.append(f"pub const {name}_CHOICES: [{rust}; {len(entry.one_of)}] = {list(entry.one_of)};")
        elif entry.max != INFINITY:
            lines.append(f"pub const {maximum(entry)}: {rust} = {entry.max:_};")
        if entry.engine_default is not None:
            lines.append(f"pub const DEFAULT_{name}: {rust} = {entry.engine_default};")
    return "\n".join([*lines, ""])
