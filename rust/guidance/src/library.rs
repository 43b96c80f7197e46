//! What the grammar library's errors and panics say, in a line.

use llguidance::panic_utils;

/// The longest reason that is passed on, in bytes.
const MAX_REASON_BYTES: usize = 500;

/// What the library says, and what it means here.
const WORDING: [(&str, &str); 5] = [
    ("Unimplemented keys: ", "keywords that are not supported: "),
    (
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "oneOf is supported only where its alternatives exclude each other, by type or by a required constant",
    ),
    (
        "Only absolute $ref's (#/...) are supported without 'referencing' feature; ref",
        "$ref leads out of the schema:",
    ),
    ("Unsatisfiable schema: ", "no value is valid: "),
    (
        "; either increase limits.initial_lexer_fuel or disable limits.precompute_large_lexemes",
        ": out of fuel",
    ),
];

/// The first paragraph of an error: what follows are a backtrace and the parser's state.
pub(crate) fn reason(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let end =
        ["\n<backtrace>", "\n<state>", "\n<non-verbose/>"].iter().filter_map(|mark| text.find(mark)).min();
    let mut end = end.unwrap_or(text.len()).min(MAX_REASON_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let reason = text[..end].trim_end().to_owned();
    WORDING.iter().fold(reason, |reason, (theirs, ours)| reason.replace(theirs, ours))
}

/// What is wrong, without the lines that quote the source and point into it; with the place only where the source is the
/// user's own, for others are written around what the user gave.
pub(crate) fn in_a_line(reason: &str, is_own_source: bool) -> String {
    let first = reason.lines().next().unwrap_or_default();
    let (place, rest) = first.split_once("): ").filter(|(place, _)| place.starts_with("at ")).unzip();
    let wrong = reason.split_once("\nerror: ").and_then(|(_, wrong)| wrong.lines().next());
    match (wrong, place.zip(rest)) {
        (Some(wrong), Some((place, _))) if is_own_source => {
            format!("{place}): invalid regular expression: {wrong}")
        }
        (Some(wrong), _) => wrong.to_owned(),
        (None, Some((_, rest))) if !is_own_source => rest.to_owned(),
        (None, _) => first.to_owned(),
    }
}

/// Runs the library's code; a panic becomes an error like others and prints nothing.
pub(crate) fn call<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| Ok(work()))).map_err(|error| reason(&error))
}
