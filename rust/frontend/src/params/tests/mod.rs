//! Tests of the parameters with JSON values: readers and ranges, conflicts, resolution.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod conflicts;
mod readers;
mod resolution;

use serde_json::Value as JsonValue;

use super::SamplingParams;
use crate::field::ReadError;

/// Reads parameters from a JSON object. An error is "place: limit".
fn read(fields: &JsonValue) -> Result<SamplingParams, String> {
    let mut params = SamplingParams::default();
    for (name, value) in fields.as_object().into_iter().flatten() {
        match params.set(name, (!value.is_null()).then_some(value)) {
            Ok(is_known) => assert!(is_known, "{name}"),
            Err(ReadError::Field(problem)) => return Err(format!("{}: {}", problem.place, problem.limit)),
            Err(ReadError::Raised(never)) => match never {},
        }
    }
    Ok(params)
}

/// Reads and checks parameters.
fn params(fields: JsonValue) -> SamplingParams {
    let params = read(&fields).unwrap_or_else(|error| panic!("{error}"));
    params.check().unwrap_or_else(|error| panic!("{error}"));
    params
}
