"""The sampling parameters in Rust: `SamplingParams`, their resolution, and `Sampling` with its ranges."""

from __future__ import annotations

from definitions import INFINITY, Definition, Field
from rust_options import (
    rust_declared_conflict,
    rust_default,
    rust_given,
    rust_options,
    rust_quote,
    rust_setter,
)

from text import rust_doc

MINUS_INFINITY = -INFINITY


def resolved_default(entry: Field) -> str:
    """The default in `Sampling`: the value that has no effect."""
    if entry.neutral is not None:
        return str(entry.neutral)
    if entry.sampling.startswith("Option"):
        return "None"
    return "Vec::new()" if entry.sampling.startswith("Vec") else rust_default(entry)


def resolved_value(entry: Field) -> str:
    """The value of a field of `Sampling`."""
    if entry.sampling_value:
        return entry.sampling_value
    narrow = " as f32" if entry.sampling == "f32" else ""
    if not entry.is_optional:
        return (
            f"self.{entry.name}.clone()" if entry.sampling.startswith("Vec") else f"self.{entry.name}{narrow}"
        )
    given = f"self.{entry.name}" + (".map(|value| value as f32)" if narrow else "")
    model = f".or(model.{entry.model_default})" if entry.model_default else ""
    return f"{given}{model}.unwrap_or({entry.neutral})"


def resolved_range(entry: Field) -> tuple[str, str] | None:
    """The test of a number's range in `Sampling`, and the range in words, if there is one."""
    low = entry.min if entry.resolved_min is None else entry.resolved_min
    high = entry.max if entry.resolved_max is None else entry.resolved_max
    value = f"self.{entry.name}"
    if entry.sampling == "u32" and high is not None and high < 2**32 - 1:
        return f"{value} <= {high}", f"at most {high}"
    if entry.sampling != "f32" or low is None or high is None:
        return None
    if entry.max_exclusive:
        return f"({low!r}..{high!r}).contains(&{value})", f"at least {low:g} and below {high:g}"
    bounds = {
        (True, False, False): (f"{value}.is_finite()", "finite"),
        (False, False, False): (
            f"({low!r}..f32::INFINITY).contains(&{value})",
            f"finite and at least {low:g}",
        ),
        (False, True, False): (f"{value} > {low!r} && {value}.is_finite()", f"finite and above {low:g}"),
        (False, False, True): (f"({low!r}..={high!r}).contains(&{value})", f"from {low:g} to {high:g}"),
        (False, True, True): (
            f"{value} > {low!r} && {value} <= {high!r}",
            f"above {low:g} and at most {high:g}",
        ),
    }
    return bounds[low == MINUS_INFINITY, entry.min_exclusive, high != INFINITY]


def rust_resolved(definition: Definition, notice: str) -> str:
    """`types::Sampling`."""
    fields = [entry for entry in definition.fields if entry.sampling]
    enums = sorted({entry.enum for entry in fields if entry.enum})
    lines = [
        f"//! The resolved sampling parameters of a request. {notice}",
        "",
        f"use crate::enums::{{{', '.join(enums)}}};" if len(enums) > 1 else f"use crate::enums::{enums[0]};",
        "use crate::field_error::FieldError;",
        "",
        "/// The parameters of sampling, with all defaults filled in.",
        "#[derive(Clone, Debug, PartialEq)]",
        "pub struct Sampling {",
    ]
    for entry in fields:
        lines += [*rust_doc(f"{entry.summary}.", "    "), f"    pub {entry.name}: {entry.sampling},"]
    lines += [
        "}",
        "",
        "impl Default for Sampling {",
        "    /// Draws from the model's own distribution, unchanged.",
        "    fn default() -> Self {",
        "        Self {",
    ]
    lines += [f"            {entry.name}: {resolved_default(entry)}," for entry in fields]
    lines += [
        "        }",
        "    }",
        "}",
        "",
        "impl Sampling {",
        "    /// Checks the ranges of the numbers. NaN is outside every range.",
        "    pub fn check(&self) -> Result<(), FieldError> {",
    ]
    for entry in fields:
        if found := resolved_range(entry):
            test, words = found
            lines.append(f'        check("{entry.name}", self.{entry.name}, {test}, "{words}")?;')
    return "\n".join(
        [
            *lines,
            "        Ok(())",
            "    }",
            "}",
            "",
            "fn check(",
            "    field: &'static str,",
            "    value: impl ToString,",
            "    is_allowed: bool,",
            "    limit: &str,",
            ") -> Result<(), FieldError> {",
            "    if is_allowed { Ok(()) } else { Err(FieldError::new(field, value, limit)) }",
            "}",
            "",
        ]
    )


def rust_params(definition: Definition, notice: str) -> str:
    """`SamplingParams`."""
    fields = definition.fields
    enums = sorted({entry.enum for entry in fields if entry.enum})
    lines = rust_options(
        definition,
        [
            f"//! `{definition.name}`. {notice}",
            "",
            f"use penstock_types::{{GenerationConfig, Sampling, {', '.join(enums)}}};",
            "",
            "use super::readers::*;",
            "use super::decimal;",
            "use super::structured::{ResponseFormat, ToolChoice, Tools};",
            "use crate::field::{Field, Read};",
            "use crate::value::Value;",
        ],
    )
    lines += [
        "",
        f"impl {definition.name} {{",
        "    /// Sets a field to a value, or to its default for `None`. Returns false for an unknown name.",
        "    #[allow(clippy::too_many_lines)]",
        "    pub fn set<V: Value>(&mut self, name: &str, value: Option<&V>) -> Read<bool, V> {",
        *(f"    {line}" for line in rust_setter(definition, "self")),
        "    }",
        "",
        *rust_declared_conflict(definition),
    ]
    bindings = [entry for entry in fields if entry.binding]
    for entry in bindings:
        lines += ["", f"    /// Maximum number of items of `{entry.name}`."]
        lines.append(f"    pub const MAX_{entry.name.upper()}: usize = {entry.max_items};")
    lines += ["", *rust_quote(definition), ""]
    lines += ["    /// Whether a filter is set.", "    pub(super) fn has_filter(&self) -> bool {"]
    lines += [f"        {' || '.join(rust_given(entry) for entry in fields if entry.filter)}", "    }", ""]
    lines += [
        "    /// The sampling parameters, with the model's defaults.",
        "    pub(super) fn sampling(&self, model: &GenerationConfig, seed: u64) -> Sampling {",
        "        Sampling {",
    ]
    lines += [f"            {entry.name}: {resolved_value(entry)}," for entry in fields if entry.sampling]
    lines += [
        "        }",
        "    }",
        "",
        "    /// The same parameters with the defaults of the sampling parameters filled in.",
        "    pub(super) fn with_defaults(&self, sampling: &Sampling) -> Self {",
        "        Self {",
    ]
    for entry in fields:
        if entry.sampling in ("f32", "u32", "u64") and entry.is_optional:
            plain = f"sampling.{entry.name}"
            plain = f"decimal({plain})" if entry.sampling == "f32" else plain
            lines.append(f"            {entry.name}: Some(self.{entry.name}.unwrap_or({plain})),")
    return "\n".join([*lines, "            ..self.clone()", "        }", "    }", "}", ""])
