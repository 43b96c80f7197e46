//! Closing a JSON schema: its objects have no properties that it does not name.

use std::collections::HashSet;

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
    /// All.
    Strict,
    /// Those that remain satisfiable: not those that apply to a value together with another schema, and not those that
    /// require properties that they do not name.
    Default,
    /// None.
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
    Closer { closing, combined }.close(&mut schema, "");
    schema.to_string()
}

struct Closer {
    closing: Closing,
    /// JSON pointers of the schemas that apply to a value together with others.
    combined: HashSet<String>,
}

impl Closer {
    fn close(&self, schema: &mut Value, pointer: &str) {
        match schema {
            Value::Array(schemas) => {
                for (index, schema) in schemas.iter_mut().enumerate() {
                    self.close(schema, &format!("{pointer}/{index}"));
                }
            }
            Value::Object(keywords) => {
                for (keyword, value) in keywords.iter_mut() {
                    let pointer = join(pointer, keyword);
                    if SCHEMAS.contains(&keyword.as_str()) {
                        self.close(value, &pointer);
                    } else if NAMED_SCHEMAS.contains(&keyword.as_str())
                        && let Value::Object(schemas) = value
                    {
                        schemas
                            .iter_mut()
                            .for_each(|(name, schema)| self.close(schema, &join(&pointer, name)));
                    }
                }
                if self.closes(keywords, pointer) {
                    keywords.entry("additionalProperties").or_insert(Value::Bool(false));
                }
            }
            _ => {}
        }
    }

    fn closes(&self, keywords: &Map<String, Value>, pointer: &str) -> bool {
        match self.closing {
            Closing::Strict => keywords.contains_key("properties"),
            Closing::Default => !self.combined.contains(pointer) && is_satisfiable_when_closed(keywords),
            Closing::Open => false,
        }
    }
}

/// The JSON pointers of the schemas that apply to a value together with others; `None` if a reference is not the
/// pointer of a schema in `root`. References are followed, without recursion: their number has no bound.
fn combined_schemas(root: &Value) -> Option<HashSet<String>> {
    let (mut combined, mut visited) = (HashSet::new(), HashSet::new());
    let mut pending = vec![(String::new(), root, false)];
    while let Some((pointer, schema, is_combined)) = pending.pop() {
        if !visited.insert((pointer.clone(), is_combined)) {
            continue;
        }
        match schema {
            Value::Array(schemas) => {
                let entries = schemas.iter().enumerate();
                pending
                    .extend(entries.map(|(index, entry)| (format!("{pointer}/{index}"), entry, is_combined)));
            }
            Value::Object(keywords) => {
                let is_combined = is_combined || combines(keywords);
                if let Some(reference) = keywords.get("$ref") {
                    let target = reference.as_str()?.strip_prefix('#')?;
                    pending.push((target.to_owned(), root.pointer(target)?, is_combined));
                }
                for (keyword, value) in keywords {
                    let pointer = join(&pointer, keyword);
                    if SCHEMAS.contains(&keyword.as_str()) {
                        pending.push((pointer, value, is_combined && IN_PLACE.contains(&keyword.as_str())));
                    } else if NAMED_SCHEMAS.contains(&keyword.as_str())
                        && let Value::Object(schemas) = value
                    {
                        let named =
                            schemas.iter().map(|(name, schema)| (join(&pointer, name), schema, false));
                        pending.extend(named);
                    }
                }
                if is_combined {
                    combined.insert(pointer);
                }
            }
            _ => {}
        }
    }
    Some(combined)
}

fn join(pointer: &str, token: &str) -> String {
    format!("{pointer}/{}", token.replace('~', "~0").replace('/', "~1"))
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
