//! Errors and panics of the grammar library as one-line reasons.
//!
//! The library reports every failed translation of a grammar as text, without a type. This file is the only one that
//! reads such text; its tests hold the texts that decisions depend on.

use llguidance::panic_utils;

/// Maximum length of a reason, in bytes.
const MAX_REASON_BYTES: usize = 500;

/// The library's texts for a grammar that exceeds a limit during translation.
const LIMIT_TEXTS: [&str; 4] = [
    "initial lexer configuration (grammar) too big",
    "grammar size (number of symbols) too big",
    "schema too large",
    "Schema intersection stack level exceeded",
];

/// The reasons, after the replacements, for which a lenient schema is not refused.
const UNSUPPORTED_TEXTS: [&str; 4] = [
    "keywords that are not supported: ",
    "format that is not supported: ",
    "oneOf is supported only where its alternatives exclude each other, by type or by a required constant",
    "minProperties and maxProperties are supported only where all properties are required",
];

/// Texts of the library and their replacements.
const REPLACEMENTS: [(&str, &str); 7] = [
    ("Unimplemented keys: ", UNSUPPORTED_TEXTS[0]),
    ("Unknown format: ", UNSUPPORTED_TEXTS[1]),
    (
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        UNSUPPORTED_TEXTS[2],
    ),
    (
        "min/maxProperties only supported when all keys listed in \"properties\" are required",
        UNSUPPORTED_TEXTS[3],
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

/// The error's first paragraph, without the backtrace and parser state after it.
pub(crate) fn reason(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let end =
        ["\n<backtrace>", "\n<state>", "\n<non-verbose/>"].iter().filter_map(|mark| text.find(mark)).min();
    let mut end = end.unwrap_or(text.len()).min(MAX_REASON_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let reason = text[..end].trim_end().to_owned();
    REPLACEMENTS.iter().fold(reason, |reason, (theirs, ours)| reason.replace(theirs, ours))
}

/// The reason in one line, without the lines that quote the source. The position is kept only if the source is the
/// user's own text; other sources are generated around the user's input.
pub(crate) fn one_line(reason: &str, is_users_source: bool) -> String {
    let first = reason.lines().next().unwrap_or_default();
    let (position, rest) =
        first.split_once("): ").filter(|(position, _)| position.starts_with("at ")).unzip();
    let regex_error = reason.split_once("\nerror: ").and_then(|(_, error)| error.lines().next());
    match (regex_error, position.zip(rest)) {
        (Some(error), Some((position, _))) if is_users_source => {
            format!("{position}): invalid regular expression: {error}")
        }
        (Some(error), _) => error.to_owned(),
        (None, Some((_, rest))) if !is_users_source => rest.to_owned(),
        (None, _) => first.to_owned(),
    }
}

/// Whether translation failed because the grammar exceeds a limit.
pub(crate) fn is_limit(reason: &str) -> bool {
    begins_with_one_of(reason, &LIMIT_TEXTS)
}

/// Whether translation failed because of a part of a schema that a lenient one may have.
pub(crate) fn is_unsupported(reason: &str) -> bool {
    begins_with_one_of(reason, &UNSUPPORTED_TEXTS)
}

/// Names chosen by the source appear only after the cause, so only the beginning of the cause is compared.
fn begins_with_one_of(reason: &str, texts: &[&str]) -> bool {
    let is_position = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'(');
    // A position is written as `at 3(14): ` or `3(14): `.
    let cause = match reason.split_once("): ") {
        Some((position, cause)) if is_position(position.trim_start_matches("at ")) => cause,
        _ => reason,
    };
    let cause = without_context(cause);
    texts.iter().any(|text| cause.starts_with(text))
}

/// The cause of an error in a schema, without the words before it.
pub(crate) fn without_context(reason: &str) -> &str {
    reason.strip_prefix("failed to compile JSON schema: ").unwrap_or(reason)
}

/// Whether the library caught a panic of its own and returned it as an error.
pub(crate) fn is_panic(reason: &str) -> bool {
    reason.starts_with("panic: ")
}

/// Calls the library. A panic becomes the error and is not printed.
pub(crate) fn call<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| Ok(work()))).map_err(|error| reason(&error))
}

#[cfg(test)]
mod tests {
    use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
    use serde_json::{Value, json};

    use super::*;

    fn translate(grammar: TopLevelGrammar, limits: ParserLimits) -> String {
        let error = GrammarInit::Serialized(grammar).to_internal(None, limits).err();
        reason(&error.expect("the library rejects the grammar"))
    }

    fn schema(schema: Value) -> TopLevelGrammar {
        TopLevelGrammar::from_json_schema(schema)
    }

    /// A chain of references, intersected with a keyword.
    fn chain(count: usize) -> Value {
        let reference = |index| json!({"$ref": format!("#/$defs/a{index}")});
        let mut levels: serde_json::Map<_, _> =
            (0..count).map(|index| (format!("a{index}"), reference(index + 1))).collect();
        levels.insert(format!("a{count}"), json!({"type": "string"}));
        json!({"$defs": levels, "$ref": "#/$defs/a0", "minLength": 1})
    }

    #[test]
    fn each_limit_of_the_library_is_recognised_by_its_text() {
        let small_lexer = ParserLimits { initial_lexer_fuel: 1, ..ParserLimits::default() };
        let small_grammar = ParserLimits { max_grammar_size: 1, ..ParserLimits::default() };
        let lark = || TopLevelGrammar::from_lark("start: /[a-z]{9}/ \"b\"".into());
        let options: Vec<_> = (0..10).map(|key| json!({"properties": {format!("k{key}"): {}}})).collect();
        let product = json!({"type": "object", "allOf": vec![json!({"anyOf": options}); 10]});
        let reasons = [
            translate(lark(), small_lexer.clone()),
            translate(lark(), small_grammar),
            translate(schema(product), ParserLimits::default()),
            translate(schema(chain(200)), ParserLimits::default()),
            translate(schema(json!({"pattern": "a{99}"})), small_lexer),
        ];
        for (reason, text) in reasons.iter().zip(LIMIT_TEXTS.iter().chain(&LIMIT_TEXTS[..1])) {
            assert!(is_limit(reason) && reason.contains(text), "{reason}");
        }
    }

    #[test]
    fn what_a_lenient_schema_may_have_is_recognised_by_its_text() {
        let reasons = [
            json!({"not": {}}),
            json!({"type": "string", "format": "colour"}),
            json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
            json!({"type": "object", "properties": {"a": {}}, "minProperties": 1}),
        ]
        .map(|unsupported| translate(schema(unsupported), ParserLimits::default()));
        for (reason, text) in reasons.iter().zip(UNSUPPORTED_TEXTS) {
            assert!(is_unsupported(reason) && reason.contains(text), "{reason}");
        }
        let invalid = translate(schema(json!({"properties": 1})), ParserLimits::default());
        assert!(!is_unsupported(&invalid), "{invalid}");
    }

    #[test]
    fn name_in_the_source_is_not_a_limit() {
        for name in ["schema too large", "too_big", "fuel exhausted"] {
            let object = json!({"type": "object", "properties": {name: false}, "required": [name]});
            let reason = translate(schema(object), ParserLimits::default());
            assert!(reason.contains(name) && !is_limit(&reason), "{reason}");
        }
    }

    #[test]
    fn panic_of_the_library_is_recognised_by_its_text() {
        let error = panic_utils::catch_unwind(|| -> Result<(), _> { panic!("at the disco") }).err();
        assert!(is_panic(&reason(&error.expect("it panics"))));
        assert!(!is_panic(&reason(&"a panic: no")));
    }
}
