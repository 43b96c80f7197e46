//! Makes a JSON schema ready for the library: what it would recurse or multiply over without end is refused here,
//! and the policy on white space is set.

use std::collections::{HashMap, HashSet};
use std::ptr;

use serde_json::{Map, Value, json};

use crate::{GuidanceError, Limits};

/// Keywords that combine a schema with others.
const COMBINING: [&str; 6] = ["const", "enum", "allOf", "anyOf", "oneOf", "$ref"];
/// Keywords that say nothing about a value.
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

/// Patterns that the library may have to intersect: what it does with them doubles with each.
const MAX_INTERSECTED_PATTERNS: usize = 12;
/// The largest number that the values of `multipleOf` may all divide, in units of their last decimal: the library
/// counts in 32 bits, and has a state of its automaton for each remainder.
const MAX_COMMON_MULTIPLE: u64 = 10_000_000;
/// Decimals of `multipleOf`.
const MAX_DECIMALS: u32 = 6;

/// The schema as the library takes it. The source's nesting has been counted.
pub(crate) fn prepare(what: &'static str, source: &str, limits: &Limits) -> Result<Value, GuidanceError> {
    let invalid = |reason: String| GuidanceError::Invalid { what, reason };
    let mut schema: Value =
        serde_json::from_str(source).map_err(|error| invalid(format!("not JSON: {error}")))?;
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if schema.get(OPTIONS).is_some() {
        return Err(invalid(format!("the keyword {OPTIONS} is not supported")));
    }
    check_cost(what, &schema, limits)?;
    check_multiples(&schema).map_err(invalid)?;
    match &mut schema {
        Value::Object(keywords) => _ = keywords.insert(OPTIONS.into(), options()),
        Value::Bool(_) => return Err(invalid("no value is valid under the schema false".into())),
        _ => return Err(invalid("a schema is an object or true".into())),
    }
    Ok(schema)
}

/// The same for the arguments of a tool, which are an object whatever else the schema says.
pub(crate) fn prepare_arguments(
    what: &'static str,
    source: &str,
    limits: &Limits,
) -> Result<Value, GuidanceError> {
    let mut schema = prepare(what, source, limits)?;
    let object = Value::from("object");
    let allowed = match schema.get("type") {
        None => true,
        Some(Value::Array(types)) => types.contains(&object),
        Some(only) => *only == object,
    };
    if !allowed {
        return Err(GuidanceError::Invalid { what, reason: "arguments must be of the type object".into() });
    }
    schema["type"] = object;
    Ok(schema)
}

/// The key under which the library finds its own options in a schema.
const OPTIONS: &str = "x-guidance";

/// After a comma and after a colon one space may come, and nowhere else any white space: models write both
/// `{"a": 1}` and `{"a":1}`, and none can go on with white space for ever.
fn options() -> Value {
    json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?"})
}

/// The library follows definitions by recursion, combines schemas by copying them, and compares properties and
/// alternatives with one another. Each is bounded here from above, in time linear in the source.
fn check_cost(what: &'static str, schema: &Value, limits: &Limits) -> Result<(), GuidanceError> {
    let mut references = HashSet::new();
    let mut largest_object = 0;
    collect(schema, &mut references, &mut largest_object);
    let mut cost = Cost { whole: Measure::of(schema), copied_bytes: 0, pairs: 0, intersects: false };
    // Each definition is entered once by each of its names, from wherever it is met first. It has many: `#`, `#/` and
    // `#//` are the whole.
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
                what,
                limit: format!("{amount} {name}; the limit is {limit}"),
            });
        }
    }
    Ok(())
}

/// The local references in a schema and the number of entries in its largest object.
fn collect<'schema>(
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
            entries.values().for_each(|entry| collect(entry, references, largest_object));
        }
        Value::Array(entries) => entries.iter().for_each(|entry| collect(entry, references, largest_object)),
        _ => {}
    }
}

fn target<'schema>(schema: &'schema Value, reference: &str) -> Option<&'schema Value> {
    schema.pointer(reference.strip_prefix('#')?.trim_end_matches('/'))
}

/// The height of a value; notes those of the parts that are in the map already.
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
struct Measure {
    height: usize,
    bytes: usize,
    /// Entries of lists: every alternative of a choice is in one.
    alternatives: usize,
    /// Entries of objects: every property is in one.
    properties: usize,
    refers: bool,
}

