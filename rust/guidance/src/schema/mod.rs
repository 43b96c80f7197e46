//! Preparation of a JSON schema for the library: rejects schemas that would take too much recursion or time, rewrites
//! keywords that the library reads differently, and sets the whitespace policy.

mod combination;
mod cost;
mod formats;
mod numbers;
mod references;
mod walk;

use std::collections::HashSet;

use serde_json::{Value, json};

pub(crate) use cost::SchemaWork;

use crate::lark_tokens::{LarkKind, LarkToken};
use crate::{GuidanceError, GuidanceLimits};

/// Parses and checks a schema and adds the library's options. The caller has checked the nesting depth of the source.
/// `work` is that of the schemas before it in the grammar.
pub(crate) fn prepare_schema(
    kind: &'static str,
    source: &str,
    limits: &GuidanceLimits,
    work: &mut SchemaWork,
) -> Result<Value, GuidanceError> {
    let invalid = |reason: String| GuidanceError::Invalid { kind, reason };
    let mut schema: Value =
        serde_json::from_str(source).map_err(|error| invalid(format!("not JSON: {error}")))?;
    if schema.get(OPTIONS).is_some() {
        return Err(invalid(format!("the keyword {OPTIONS} is not supported")));
    }
    check_and_rewrite(kind, &mut schema, limits, work)?;
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    match &mut schema {
        Value::Object(keywords) => _ = keywords.insert(OPTIONS.into(), options()),
        Value::Bool(_) => return Err(invalid("no value is valid under the schema false".into())),
        _ => return Err(invalid("a schema must be an object or true".into())),
    }
    Ok(schema)
}

/// Prepares the JSON schemas in the source of a Lark grammar. They keep their options.
pub(crate) fn prepare_embedded(
    kind: &'static str,
    source: &str,
    tokens: &[LarkToken],
    limits: &GuidanceLimits,
) -> Result<String, GuidanceError> {
    let mut work = SchemaWork::default();
    let mut prepared = String::with_capacity(source.len());
    let mut written = 0;
    for pair in tokens.windows(2) {
        let [keyword, value] = [0, 1].map(|index| pair[index].range.clone());
        if pair[0].kind != LarkKind::JsonKeyword || &source[keyword] != "%json" {
            continue;
        }
        let mut schema = serde_json::from_str(&source[value.clone()])
            .map_err(|error| GuidanceError::Invalid { kind, reason: format!("not JSON: {error}") })?;
        check_and_rewrite(kind, &mut schema, limits, &mut work)?;
        prepared.extend([&source[written..value.start], " ", &schema.to_string()]);
        written = value.end;
    }
    prepared.push_str(&source[written..]);
    Ok(prepared)
}

fn check_and_rewrite(
    kind: &'static str,
    schema: &mut Value,
    limits: &GuidanceLimits,
    work: &mut SchemaWork,
) -> Result<(), GuidanceError> {
    rewrite(schema).map_err(|reason| GuidanceError::Invalid { kind, reason })?;
    cost::check_cost(kind, schema, limits, work)?;
    cost::check_multiples(schema, work).map_err(|reason| GuidanceError::Invalid { kind, reason })
}

/// Rewrites the keywords that the library reads differently from the specification.
fn rewrite(schema: &mut Value) -> Result<(), String> {
    references::resolve(schema)?;
    walk::each_schema(schema, &mut |keywords| {
        if let Some(Value::Array(types)) = keywords.get_mut("type") {
            let mut seen = HashSet::new();
            types.retain(|name| seen.insert(name.clone()));
        }
        numbers::check_literals(keywords)?;
        numbers::narrow_bounds(keywords)?;
        numbers::write_counts_as_integers(keywords);
        formats::tighten_format(keywords);
        formats::write_whitespace(keywords);
        Ok(())
    })
}

/// Like [`prepare_schema`], for the arguments of a tool, which must be an object.
pub(crate) fn prepare_argument_schema(
    kind: &'static str,
    source: &str,
    limits: &GuidanceLimits,
    work: &mut SchemaWork,
) -> Result<Value, GuidanceError> {
    let mut schema = prepare_schema(kind, source, limits, work)?;
    let object = Value::from("object");
    let allowed = match schema.get("type") {
        None => true,
        Some(Value::Array(types)) => types.contains(&object),
        Some(only) => *only == object,
    };
    if !allowed {
        return Err(GuidanceError::Invalid { kind, reason: "arguments must have the type object".into() });
    }
    schema["type"] = object;
    Ok(schema)
}

/// The key of the library's own options in a schema.
const OPTIONS: &str = "x-guidance";

/// Allows one optional space after a comma or colon and no other whitespace. Models write both `{"a": 1}` and
/// `{"a":1}`; unlimited whitespace would let a text grow forever.
fn options() -> Value {
    json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?"})
}

/// Makes the library ignore the keywords and formats of a prepared schema that it does not support.
pub(crate) fn ignore_unsupported(schema: &mut Value) {
    schema[OPTIONS]["lenient"] = Value::Bool(true);
}
