//! A linear pass over a grammar's source that measures its brackets, before any recursive parser reads it.

use crate::lark_tokens::{LarkKind, LarkToken};

/// Bracket counts of a source.
#[derive(Default)]
pub(crate) struct BracketCounts {
    /// Maximum nesting depth.
    pub(crate) nesting: usize,
    /// Number of opening brackets.
    pub(crate) opened: usize,
}

/// The syntax of a source, as far as brackets are concerned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Syntax {
    /// Brackets in strings are ignored.
    Json,
    /// Escaped brackets and brackets in character classes are ignored.
    Regex,
}

/// Counts the brackets of a source in one pass.
pub(crate) fn count_brackets(source: &str, syntax: Syntax) -> BracketCounts {
    let mut counted = BracketCounts::default();
    let mut open: usize = 0;
    let mut bytes = source.bytes().peekable();
    let is_regex = syntax == Syntax::Regex;
    let mut within_class = false;
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => drop(bytes.next()),
            b']' if is_regex => within_class = false,
            _ if within_class => {}
            b'[' if is_regex => {
                within_class = true;
                // A leading closing bracket is a member of the class.
                bytes.next_if_eq(&b'^');
                bytes.next_if_eq(&b']');
            }
            b'"' if !is_regex => skip_string(&mut bytes),
            b'(' | b'[' | b'{' => {
                open += 1;
                counted.opened += 1;
                counted.nesting = counted.nesting.max(open);
            }
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
    }
    counted
}

fn skip_string(bytes: &mut impl Iterator<Item = u8>) {
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => drop(bytes.next()),
            b'"' => return,
            _ => {}
        }
    }
}

/// Counts the brackets of a Lark grammar, also those in its regular expressions and JSON values.
pub(crate) fn count_lark_brackets(source: &str, tokens: &[LarkToken]) -> BracketCounts {
    let mut counted = BracketCounts::default();
    let mut open: usize = 0;
    for token in tokens {
        let text = &source[token.range.clone()];
        let inner = match token.kind {
            LarkKind::Open => {
                open += 1;
                BracketCounts { nesting: 0, opened: 1 }
            }
            LarkKind::Close => {
                open = open.saturating_sub(1);
                continue;
            }
            LarkKind::Regex => count_brackets(text, Syntax::Regex),
            LarkKind::Json => count_brackets(text, Syntax::Json),
            _ => continue,
        };
        counted.opened += inner.opened;
        counted.nesting = counted.nesting.max(open + inner.nesting);
    }
    counted
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::lark_tokens;

    fn check(source: &str, syntax: Syntax, nesting: usize, opened: usize) {
        let counted = count_brackets(source, syntax);
        assert_eq!((counted.nesting, counted.opened), (nesting, opened), "{source}");
    }

    fn check_lark(source: &str, nesting: usize, opened: usize) {
        let counted = count_lark_brackets(source, &lark_tokens::divide(source).unwrap());
        assert_eq!((counted.nesting, counted.opened), (nesting, opened), "{source}");
    }

    #[test]
    fn brackets_in_strings_and_comments_are_ignored() {
        check(r#"{"a": ["(((", "\"[["]}"#, Syntax::Json, 2, 2);
        check_lark("start: (\"((\" | \"[\") # ((((\n// ((((\na: [b]", 1, 2);
    }

    #[test]
    fn regex_brackets_count_unless_escaped_or_in_a_class() {
        check(r"(a(b)\(\()[(((]{2}", Syntax::Regex, 2, 3);
        check("[](]([^](](x))", Syntax::Regex, 2, 2);
        check_lark(r#"start: /\/((a")/ ("b")"#, 2, 3);
        check_lark("start: /[(/ ((b))", 2, 2);
    }

    #[test]
    fn special_token_name_does_not_hide_later_brackets() {
        check_lark(r#"start: <"> ((<//> (<#> "(""#, 3, 3);
    }

    #[test]
    fn brackets_of_json_values_count_within_those_around_them() {
        check_lark(r#"start: (%json {"a": ["(", [1]]} (%regex {"b": {}}))"#, 4, 7);
    }

    #[test]
    fn unclosed_brackets_count_and_unopened_ones_do_not() {
        check(&"[".repeat(100_000), Syntax::Json, 100_000, 100_000);
        check("}}}{", Syntax::Json, 1, 1);
    }
}
