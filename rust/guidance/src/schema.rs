//! Preparation of a JSON schema for the library: rejects schemas whose compilation would take too much recursion or
//! time, and sets the whitespace policy.

use std::collections::{HashMap, HashSet};
use std::ptr;

use serde_json::{Map, Value, json};

use crate::{GuidanceError, GuidanceLimits};

/// Keywords that combine a schema with other schemas.
const COMBINING: [&str; 6] = ["const", "enum", "allOf", "anyOf", "oneOf", "$ref"];
/// Keywords that do not constrain a value.
const ANNOTATIONS: [&str; 13] = [
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
];

/// Maximum number of patterns that the library may have to intersect. Its work doubles with each.
const MAX_INTERSECTED_PATTERNS: usize = 12;
/// Maximum least common multiple of all `multipleOf` values, in units of their last decimal. The library computes it in
/// 32 bits and creates an automaton state for each remainder.
const MAX_COMMON_MULTIPLE: u64 = 10_000_000;
/// Maximum number of decimals of `multipleOf`.
const MAX_DECIMALS: u32 = 6;

/// Parses and checks a schema and adds the library's options. The caller has checked the nesting depth of the source.
pub(crate) fn prepare_schema(
    kind: &'static str,
    source: &str,
    limits: &GuidanceLimits,
) -> Result<Value, GuidanceError> {
    let invalid = |reason: String| GuidanceError::Invalid { kind, reason };
    let mut schema: Value =
        serde_json::from_str(source).map_err(|error| invalid(format!("not JSON: {error}")))?;
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if schema.get(OPTIONS).is_some() {
        return Err(invalid(format!("the keyword {OPTIONS} is not supported")));
    }
    check_cost(kind, &schema, limits)?;
    check_multiples(&schema).map_err(invalid)?;
    match &mut schema {
        Value::Object(keywords) => _ = keywords.insert(OPTIONS.into(), options()),
        Value::Bool(_) => return Err(invalid("no value is valid under the schema false".into())),
        _ => return Err(invalid("a schema must be an object or true".into())),
    }
    Ok(schema)
}

/// Like [`prepare_schema`], for the arguments of a tool, which must be an object.
pub(crate) fn prepare_argument_schema(
    kind: &'static str,
    source: &str,
    limits: &GuidanceLimits,
) -> Result<Value, GuidanceError> {
    let mut schema = prepare_schema(kind, source, limits)?;
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

/// Checks upper bounds on the library's recursion through definitions, on the bytes it copies to combine schemas, and
/// on the pairs of properties or alternatives it compares. Takes time linear in the source.
fn check_cost(kind: &'static str, schema: &Value, limits: &GuidanceLimits) -> Result<(), GuidanceError> {
    let mut references = HashSet::new();
    let mut largest_object = 0;
    collect_references(schema, &mut references, &mut largest_object);
    let mut cost = SchemaCost { whole: SchemaSize::of(schema), copied_bytes: 0, pairs: 0, intersects: false };
    // The library enters each definition once per name. A definition may have several names: `#`, `#/` and `#//` all
    // refer to the whole schema.
    let definitions: Vec<_> = references.iter().filter_map(|reference| target(schema, reference)).collect();
    let mut measured = definitions.iter().map(|&definition| (ptr::from_ref(definition), 0)).collect();
    height(schema, &mut measured);
    let heights: usize = definitions.into_iter().map(|definition| measured[&ptr::from_ref(definition)]).sum();
    let recursion = heights + cost.whole.height + largest_object;
    cost.add(schema);
    let patterns = if cost.intersects { intersected_patterns(schema) } else { 0 };
    for (name, amount, limit) in [
        ("levels of definitions, nesting and properties", recursion, limits.recursion),
        ("alternatives times the bytes that each is combined with", cost.copied_bytes, limits.copied_bytes),
        ("pairs of properties or alternatives", cost.pairs, limits.pairs),
        ("patterns that may apply to the same value", patterns, MAX_INTERSECTED_PATTERNS),
    ] {
        if amount > limit {
            return Err(GuidanceError::TooComplex {
                kind,
                limit: format!("{amount} {name}; the limit is {limit}"),
            });
        }
    }
    Ok(())
}

/// Collects the local references in a schema and the number of entries of its largest object.
fn collect_references<'schema>(
    value: &'schema Value,
    references: &mut HashSet<&'schema str>,
    largest_object: &mut usize,
) {
    match value {
        Value::Object(entries) => {
            *largest_object = (*largest_object).max(entries.len());
            if let Some(reference) = entries.get("$ref").and_then(Value::as_str) {
                references.insert(reference);
            }
            entries.values().for_each(|entry| collect_references(entry, references, largest_object));
        }
        Value::Array(entries) => {
            entries.iter().for_each(|entry| collect_references(entry, references, largest_object))
        }
        _ => {}
    }
}

