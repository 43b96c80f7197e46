//! `strict`: what a schema says of an object is all that there is to the object.

use serde_json::{Map, Value};

/// Keywords whose value is a schema, or a list of schemas.
const SCHEMAS: [&str; 7] =
    ["additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems"];
/// Keywords whose value has a schema for each of its names.
const NAMED_SCHEMAS: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];

/// The schema with all objects closed that have `properties` and do not say what other ones they may have. What is no
/// JSON is left to whoever compiles it.
pub fn closed(source: &str) -> String {
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
