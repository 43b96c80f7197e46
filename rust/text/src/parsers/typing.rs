//! Values of tool arguments that a model writes as raw text, typed by the schemas of the tools.
//!
//! Strings are kept as they are; other types are converted to JSON. Without a schema for an argument, and if its text
//! has none of the types that the schema allows, it is a string.

use std::collections::HashMap;

use serde_json::Value;

use super::literal::{self, PYTHON};

/// The most references, unions and intersections within each other that are followed in a schema.
const MAX_DEPTH: usize = 16;
/// The most schemas that are read for a value: unions that refer to each other have any number.
const MAX_SCHEMAS: usize = 256;
/// The most bytes of a reference, which is read each time that it is followed.
const MAX_REFERENCE: usize = 1024;
/// The most alternatives of a value that are considered.
const MAX_ALTERNATIVES: usize = 256;

/// The schemas of the functions that a request allows.
#[derive(Debug, Default)]
pub struct ToolSchemas(HashMap<String, Value>);

/// The schema of one argument.
#[derive(Clone, Copy)]
pub(super) struct ArgumentSchema<'a> {
    root: &'a Value,
    schema: &'a Value,
}

/// A restriction of a value.
enum Alternative<'a> {
    /// A type of JSON.
    Type(&'a str),
    /// This value.
    Value(&'a Value),
}

impl ToolSchemas {
    /// Reads the JSON schemas of functions by their names. Text that is no JSON is no schema.
    pub fn new<'a>(functions: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let schema =
            |(name, schema): (&str, &str)| Some((name.to_owned(), serde_json::from_str(schema).ok()?));
        Self(functions.filter_map(schema).collect())
    }

    /// The schema of a function's argument.
    pub(super) fn argument(&self, function: &str, key: &str) -> Option<ArgumentSchema<'_>> {
        let root = self.0.get(function)?;
        let object = resolve(root, root)?;
        Some(ArgumentSchema { root, schema: object.get("properties")?.get(key)? })
    }
}

impl ArgumentSchema<'_> {
    /// Whether every value is a string, so that its text need not be complete.
    pub(super) fn is_text(self) -> bool {
        matches!(self.alternatives()[..], [] | [Alternative::Type("string")])
    }

    /// The JSON text of a value.
    pub(super) fn convert(self, text: &str) -> String {
        let alternatives = self.alternatives();
        let spelt = alternatives.iter().find_map(|alternative| match alternative {
            Alternative::Value(Value::String(value)) if value == text => Some(literal::quoted(text)),
            Alternative::Value(Value::String(_)) | Alternative::Type(_) => None,
            Alternative::Value(value) => Some(value.to_string()).filter(|value| value == text.trim()),
        });
        let typed = || {
            alternatives.iter().find_map(|alternative| match alternative {
                Alternative::Type(kind) => convert(text.trim(), kind),
                Alternative::Value(_) => None,
            })
        };
        spelt.or_else(typed).unwrap_or_else(|| literal::quoted(text))
    }

    fn alternatives(&self) -> Vec<Alternative<'_>> {
        let mut alternatives = Vec::new();
        collect(self.schema, self.root, (MAX_DEPTH, &mut { MAX_SCHEMAS }), &mut alternatives);
        alternatives
    }
}

/// The JSON text of a value that is no string, whatever its type.
pub(super) fn convert_untyped(text: &str) -> String {
    let text = text.trim();
    match is_json(text) {
        true => Some(text.to_owned()),
        false => literal::to_json(text, PYTHON),
    }
    .unwrap_or_else(|| literal::quoted(text))
}

/// The schema that a reference within `root` names, or the schema itself.
fn resolve<'a>(mut schema: &'a Value, root: &'a Value) -> Option<&'a Value> {
    for _ in 0..MAX_DEPTH {
        let Some(reference) = schema.get("$ref") else { return Some(schema) };
        let reference = reference.as_str().filter(|reference| reference.len() <= MAX_REFERENCE)?;
        schema = root.pointer(reference.strip_prefix('#')?)?;
    }
    None
}

/// Appends the alternatives of a schema. `depth` and `num_schemas` bound the schemas that are read for it.
fn collect<'a>(
    schema: &'a Value,
    root: &'a Value,
    (depth, num_schemas): (usize, &mut usize),
    found: &mut Vec<Alternative<'a>>,
) {
    if depth == 0 || *num_schemas == 0 || found.len() >= MAX_ALTERNATIVES {
        return;
    }
    *num_schemas -= 1;
    let Some(schema) = resolve(schema, root) else { return };
    let array = |key: &str| schema.get(key).and_then(Value::as_array).into_iter().flatten();
    if let Some(value) = schema.get("const") {
        found.push(Alternative::Value(value));
    } else if schema.get("enum").is_some() {
        found.extend(array("enum").take(MAX_ALTERNATIVES).map(Alternative::Value));
    } else {
        match schema.get("type") {
            Some(Value::String(kind)) => found.push(Alternative::Type(kind)),
            Some(Value::Array(kinds)) => {
                found.extend(
                    kinds.iter().filter_map(Value::as_str).take(MAX_ALTERNATIVES).map(Alternative::Type),
                );
            }
            _ => {
                for member in ["anyOf", "oneOf", "allOf"].into_iter().flat_map(array) {
                    collect(member, root, (depth - 1, num_schemas), found);
                }
            }
        }
    }
    if schema.get("nullable") == Some(&Value::Bool(true)) {
        found.push(Alternative::Type("null"));
    }
}

/// The JSON text of a value of a type that is no string.
fn convert(text: &str, kind: &str) -> Option<String> {
    let parsed = || match is_json(text) {
        true => Some(text.to_owned()),
        false => literal::to_json(text, PYTHON),
    };
    match kind {
        "integer" => {
            let digits = match text.split_once('.') {
                Some((digits, zeros)) if !zeros.is_empty() && zeros.bytes().all(|byte| byte == b'0') => {
                    digits
                }
                _ => text,
            };
            let number = digits.strip_prefix('-').unwrap_or(digits);
            (is_json(digits) && number.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.to_owned())
        }
        "number" => {
            let is_number =
                text.starts_with(|first: char| first.is_ascii_digit() || first == '-') && is_json(text);
            is_number.then(|| text.to_owned())
        }
        "boolean" => match text {
            "true" | "True" | "1" => Some("true".to_owned()),
            "false" | "False" | "0" => Some("false".to_owned()),
            _ => None,
        },
        "null" => matches!(text, "null" | "None").then(|| "null".to_owned()),
        "object" => parsed().filter(|json| json.starts_with('{')),
        "array" => parsed().filter(|json| json.starts_with('[')),
        _ => None,
    }
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}
