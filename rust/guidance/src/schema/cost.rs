//! Upper bounds on the recursion and the time that the library takes for a JSON schema.

use std::collections::{HashMap, HashSet};
use std::ptr;

use serde_json::{Map, Value};

use super::combination::{Combinations, MAX_VISITS, Names};
use super::references::target;
use crate::{GuidanceError, GuidanceLimits};

/// Maximum number of patterns that the library may have to intersect. Its work doubles with each.
const MAX_INTERSECTED_PATTERNS: usize = 12;
/// Maximum number of combinations of patterns in all schemas of a grammar.
const MAX_PATTERN_COMBINATIONS: usize = 2 << MAX_INTERSECTED_PATTERNS;
/// Maximum least common multiple of all `multipleOf` values, in units of their last decimal. The library computes it in
/// 32 bits and creates an automaton state of about 400 bytes for each remainder, in more than linear time: 0.3 s for the
/// limit.
const MAX_COMMON_MULTIPLE: u64 = 50_000;
/// Maximum number of decimals of `multipleOf`.
const MAX_DECIMALS: u32 = 6;

/// Upper bounds on the library's work for all schemas of a grammar.
#[derive(Debug, Default)]
pub(crate) struct SchemaWork {
    visits: usize,
    copied_bytes: usize,
    pairs: usize,
    /// The sum of the powers of two by the patterns that each schema intersects.
    pattern_combinations: usize,
    /// The sum of the least common multiples of the schemas.
    multiples: u64,
}

/// Checks upper bounds on the library's recursion through definitions, on the bytes it copies to combine schemas, and
/// on the pairs of properties or alternatives it compares. Adds them to `work`.
pub(super) fn check_cost(
    kind: &'static str,
    schema: &Value,
    limits: &GuidanceLimits,
    work: &mut SchemaWork,
) -> Result<(), GuidanceError> {
    let mut references = HashSet::new();
    let mut largest_object = 0;
    collect_references(schema, &mut references, &mut largest_object);
    // The library enters each definition once per name. A definition may have several names: `#`, `#/` and `#//` all
    // refer to the whole schema.
    let definitions: Vec<_> = references.iter().filter_map(|reference| target(schema, reference)).collect();
    let mut measured = definitions.iter().map(|&definition| (ptr::from_ref(definition), 0)).collect();
    let whole = height(schema, &mut measured);
    let heights: usize = definitions.into_iter().map(|definition| measured[&ptr::from_ref(definition)]).sum();
    let check = |name, amount, limit| {
        if amount <= limit {
            return Ok(());
        }
        Err(GuidanceError::TooComplex { kind, limit: format!("{amount} {name}; the limit is {limit}") })
    };
    let recursion = heights + whole + largest_object;
    check("levels of definitions, nesting and properties", recursion, limits.recursion)?;
    // From here on, recursion is within its limit.
    let mut combinations = Combinations::new(schema);
    let mut pairs = 0;
    add_each(schema, &mut combinations, &mut pairs);
    let patterns = if combinations.intersects { intersected_patterns(schema) } else { 0 };
    check("patterns that may apply to the same value", patterns, MAX_INTERSECTED_PATTERNS)?;
    let add = |sum: &mut usize, amount| {
        *sum = sum.saturating_add(amount);
        *sum
    };
    check("parts that are combined", add(&mut work.visits, combinations.visits), MAX_VISITS)?;
    let copied = add(&mut work.copied_bytes, combinations.copied_bytes);
    check("bytes copied to combine alternatives", copied, limits.copied_bytes)?;
    let pairs = add(&mut work.pairs, combinations.pairs.saturating_add(pairs));
    check("pairs of properties or alternatives", pairs, limits.pairs)?;
    let combined = add(&mut work.pattern_combinations, (1 << patterns) - 1);
    check("combinations of patterns", combined, MAX_PATTERN_COMBINATIONS)
}

/// Adds the cost of each schema in a source.
fn add_each<'schema>(value: &'schema Value, combinations: &mut Combinations<'schema>, pairs: &mut usize) {
    match value {
        Value::Object(keywords) => {
            combinations.add(value);
            *pairs = pairs.saturating_add(Names::of_keywords(keywords).pairs());
            keywords.values().for_each(|part| add_each(part, combinations, pairs));
        }
        Value::Array(parts) => parts.iter().for_each(|part| add_each(part, combinations, pairs)),
        _ => {}
    }
}

/// Collects the local references in a schema and the number of entries of its largest object.
fn collect_references<'schema>(
    value: &'schema Value,
    references: &mut HashSet<&'schema str>,
    largest_object: &mut usize,
) {
    match value {
        Value::Object(entries) => {
            let required = entries.get("required").and_then(Value::as_array).map_or(0, Vec::len);
            let properties = entries.get("properties").and_then(Value::as_object).map_or(0, Map::len);
            *largest_object = (*largest_object).max(entries.len()).max(properties + required);
            if let Some(reference) = entries.get("$ref").and_then(Value::as_str) {
                references.insert(reference);
            }
            entries.values().for_each(|entry| collect_references(entry, references, largest_object));
        }
        Value::Array(entries) => {
            entries.iter().for_each(|entry| collect_references(entry, references, largest_object));
        }
        _ => {}
    }
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

/// Checks the least common multiple of all `multipleOf` values of a schema, and the sum of those of all schemas.
pub(super) fn check_multiples(schema: &Value, work: &mut SchemaWork) -> Result<(), String> {
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
    if found.is_empty() {
        return Ok(());
    }
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
    let Some(multiple) = multiple else {
        return Err(format!(
            "the multipleOf values have no common multiple up to {MAX_COMMON_MULTIPLE} in units of their last decimal"
        ));
    };
    work.multiples += multiple;
    if work.multiples <= MAX_COMMON_MULTIPLE {
        return Ok(());
    }
    Err(format!(
        "the common multiples of multipleOf values, in units of their last decimal, have the sum {} in all schemas; the \
         limit is {MAX_COMMON_MULTIPLE}",
        work.multiples
    ))
}

fn greatest_common_divisor(left: u64, right: u64) -> u64 {
    if right == 0 { left } else { greatest_common_divisor(right, left % right) }
}
