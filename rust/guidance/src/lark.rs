//! Translation of grammars to llguidance's dialect of Lark.

use std::collections::HashSet;
use std::fmt::Write as _;

use llguidance::regex_to_lark;

use crate::schema::{self, SchemaWork};
use crate::{GuidanceError, GuidanceLimits, ToolCallSpec, ToolSpec, Vocabulary};

/// A grammar of the texts that a regular expression matches as a whole. Anchors at its ends are removed: they have no
/// effect, and the library does not support them.
pub(crate) fn regex(source: &str) -> String {
    let source = source.strip_prefix('^').unwrap_or(source);
    let source = match source.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 0 => rest,
        _ => source,
    };
    if source.is_empty() { "start: \"\"".into() } else { format!("start: /{}/", regex_to_lark(source, "")) }
}

pub(crate) fn choice(kind: &'static str, texts: &[String]) -> Result<String, GuidanceError> {
    let invalid = |reason: String| GuidanceError::Invalid { kind, reason };
    if texts.is_empty() {
        return Err(invalid("the list of texts is empty".into()));
    }
    if let Some(index) = texts.iter().position(String::is_empty) {
        return Err(invalid(format!("text {index} is empty")));
    }
    // All texts are one terminal, so that the lexer distinguishes them, not the parser.
    let texts: Vec<String> = texts.iter().map(|text| quote(text)).collect();
    Ok(format!("start: TEXT\nTEXT: {}", texts.join(" | ")))
}

pub(crate) fn tool_calls(
    kind: &'static str,
    calls: &ToolCallSpec,
    vocabulary: &Vocabulary,
    limits: &GuidanceLimits,
) -> Result<String, GuidanceError> {
    let invalid = |reason: String| GuidanceError::Invalid { kind, reason };
    if calls.tools.is_empty() {
        return Err(invalid("the list of tools is empty".into()));
    }
    let mut names = HashSet::new();
    if let Some(name) = calls.tools.iter().map(|tool| &tool.name).find(|name| !names.insert(*name)) {
        return Err(invalid(format!("two tools have the name {name:?}")));
    }
    if calls.name_key == calls.arguments_key {
        return Err(invalid(format!("the name and the arguments have the same key {:?}", calls.name_key)));
    }
    let literal = |text: &str| literal(text, vocabulary);
    let mut lark = String::new();
    let mut start = String::new();
    if let Some((open, close)) = &calls.reasoning {
        if close.is_empty() {
            return Err(invalid("the closing tag of the reasoning block is empty".into()));
        }
        write_reasoning(&mut lark, open, close, vocabulary);
        start.push_str(if open.is_empty() { "reasoning " } else { "reasoning? " });
    }
    start.push_str(&literal(&calls.opening));
    start.push_str(" call ");
    if calls.parallel {
        // Every call after the first follows a separator, which distinguishes it from the end.
        write!(start, "({} call)* ", literal(&calls.separator))
            .expect("writing to a string succeeds; this is a bug");
    }
    start.push_str(&literal(&calls.closing));
    let tools: Vec<String> = (0..calls.tools.len()).map(|index| format!("tool{index}")).collect();
    let (opening, closing) = (literal(&calls.call_opening), literal(&calls.call_closing));
    writeln!(lark, "start: {start}\ncall: {opening} ({}) {closing}", tools.join(" | "))
        .expect("writing to a string succeeds; this is a bug");
    let arguments_key = json_pattern(&calls.arguments_key);
    let name_key = json_pattern(&calls.name_key);
    let mut work = SchemaWork::default();
    for (ToolSpec { name, schema, ignores_unsupported }, rule) in calls.tools.iter().zip(tools) {
        let mut schema = schema::prepare_argument_schema(kind, schema, limits, &mut work)
            .map_err(|error| with_tool_name(name, error))?;
        if *ignores_unsupported {
            schema::ignore_unsupported(&mut schema);
        }
        let name = json_pattern(name);
        writeln!(
            lark,
            r#"{rule}: /\{{ ?{name_key} ?: ?{name} ?, ?{arguments_key} ?: ?/ %json {schema} / ?\}}/"#
        )
        .expect("writing to a string succeeds; this is a bug");
    }
    Ok(lark)
}

/// Adds the tool's name to an error in its arguments' schema.
fn with_tool_name(name: &str, error: GuidanceError) -> GuidanceError {
    match error {
        GuidanceError::Invalid { kind, reason } => {
            GuidanceError::Invalid { kind, reason: format!("arguments of {name:?}: {reason}") }
        }
        GuidanceError::TooComplex { kind, limit } => {
            GuidanceError::TooComplex { kind, limit: format!("arguments of {name:?}: {limit}") }
        }
        other => other,
    }
}

/// Rules for any text up to the closing tag and a few whitespace characters. The first complete closing tag ends the
/// block, as text or, if there is a special token of that name, as that token.
fn write_reasoning(lark: &mut String, open: &str, close: &str, vocabulary: &Vocabulary) {
    let close_text = quote(close);
    let mut ends =
        format!("(spelled{}) GAP?", if is_special(close, vocabulary) { " | ANY named" } else { "" });
    ends.insert_str(0, &literal(open, vocabulary));
    writeln!(lark, "reasoning: {ends}\nspelled[suffix={close_text}]: /(?s:.*)/\nGAP: /[ \\n]{{1,4}}/")
        .expect("writing to a string succeeds; this is a bug");
    if is_special(close, vocabulary) {
        writeln!(lark, "ANY: /(?s:.*)/\nnamed: {}", literal(close, vocabulary))
            .expect("writing to a string succeeds; this is a bug");
    }
}

fn is_special(text: &str, vocabulary: &Vocabulary) -> bool {
    vocabulary.special_prefix(text).is_some_and(|(name, _)| name == text)
}

/// A literal in which each name of a special token matches both the token and its spelled-out text.
fn literal(text: &str, vocabulary: &Vocabulary) -> String {
    let mut parts = Vec::new();
    let mut plain = String::new();
    let mut rest = text;
    while let Some(character) = rest.chars().next() {
        let Some((name, id)) = vocabulary.special_prefix(rest) else {
            plain.push(character);
            rest = &rest[character.len_utf8()..];
            continue;
        };
        if !plain.is_empty() {
            parts.push(quote(&std::mem::take(&mut plain)));
        }
        parts.push(format!("({} | <[{id}]>)", quote(name)));
        rest = &rest[name.len()..];
    }
    if !plain.is_empty() {
        parts.push(quote(&plain));
    }
    parts.join(" ")
}

/// A Lark string literal: a JSON string that also escapes U+007F.
fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// The body of a regular expression literal that matches the text quoted as a JSON string.
fn json_pattern(text: &str) -> String {
    let mut pattern = String::new();
    for character in serde_json::Value::from(text).to_string().chars() {
        if character.is_ascii_punctuation() && !matches!(character, '"' | '_' | '<' | '>') {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern
}
