//! `strict`: objects of a JSON schema take no properties that the schema does not name.

use serde_json::{Map, Value};

/// Keywords whose value is a schema or a list of schemas.
const SCHEMAS: [&str; 7] =
    ["additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems"];
/// Keywords whose value maps names to schemas.
const NAMED_SCHEMAS: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];

/// Adds `"additionalProperties": false` to every object schema that has `properties` and no `additionalProperties`. Text
/// that is not JSON is returned unchanged; the grammar compiler reports it.
pub fn close_schema(source: &str) -> String {
    let Ok(mut schema) = serde_json::from_str(source) else { return source.to_owned() };
    close(&mut schema);
    schema.to_string()
}

fn close(schema: &mut Value) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(close),
        Value::Object(keywords) => close_object(keywords),
        _ => {}
    }
}

fn close_object(keywords: &mut Map<String, Value>) {
    for (keyword, value) in keywords.iter_mut() {
        if SCHEMAS.contains(&keyword.as_str()) {
            close(value);
        } else if NAMED_SCHEMAS.contains(&keyword.as_str())
            && let Value::Object(schemas) = value
        {
            schemas.values_mut().for_each(close);
        }
    }
    if keywords.contains_key("properties") {
        keywords.entry("additionalProperties").or_insert(Value::Bool(false));
    }
}
