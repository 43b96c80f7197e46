"""Option classes in Rust: fields, defaults, ranges, readers, conflicts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from definitions import ENUMS, INFINITY, Conflict, Definition, Field, condition_in_words

from text import rust_doc

if TYPE_CHECKING:
    from collections.abc import Mapping

RUST_TYPES = {
    "float": "f64",
    "bool": "bool",
    "text": "String",
    "token_ids": "Vec<u32>",
    "token_id_lists": "Vec<Vec<u32>>",
    "texts": "Vec<String>",
}


def rust_type(entry: Field) -> str:
    if entry.binding:
        return "usize"
    plain = RUST_TYPES.get(entry.type) or entry.rust or entry.enum
    plain = f"Auto<{plain}>" if entry.auto and not entry.mapping else plain
    return f"Option<{plain}>" if entry.is_optional else plain


def rust_default(entry: Field) -> str:
    if entry.is_optional:
        return "None"
    if entry.binding:
        return "0"
    if entry.default == []:
        return "Vec::new()"
    if isinstance(entry.default, bool):
        return str(entry.default).lower()
    if entry.mapping or entry.type == "custom":
        return f"{entry.rust}::default()"
    if entry.auto:
        return "Auto(None)"
    if entry.enum:
        return f"{entry.enum}::{ENUMS[entry.enum].variant(entry.default)}"
    return str(entry.default)


def literal(value: float | None) -> str:
    return "f64::INFINITY" if value == INFINITY else str(value)


def rust_reader(entry: Field) -> str:
    """The expression that reads a value. A reader gets the limits that the entry has."""
    low, high = literal(entry.min), literal(entry.max)
    if entry.reader:
        bounds = [] if entry.min is None or entry.enum else [low, high]
        limits = [str(limit) for limit in (entry.max_items, entry.max_inner, entry.max_chars) if limit]
        return f"{entry.reader}({', '.join(['field', 'value', *limits, *bounds])})?"
    if entry.one_of:
        return f"field.one_of(value, &{list(entry.one_of)})? as {entry.rust}"
    float_reader = "above" if entry.min_exclusive else "below" if entry.max_exclusive else "range"
    readers = {
        "int": f"field.integer(value, {low}..={high})? as {entry.rust}",
        "float": f"field.{float_reader}(value, {low}, {high})?",
        "bool": "field.boolean(value)?",
        "enum": "field.choice(value)?",
        "text": f"field.text_within(value, {entry.max_chars})?",
        "texts": f"read_texts(field, value, {entry.max_items}, {entry.max_chars})?",
        "token_ids": f"read_token_ids(field, value, {entry.max_items})?",
    }
    return readers[entry.type]


def rust_given(entry: Field) -> str:
    """Whether a field differs from its default."""
    if entry.given:
        return entry.given
    if entry.is_optional:
        return f"self.{entry.name}.is_some()"
    if entry.binding:
        return f"self.{entry.name} > 0"
    if entry.default == []:
        return f"!self.{entry.name}.is_empty()"
    if isinstance(entry.default, bool):
        return f"{'!' if entry.default else ''}self.{entry.name}"
    return f"self.{entry.name} != {rust_default(entry)}"


def rust_condition(when: str, fields: Mapping[str, Field]) -> str:
    parts = []
    for part in when.split(" and "):
        name, _, word = part.partition(" != ")
        if word:
            enum = fields[name].enum
            parts.append(f"self.{name} != {enum}::{ENUMS[enum].variant(word)}")
        elif part.endswith(" is None"):
            parts.append(f"self.{part.removesuffix(' is None')}.is_none()")
        else:
            parts.append(re.sub(r"^(not )?", lambda match: "!self." if match[1] else "self.", part))
    return " && ".join(parts)


def rust_bound(conflict: Conflict, entry: Field, bound: Field) -> tuple[str, str]:
    """Whether a field exceeds its bound, and the value of the bound."""
    sign = ">" if conflict.at_most else "<"
    value, other = f"self.{entry.name}", f"self.{bound.name}"
    if bound.is_optional:
        return f"{other}.is_some_and(|bound| {value} > bound)", f"{other}.unwrap_or_default()"
    if entry.is_optional:
        return f"{value}.is_some_and(|value| value {sign} {other})", other
    return f"{value} {sign} {other}", other


def rust_conflicts(definition: Definition) -> list[str]:
    fields = {entry.name: entry for entry in definition.fields}
    lines = []
    for conflict in definition.conflicts:
        condition = f"{rust_condition(conflict.when, fields)} && " if conflict.when else ""
        for text in conflict.fields:
            name, _, comparison = text.partition(" ")
            given = f"self.{name}.is_some_and(|value| value {comparison}.0)" if comparison else ""
            given = given or rust_given(fields[name])
            for bound in (*conflict.at_most, *conflict.at_least):
                words = "at most" if conflict.at_most else "at least"
                test, shown = rust_bound(conflict, fields[name], fields[bound])
                lines += [
                    f"        if {condition}{test} {{",
                    f'            return Some(("{name}", format!("{words} {bound}, {{}}", {shown})));',
                    "        }",
                ]
            for other in conflict.after:
                if other == name:
                    break
                lines += [
                    f"        if {given} && {rust_given(fields[other])} {{",
                    f'            let limit = "left out when {other} is given: {conflict.because}";',
                    f'            return Some(("{name}", limit.to_owned()));',
                    "        }",
                ]
            if conflict.when and not (conflict.at_most or conflict.at_least):
                limit = f"left out when {condition_in_words(conflict.when, '')}: {conflict.because}"
                lines += [
                    f"        if {condition}{given} {{",
                    f'            return Some(("{name}", "{limit}".to_owned()));',
                    "        }",
                ]
    return lines


def rust_options(definition: Definition, header: list[str]) -> list[str]:
    """The struct of an option class, and its default."""
    fields = definition.fields
    lines = [
        *header,
        "",
        f"/// {definition.summary} A field that is `None` has its default.",
        "#[derive(Clone, Debug, PartialEq)]",
        f"pub struct {definition.name} {{",
    ]
    for entry in fields:
        lines += [*rust_doc(f"{entry.summary}.", "    "), f"    pub {entry.name}: {rust_type(entry)},"]
    lines += [
        "}",
        "",
        f"impl Default for {definition.name} {{",
        "    fn default() -> Self {",
        "        Self {",
    ]
    lines += [f"            {entry.name}: {rust_default(entry)}," for entry in fields]
    return [*lines, "        }", "    }", "}"]


def rust_setter(definition: Definition, receiver: str) -> list[str]:
    """The body of the function that sets a field of `receiver`; its arguments are `name` and `value`."""
    lines = [f"    let default = {definition.name}::default;", "    match (name, value) {"]
    for entry in definition.fields:
        if entry.binding:
            continue
        read = rust_reader(entry)
        value = f"Some({read})" if entry.is_optional else read
        lines += [
            f'        ("{entry.name}", None) => {receiver}.{entry.name} = default().{entry.name},',
            f'        ("{entry.name}", Some(value)) => {{',
            f'            let field = Field::new("{entry.name}");',
            f"            {receiver}.{entry.name} = {value};",
            "        }",
        ]
    return [*lines, "        _ => return Ok(false),", "    }", "    Ok(true)"]


def rust_declared_conflict(definition: Definition) -> list[str]:
    """The method that looks for conflicts."""
    return [
        "    /// The first of the declared conflicts: a field, and its limit in words.",
        "    #[allow(clippy::too_many_lines)]",
        "    pub fn declared_conflict(&self) -> Option<(&'static str, String)> {",
        *rust_conflicts(definition),
        "        None",
        "    }",
    ]


def rust_config(definition: Definition, notice: str) -> str:
    """`EngineConfig` with its defaults and ranges."""
    enums = {entry.rust or entry.enum for entry in definition.fields if entry.enum}
    names = sorted({*enums, "Auto", "Device", "FieldError", "Json", "KvEvents"})
    lines = rust_options(
        definition,
        [
            f"//! The fields of `{definition.name}`. {notice}",
            "",
            "use super::{check_above, check_choice, check_range};",
            "use crate::config_limits::*;",
            f"use crate::{{{', '.join(names)}}};",
        ],
    )
    lines += ["", f"impl {definition.name} {{"]
    for entry in definition.fields:
        if entry.engine_default is None:
            continue
        default = f"DEFAULT_{entry.name.upper()}"
        words = f"; by default {entry.default_in_words()}"
        if entry.default_at_most:
            default += f".min(self.{entry.default_at_most}())"
            words += f", but not more than `{entry.default_at_most}`"
        lines += [
            *rust_doc(f"{entry.summary}{words}.", "    "),
            f"    pub fn {entry.name}(&self) -> {number_type(entry)} {{",
            f"        self.{entry.name}.unwrap_or({default})",
            "    }",
            "",
        ]
    lines += [
        "    /// Checks the ranges of the numbers that are set.",
        "    pub(super) fn check_ranges(&self) -> Result<(), FieldError> {",
    ]
    for entry in definition.fields:
        value = f"self.{entry.name}" if entry.is_optional else f"Some(self.{entry.name})"
        if entry.one_of:
            lines.append(f'        check_choice("{entry.name}", {value}, &{entry.name.upper()}_CHOICES)?;')
        elif entry.min_exclusive:
            lines.append(f'        check_above("{entry.name}", {value}, {entry.min}, {maximum(entry)})?;')
        elif entry.type == "int":
            lines.append(f'        check_range("{entry.name}", {value}, {entry.min}, {maximum(entry)})?;')
    lines += ["        Ok(())", "    }", "", *rust_declared_conflict(definition), "}", ""]
    return "\n".join(lines)


def rust_config_setter(definition: Definition, notice: str) -> str:
    """The function that reads a field of `EngineConfig`."""
    arguments = f"config: &mut {definition.name}, name: &str, value: Option<&V>"
    return "\n".join(
        [
            f"//! The values of the fields of `{definition.name}`. {notice}",
            "",
            f"use penstock_types::{definition.name};",
            "",
            "use super::readers::*;",
            "use crate::field::{Field, Read};",
            "use crate::value::Value;",
            "",
            "/// Sets a field to a value, or to its default for `None`. Returns false for an unknown name.",
            "#[allow(clippy::too_many_lines)]",
            f"pub fn set<V: Value>({arguments}) -> Read<bool, V> {{",
            *rust_setter(definition, "config"),
            "}",
            "",
        ]
    )


def number_type(entry: Field) -> str:
    return RUST_TYPES.get(entry.type) or entry.rust


def maximum(entry: Field) -> str:
    """The name of the constant that has the maximum of a number."""
    return f"MAX_{entry.name.upper().removeprefix('MAX_')}"


def rust_quote(definition: Definition) -> list[str]:
    lines = ["    /// The value of a field as text.", "    pub fn quote(&self, name: &str) -> String {"]
    lines.append("        match name {")
    for entry in definition.fields:
        text = f'format!("{{:?}}", self.{entry.name})'
        if entry.is_optional:
            shown = 'map_or_else(|| "None".to_owned(), |value| format!("{value:?}"))'
            text = f"self.{entry.name}.as_ref().{shown}"
        lines.append(f'            "{entry.name}" => {text},')
    return [*lines, "            _ => String::new(),", "        }", "    }"]
