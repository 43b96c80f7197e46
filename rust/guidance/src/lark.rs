//! Writes grammars in llguidance's dialect of Lark.

use std::collections::HashSet;
use std::fmt::Write as _;

use llguidance::regex_to_lark;

use crate::schema;
use crate::{GuidanceError, Limits, ToolCalls, Vocabulary};

/// The whole text matches. Anchors at its ends add nothing to that, and the library knows none.
pub(crate) fn regex(source: &str) -> String {
    let source = source.strip_prefix('^').unwrap_or(source);
    let source = match source.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 0 => rest,
        _ => source,
    };
    if source.is_empty() { "start: \"\"".into() } else { format!("start: /{}/", regex_to_lark(source, "")) }
}

pub(crate) fn choice(what: &'static str, texts: &[String]) -> Result<String, GuidanceError> {
    let invalid = |reason: String| GuidanceError::Invalid { what, reason };
    if texts.is_empty() {
        return Err(invalid("there is nothing to choose from".into()));
    }
    if let Some(index) = texts.iter().position(String::is_empty) {
        return Err(invalid(format!("text {index} is empty")));
    }
    // One terminal of all texts: an automaton tells them apart, not the parser.
    let texts: Vec<String> = texts.iter().map(|text| quote(text)).collect();
    Ok(format!("start: TEXT\nTEXT: {}", texts.join(" | ")))
}

pub(crate) fn tool_calls(
    what: &'static str,
    calls: &ToolCalls,
    vocabulary: &Vocabulary,
    limits: &Limits,
) -> Result<String, GuidanceError> {
    let invalid = |reason: String| GuidanceError::Invalid { what, reason };
    if calls.tools.is_empty() {
        return Err(invalid("there are no tools".into()));
    }
    let mut names = HashSet::new();
    if let Some((name, _)) = calls.tools.iter().find(|(name, _)| !names.insert(name)) {
        return Err(invalid(format!("there are two tools named {name:?}")));
    }
    if calls.name_key == calls.arguments_key {
        return Err(invalid(format!("name and arguments have the same key {:?}", calls.name_key)));
    }
    let literal = |text: &str| literal(text, vocabulary);
    let mut lark = String::new();
    let mut start = String::new();
    if let Some((open, close)) = &calls.thinking {
        if close.is_empty() {
            return Err(invalid("the closing tag of thoughts is empty".into()));
        }
        thoughts(&mut lark, open, close, vocabulary);
        start.push_str(if open.is_empty() { "thoughts " } else { "thoughts? " });
    }
    start.push_str(&literal(&calls.opening));
    start.push_str(" call ");
    if calls.parallel {
        // Without anything between two calls the next one could not be told from the end.
        write!(start, "({} call)* ", literal(&calls.separator))
            .expect("a string takes all text; this is a bug");
    }
    start.push_str(&literal(&calls.closing));
    let tools: Vec<String> = (0..calls.tools.len()).map(|index| format!("tool{index}")).collect();
    let (opening, closing) = (literal(&calls.call_opening), literal(&calls.call_closing));
    writeln!(lark, "start: {start}\ncall: {opening} ({}) {closing}", tools.join(" | "))
        .expect("a string takes all text; this is a bug");
    let arguments_key = json_pattern(&calls.arguments_key);
    let name_key = json_pattern(&calls.name_key);
    for ((name, source), rule) in calls.tools.iter().zip(tools) {
        let schema = schema::prepare_arguments(what, source, limits).map_err(|error| of_tool(name, error))?;
        let name = json_pattern(name);
        writeln!(
            lark,
            r#"{rule}: /\{{ ?{name_key} ?: ?{name} ?, ?{arguments_key} ?: ?/ %json {schema} / ?\}}/"#
        )
        .expect("a string takes all text; this is a bug");
    }
    Ok(lark)
}

fn of_tool(name: &str, error: GuidanceError) -> GuidanceError {
    match error {
        GuidanceError::Invalid { what, reason } => {
            GuidanceError::Invalid { what, reason: format!("arguments of {name:?}: {reason}") }
        }
        GuidanceError::TooComplex { what, limit } => {
            GuidanceError::TooComplex { what, limit: format!("arguments of {name:?}: {limit}") }
        }
        other => other,
    }
}

/// Anything up to the closing tag, and a little white space. The first tag that is complete ends the block; if it is
/// a special token, that token does too.
fn thoughts(lark: &mut String, open: &str, close: &str, vocabulary: &Vocabulary) {
    let close_text = quote(close);
    let mut ends = format!("(spelled{}) GAP?", if special(close, vocabulary) { " | ANY named" } else { "" });
    ends.insert_str(0, &literal(open, vocabulary));
    writeln!(lark, "thoughts: {ends}\nspelled[suffix={close_text}]: /(?s:.*)/\nGAP: /[ \\n]{{1,4}}/")
        .expect("a string takes all text; this is a bug");
    if special(close, vocabulary) {
        writeln!(lark, "ANY: /(?s:.*)/\nnamed: {}", literal(close, vocabulary))
            .expect("a string takes all text; this is a bug");
    }
}

fn special(text: &str, vocabulary: &Vocabulary) -> bool {
    vocabulary.special_prefix(text).is_some_and(|(name, _)| name == text)
}

/// A text in which the name of a special token stands for that token as well as for itself.
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

/// A string literal. Lark's are JSON's, but for the one control character that JSON does not escape.
fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A regular expression, as it stands between slashes, of a text quoted as JSON.
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