impl Measure {
    fn of(value: &Value) -> Self {
        let mut measure = Self { height: 1, bytes: 8, ..Self::default() };
        match value {
            Value::String(text) => measure.bytes += text.len(),
            Value::Array(entries) => {
                measure.alternatives += entries.len();
                entries.iter().for_each(|entry| measure.add(&Self::of(entry)));
            }
            Value::Object(entries) => {
                measure.properties += entries.len();
                measure.bytes += entries.keys().map(String::len).sum::<usize>();
                measure.refers = entries.contains_key("$ref");
                entries.values().for_each(|entry| measure.add(&Self::of(entry)));
            }
            _ => {}
        }
        measure
    }

    fn add(&mut self, part: &Self) {
        self.height = self.height.max(part.height + 1);
        self.bytes += part.bytes;
        self.alternatives += part.alternatives;
        self.properties += part.properties;
        self.refers |= part.refers;
    }
}

/// Sums over all schemas in a source.
struct Cost {
    whole: Measure,
    copied_bytes: usize,
    pairs: usize,
    /// Whether there is an intersection at all.
    intersects: bool,
}

impl Cost {
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
        // The weights were measured: what one pair costs, in units of the pair that costs least.
        let properties = entries("properties");
        let mut pairs =
            square(properties) * if counted { 400 } else { 1 } + square(entries("patternProperties")) * 1_000;
        let excludes = keywords.contains_key("oneOf");
        if excludes || intersects(keywords) {
            // Of the whole source, where it refers to a part of it.
            let own = Measure::of(value);
            let measure = if own.refers { &self.whole } else { &own };
            if excludes {
                pairs = pairs.saturating_add(square(measure.alternatives));
            }
            if intersects(keywords) {
                self.intersects = true;
                pairs = pairs.saturating_add(square(measure.properties));
                let copied = measure.alternatives.saturating_mul(measure.bytes);
                self.copied_bytes = self.copied_bytes.saturating_add(copied);
            }
        }
        self.pairs = self.pairs.saturating_add(pairs);
    }
}

/// The most different patterns and formats that stand under properties of one name. Those of items belong to the
/// property that the array is; those of properties without a name belong to all.
fn intersected_patterns(schema: &Value) -> usize {
    type Found<'schema> = HashMap<Option<&'schema str>, HashSet<&'schema Value>>;
    fn collect<'schema>(value: &'schema Value, property: Option<&'schema str>, found: &mut Found<'schema>) {
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
        // The same number, written with the decimals there may be.
        if !(value > 0.0 && scaled / unit == value && value <= MAX_COMMON_MULTIPLE as f64) {
            return Err(format!(
                "multipleOf {value} is not a positive number of at most {MAX_DECIMALS} decimals up to {MAX_COMMON_MULTIPLE}"
            ));
        }
        digits.push(scaled as u64);
    }
    let shared = digits.iter().fold(10_u64.pow(MAX_DECIMALS), |common, &value| divisor(common, value));
    let multiple = digits.iter().map(|value| value / shared).try_fold(1, |common: u64, value| {
        Some(common / divisor(common, value) * value).filter(|&multiple| multiple <= MAX_COMMON_MULTIPLE)
    });
    match multiple {
        Some(_) => Ok(()),
        None => Err(format!(
            "the values of multipleOf have no common multiple up to {MAX_COMMON_MULTIPLE} in their last decimal"
        )),
    }
}

/// The greatest common one.
fn divisor(left: u64, right: u64) -> u64 {
    if right == 0 { left } else { divisor(right, left % right) }
}

fn square(count: usize) -> usize {
    count.saturating_mul(count)
}

/// Whether there are two groups of keywords that each make a schema of their own.
fn intersects(keywords: &Map<String, Value>) -> bool {
    let combining = keywords.keys().filter(|keyword| COMBINING.contains(&keyword.as_str())).count();
    let plain = |keyword: &String| {
        let keyword = keyword.as_str();
        !COMBINING.contains(&keyword) && !ANNOTATIONS.contains(&keyword) && keyword != "type"
    };
    let several = keywords.get("allOf").and_then(Value::as_array).is_some_and(|parts| parts.len() > 1);
    several || combining + usize::from(keywords.keys().any(plain)) > 1
}