fn target<'schema>(schema: &'schema Value, reference: &str) -> Option<&'schema Value> {
    schema.pointer(reference.strip_prefix('#')?.trim_end_matches('/'))
}

/// The height of a value. Also records the heights of those parts that are keys of the map.
fn height(value: &Value, measured: &mut HashMap<*const Value, usize>) -> usize {
    let parts = match value {
        Value::Array(entries) => entries.iter().map(|entry| height(entry, measured)).max(),
        Value::Object(entries) => entries.values().map(|entry| height(entry, measured)).max(),
        _ => None,
    };
    let own = 1 + parts.unwrap_or(0);
    if let Some(height) = measured.get_mut(&ptr::from_ref(value)) {
        *height = own;
    }
    own
}

/// Size of a schema.
#[derive(Default)]
struct SchemaSize {
    height: usize,
    bytes: usize,
    /// Number of list entries. Every alternative is one.
    alternatives: usize,
    /// Number of object entries. Every property is one.
    properties: usize,
    has_reference: bool,
}

impl SchemaSize {
    fn of(value: &Value) -> Self {
        let mut size = Self { height: 1, bytes: 8, ..Self::default() };
        match value {
            Value::String(text) => size.bytes += text.len(),
            Value::Array(entries) => {
                size.alternatives += entries.len();
                entries.iter().for_each(|entry| size.add(&Self::of(entry)));
            }
            Value::Object(entries) => {
                size.properties += entries.len();
                size.bytes += entries.keys().map(String::len).sum::<usize>();
                size.has_reference = entries.contains_key("$ref");
                entries.values().for_each(|entry| size.add(&Self::of(entry)));
            }
            _ => {}
        }
        size
    }

    fn add(&mut self, part: &Self) {
        self.height = self.height.max(part.height + 1);
        self.bytes += part.bytes;
        self.alternatives += part.alternatives;
        self.properties += part.properties;
        self.has_reference |= part.has_reference;
    }
}

/// Cost summed over all schemas in a source.
struct SchemaCost {
    whole: SchemaSize,
    copied_bytes: usize,
    pairs: usize,
    /// Whether any schema is an intersection.
    intersects: bool,
}

impl SchemaCost {
    fn add(&mut self, value: &Value) {
        match value {
            Value::Object(keywords) => {
                self.add_schema(value, keywords);
                keywords.values().for_each(|part| self.add(part));
            }
            Value::Array(parts) => parts.iter().for_each(|part| self.add(part)),
            _ => {}
        }
    }

    fn add_schema(&mut self, value: &Value, keywords: &Map<String, Value>) {
        let entries = |keyword: &str| keywords.get(keyword).and_then(Value::as_object).map_or(0, Map::len);
        let counted = keywords.contains_key("minProperties") || keywords.contains_key("maxProperties");
        // Measured weights: the cost of one pair, in units of the cheapest kind.
        let properties = entries("properties");
        let mut pairs =
            square(properties) * if counted { 400 } else { 1 } + square(entries("patternProperties")) * 1_000;
        let excludes = keywords.contains_key("oneOf");
        if excludes || is_intersection(keywords) {
            // A schema with a reference can pull in any part of the source.
            let own = SchemaSize::of(value);
            let size = if own.has_reference { &self.whole } else { &own };
            if excludes {
                pairs = pairs.saturating_add(square(size.alternatives));
            }
            if is_intersection(keywords) {
                self.intersects = true;
                pairs = pairs.saturating_add(square(size.properties));
                let copied = size.alternatives.saturating_mul(size.bytes);
                self.copied_bytes = self.copied_bytes.saturating_add(copied);
            }
        }
        self.pairs = self.pairs.saturating_add(pairs);
    }
}

