//! Closing a JSON schema: its objects have no properties that it does not name.

use std::collections::HashSet;
use std::ptr;

use serde_json::{Map, Value};

/// Keywords whose value is a schema or a list of schemas.
const SCHEMAS: [&str; 7] =
    ["additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems"];
/// Keywords whose value maps names to schemas.
const NAMED_SCHEMAS: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];
/// Keywords whose schemas apply to the value itself, not to a part of it.
const IN_PLACE: [&str; 4] = ["$ref", "allOf", "anyOf", "oneOf"];
/// Keywords that constrain the properties of an object.
const PROPERTY_CONSTRAINTS: [&str; 5] =
    ["additionalProperties", "minProperties", "patternProperties", "properties", "required"];

/// The object schemas that get `"additionalProperties": false`, of those with `properties` and no
/// `additionalProperties`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// All of them are closed.
    Strict,
    /// Those that remain satisfiable: not those that apply to a value together with another schema, and not those that
    /// require properties that they do not name.
    Default,
    /// None is closed.
    Open,
}

/// Closes the objects of a schema. Text that is not JSON is returned unchanged; the grammar compiler reports it.
pub fn close_schema(source: &str, closing: Closing) -> String {
    let Ok(mut schema) = serde_json::from_str::<Value>(source) else { return source.to_owned() };
    let combined = match closing {
        Closing::Strict => Some(HashSet::new()),
        Closing::Default => combined_schemas(&schema),
        Closing::Open => None,
    };
    let Some(combined) = combined else { return source.to_owned() };
    Closer { closing, combined }.close(&mut schema);
    schema.to_string()
}

/// The identity of a schema: its address. Schemas are closed after those within them, so no schema moves before it is
/// found. Pointers as text would be copied for each schema below a long name.
type SchemaId = *const Value;

struct Closer {
    closing: Closing,
    /// The schemas that apply to a value together with others.
    combined: HashSet<SchemaId>,
}

impl Closer {
    fn close(&self, schema: &mut Value) {
        let id = ptr::from_ref(schema);
        match schema {
            Value::Array(schemas) => schemas.iter_mut().for_each(|schema| self.close(schema)),
            Value::Object(keywords) => {
                for (keyword, value) in keywords.iter_mut() {
                    if SCHEMAS.contains(&keyword.as_str()) {
                        self.close(value);
                    } else if NAMED_SCHEMAS.contains(&keyword.as_str())
                        && let Value::Object(schemas) = value
                    {
                        schemas.values_mut().for_each(|schema| self.close(schema));
                    }
                }
                if self.closes(keywords, id) {
                    keywords.entry("additionalProperties").or_insert(Value::Bool(false));
                }
            }
            _ => {}
        }
    }

    fn closes(&self, keywords: &Map<String, Value>, id: SchemaId) -> bool {
        match self.closing {
            Closing::Strict => keywords.contains_key("properties"),
            Closing::Default => !self.combined.contains(&id) && is_satisfiable_when_closed(keywords),
            Closing::Open => false,
        }
    }
}

/// The schemas that apply to a value together with others; `None` if a reference is not the pointer of a schema in
/// `root`. References are followed, without recursion: their number has no bound.
fn combined_schemas(root: &Value) -> Option<HashSet<SchemaId>> {
    let (mut combined, mut visited) = (HashSet::new(), HashSet::new());
    let mut pending = vec![(root, false)];
    while let Some((schema, is_combined)) = pending.pop() {
        if !visited.insert((ptr::from_ref(schema), is_combined)) {
            continue;
        }
        match schema {
            Value::Array(schemas) => pending.extend(schemas.iter().map(|schema| (schema, is_combined))),
            Value::Object(keywords) => {
                let is_combined = is_combined || combines(keywords);
                if let Some(reference) = keywords.get("$ref") {
                    let target = reference.as_str()?.strip_prefix('#')?;
                    pending.push((root.pointer(target)?, is_combined));
                }
                for (keyword, value) in keywords {
                    if SCHEMAS.contains(&keyword.as_str()) {
                        pending.push((value, is_combined && IN_PLACE.contains(&keyword.as_str())));
                    } else if NAMED_SCHEMAS.contains(&keyword.as_str())
                        && let Value::Object(schemas) = value
                    {
                        pending.extend(schemas.values().map(|schema| (schema, false)));
                    }
                }
                if is_combined {
                    combined.insert(ptr::from_ref(schema));
                }
            }
            _ => {}
        }
    }
    Some(combined)
}

/// Whether several keywords of a schema constrain the properties of the same object.
fn combines(keywords: &Map<String, Value>) -> bool {
    let has = |names: &[&str]| names.iter().filter(|name| keywords.contains_key(**name)).count();
    let num_parts = keywords.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
    match has(&IN_PLACE) {
        0 => false,
        1 => num_parts > 1 || has(&PROPERTY_CONSTRAINTS) > 0,
        _ => true,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_below_a_long_name_are_closed() {
        // 30 GB if the place of each schema were written.
        let name = "n".repeat(100_000);
        let inner = r#"{"properties":{"a":{}}}"#;
        let schemas = vec![inner; 300_000].join(",");
        let source = format!(r#"{{"properties":{{"{name}":{{"items":{{"prefixItems":[{schemas}]}}}}}}}}"#);
        for closing in [Closing::Default, Closing::Strict] {
            let closed = close_schema(&source, closing);
            assert_eq!(closed.matches(r#""additionalProperties":false"#).count(), 300_001);
        }
    }
}
