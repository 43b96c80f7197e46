//! Closing a JSON schema: its objects have no properties that it does not name.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// Keywords whose value is a schema or a list of schemas.
const SCHEMAS: [&str; 7] =
    ["additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems"];
/// Keywords whose value maps names to schemas.
const NAMED_SCHEMAS: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];

/// The object schemas that get `"additionalProperties": false`, of those with `properties` and no `additionalProperties`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// All.
    Strict,
    /// Those that remain satisfiable: not the parts of an `allOf`, and not those that require properties that they do not
    /// name.
    Default,
    /// None.
    Open,
}

/// Closes the objects of a schema. Text that is not JSON is returned unchanged; the grammar compiler reports it.
pub fn close_schema(source: &str, closing: Closing) -> String {
    let Ok(mut schema) = serde_json::from_str::<Value>(source) else { return source.to_owned() };
    if closing == Closing::Open {
        return source.to_owned();
    }
    let mut combined = HashSet::new();
    if closing == Closing::Default {
        collect_combined(&schema, false, &mut combined);
    }
    Closer { closing, combined }.close(&mut schema, "#", false);
    schema.to_string()
}

struct Closer {
    closing: Closing,
    /// The references of which other keywords or schemas are combined with the target.
    combined: HashSet<String>,
}

impl Closer {
    /// `pointer` is the schema's reference; `is_combined` if it applies to the same value as another schema.
    fn close(&self, schema: &mut Value, pointer: &str, is_combined: bool) {
        match schema {
            Value::Array(schemas) => {
                schemas.iter_mut().for_each(|schema| self.close(schema, pointer, is_combined))
            }
            Value::Object(keywords) => self.close_object(keywords, pointer, is_combined),
            _ => {}
        }
    }

    fn close_object(&self, keywords: &mut Map<String, Value>, pointer: &str, is_combined: bool) {
        let combines = combines(keywords);
        for (keyword, value) in keywords.iter_mut() {
            if SCHEMAS.contains(&keyword.as_str()) {
                let is_combined = is_in_place(keyword) && (is_combined || combines);
                self.close(value, &format!("{pointer}/{keyword}"), is_combined);
            } else if NAMED_SCHEMAS.contains(&keyword.as_str())
                && let Value::Object(schemas) = value
            {
                for (name, schema) in schemas.iter_mut() {
                    let name = name.replace('~', "~0").replace('/', "~1");
                    let pointer = format!("{pointer}/{keyword}/{name}");
                    self.close(schema, &pointer, self.combined.contains(&pointer));
                }
            }
        }
        let is_closed = match self.closing {
            Closing::Strict => keywords.contains_key("properties"),
            Closing::Default => !is_combined && !combines && is_satisfiable_when_closed(keywords),
            Closing::Open => false,
        };
        if is_closed {
            keywords.entry("additionalProperties").or_insert(Value::Bool(false));
        }
    }
}

/// Whether a keyword's schemas apply to the value itself, not to a part of it.
fn is_in_place(keyword: &str) -> bool {
    matches!(keyword, "allOf" | "anyOf" | "oneOf")
}

/// Whether the schemas of an object apply to the same value as its `properties`, or as each other.
fn combines(keywords: &Map<String, Value>) -> bool {
    let has_parts = keywords.get("allOf").and_then(Value::as_array).is_some_and(|parts| parts.len() > 1);
    let num_keywords = ["properties", "$ref", "allOf", "anyOf", "oneOf"]
        .iter()
        .filter(|keyword| keywords.contains_key(**keyword))
        .count();
    has_parts || num_keywords > 1
}

/// Collects the references that are combined with other schemas.
fn collect_combined(schema: &Value, is_combined: bool, references: &mut HashSet<String>) {
    match schema {
        Value::Array(schemas) => {
            schemas.iter().for_each(|schema| collect_combined(schema, is_combined, references));
        }
        Value::Object(keywords) => {
            let combines = combines(keywords);
            if let Some(reference) = keywords.get("$ref").and_then(Value::as_str)
                && (is_combined || combines)
            {
                references.insert(reference.to_owned());
            }
            for (keyword, value) in keywords {
                let is_combined = is_in_place(keyword) && (is_combined || combines);
                collect_combined(value, is_combined, references);
            }
        }
        _ => {}
    }
}

/// Whether an object with `properties` can have enough properties if it has no others.
fn is_satisfiable_when_closed(keywords: &Map<String, Value>) -> bool {
    let Some(properties) = keywords.get("properties").and_then(Value::as_object) else { return false };
    let required = keywords.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let least = keywords.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let is_named = |name: &Value| name.as_str().is_some_and(|name| properties.contains_key(name));
    least <= properties.len() as u64 && required.iter().all(is_named)
}