/// Maximum number of different patterns and formats that can apply to the same property. Patterns of array items count
/// for the array's property; patterns of unnamed properties count for every property.
fn intersected_patterns(schema: &Value) -> usize {
    type PatternsByProperty<'schema> = HashMap<Option<&'schema str>, HashSet<&'schema Value>>;
    fn collect<'schema>(
        value: &'schema Value,
        property: Option<&'schema str>,
        found: &mut PatternsByProperty<'schema>,
    ) {
        match value {
            Value::Array(parts) => parts.iter().for_each(|part| collect(part, property, found)),
            Value::Object(keywords) => {
                for (keyword, part) in keywords {
                    match (keyword.as_str(), part) {
                        ("properties", Value::Object(properties)) => {
                            properties.iter().for_each(|(name, part)| collect(part, Some(name), found));
                        }
                        ("additionalProperties" | "patternProperties", _) => collect(part, None, found),
                        ("pattern" | "format", Value::String(_)) => {
                            found.entry(property).or_default().insert(part);
                        }
                        _ => collect(part, property, found),
                    }
                }
            }
            _ => {}
        }
    }
    let mut found = HashMap::new();
    collect(schema, None, &mut found);
    let everywhere = found.remove(&None).map_or(0, |patterns| patterns.len());
    everywhere + found.values().map(HashSet::len).max().unwrap_or(0)
}

fn check_multiples(schema: &Value) -> Result<(), String> {
    fn collect(value: &Value, found: &mut Vec<f64>) {
        match value {
            Value::Object(keywords) => {
                found.extend(keywords.get("multipleOf").and_then(Value::as_f64));
                keywords.values().for_each(|part| collect(part, found));
            }
            Value::Array(parts) => parts.iter().for_each(|part| collect(part, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    collect(schema, &mut found);
    let unit = 10_f64.powi(MAX_DECIMALS as i32);
    let mut digits = Vec::with_capacity(found.len());
    for value in found {
        let scaled = (value * unit).round();
        // The value must be unchanged when rounded to the allowed decimals.
        if !(value > 0.0 && scaled / unit == value && value <= MAX_COMMON_MULTIPLE as f64) {
            return Err(format!(
                "multipleOf {value} is not a positive number up to {MAX_COMMON_MULTIPLE} with at most {MAX_DECIMALS} decimals"
            ));
        }
        digits.push(scaled as u64);
    }
    let shared =
        digits.iter().fold(10_u64.pow(MAX_DECIMALS), |common, &value| greatest_common_divisor(common, value));
    let multiple = digits.iter().map(|value| value / shared).try_fold(1, |common: u64, value| {
        Some(common / greatest_common_divisor(common, value) * value)
            .filter(|&multiple| multiple <= MAX_COMMON_MULTIPLE)
    });
    match multiple {
        Some(_) => Ok(()),
        None => Err(format!(
            "the multipleOf values have no common multiple up to {MAX_COMMON_MULTIPLE} in units of their last decimal"
        )),
    }
}

fn greatest_common_divisor(left: u64, right: u64) -> u64 {
    if right == 0 { left } else { greatest_common_divisor(right, left % right) }
}

fn square(count: usize) -> usize {
    count.saturating_mul(count)
}

/// Whether the keywords form more than one schema, which the library must intersect.
fn is_intersection(keywords: &Map<String, Value>) -> bool {
    let combining = keywords.keys().filter(|keyword| COMBINING.contains(&keyword.as_str())).count();
    let plain = |keyword: &String| {
        let keyword = keyword.as_str();
        !COMBINING.contains(&keyword) && !ANNOTATIONS.contains(&keyword) && keyword != "type"
    };
    let several = keywords.get("allOf").and_then(Value::as_array).is_some_and(|parts| parts.len() > 1);
    several || combining + usize::from(keywords.keys().any(plain)) > 1
}
